"""Log probabilities in the shapes that clients expect: chat's, completions' and vLLM's for prompts."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pagedjax import CompletionOutput, Logprob

FLOOR = -9999.0  # JSON has no minus infinity


def chat_logprobs(completion: CompletionOutput, num_top: int, *, as_ids: bool = False) -> dict[str, Any] | None:
    """Return `choices[].logprobs` of a chat, None if none were asked for. `as_ids` names tokens by id."""
    if completion.logprobs is None:
        return None
    content = []
    for token_id, entries in zip(completion.token_ids, completion.logprobs, strict=False):
        top = [_chat_entry(one_id, one, as_ids) for one_id, one in _top(entries, num_top)]
        content.append(_chat_entry(token_id, entries[token_id], as_ids) | {"top_logprobs": top})
    return {"content": content}


def completion_logprobs(
    token_ids: Sequence[int],
    entries_by_token: Sequence[Mapping[int, Logprob] | None],
    offset: int,
    decode: Callable[[list[int]], str],
    *,
    as_ids: bool = False,
) -> tuple[dict[str, Any], int]:
    """Return `choices[].logprobs` of a completion; a token without entries (the first of a prompt) has nulls.

    `offset` is the number of characters of the choice's tokens before these; returned is the one after them.
    `as_ids` names tokens by id.
    """
    result: dict[str, list[Any]] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
    for token_id, entries in zip(token_ids, entries_by_token, strict=False):
        text = decode([token_id]) if entries is None else _text(entries[token_id])
        result["text_offset"].append(offset)
        result["tokens"].append(_id_name(token_id) if as_ids else text)
        result["token_logprobs"].append(None if entries is None else _value(entries[token_id]))
        result["top_logprobs"].append(None if entries is None else _best_by_name(entries, as_ids))
        offset += len(text)
    return result, offset


def prompt_logprobs(entries_by_token: Sequence[Mapping[int, Logprob] | None] | None) -> list[Any] | None:
    """Return vLLM's `prompt_logprobs`: null for the first token, then objects from token id to value, rank and text."""
    if entries_by_token is None:
        return None
    return [
        None if entries is None else {str(token_id): _ranked_entry(one) for token_id, one in entries.items()}
        for entries in entries_by_token
    ]


def _top(entries: Mapping[int, Logprob], num_top: int) -> list[tuple[int, Logprob]]:
    """The most likely tokens, best first; the sampled one may be beyond them."""
    return sorted((item for item in entries.items() if item[1].rank <= num_top), key=lambda item: item[1].rank)


def _best_by_name(entries: Mapping[int, Logprob], as_ids: bool) -> dict[str, float]:
    """Many tokens may have one text: all that are part of a character show U+FFFD. The most likely one stands."""
    best: dict[str, float] = {}
    for token_id, one in entries.items():
        name = _id_name(token_id) if as_ids else _text(one)
        best[name] = max(_value(one), best.get(name, FLOOR))
    return best


def _chat_entry(token_id: int, logprob: Logprob, as_id: bool) -> dict[str, Any]:
    text = _text(logprob)
    name = _id_name(token_id) if as_id else text
    token_bytes = text.encode() if logprob.token_bytes is None else logprob.token_bytes
    return {"token": name, "logprob": _value(logprob), "bytes": list(token_bytes)}


def _id_name(token_id: int) -> str:
    return f"token_id:{token_id}"


def _ranked_entry(logprob: Logprob) -> dict[str, Any]:
    return {"logprob": _value(logprob), "rank": logprob.rank, "decoded_token": logprob.decoded_token}


def _text(logprob: Logprob) -> str:
    return logprob.decoded_token or ""


def _value(logprob: Logprob) -> float:
    return max(logprob.logprob, FLOOR)
