"""Log probabilities in the shapes that clients expect: chat's, completions' and vLLM's for prompts."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pagedjax import CompletionOutput, Logprob

FLOOR = -9999.0  # JSON has no minus infinity


def chat_logprobs(completion: CompletionOutput, num_top: int) -> dict[str, Any] | None:
    """Return `choices[].logprobs` of a chat, None if none were asked for."""
    if completion.logprobs is None:
        return None
    pairs = zip(completion.token_ids, completion.logprobs, strict=False)
    return {
        "content": [
            _chat_entry(entries[token_id]) | {"top_logprobs": [_chat_entry(one) for one in _top(entries, num_top)]}
            for token_id, entries in pairs
        ]
    }


def completion_logprobs(
    token_ids: Sequence[int],
    entries_by_token: Sequence[Mapping[int, Logprob] | None],
    offset: int,
    decode: Callable[[list[int]], str],
) -> dict[str, Any]:
    """Return `choices[].logprobs` of a completion; a token without entries (the first of a prompt) has nulls.

    `offset` is the number of characters of the choice's tokens before these.
    """
    result: dict[str, list[Any]] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
    for token_id, entries in zip(token_ids, entries_by_token, strict=False):
        text = decode([token_id]) if entries is None else _text(entries[token_id])
        result["text_offset"].append(offset)
        result["tokens"].append(text)
        result["token_logprobs"].append(None if entries is None else _value(entries[token_id]))
        result["top_logprobs"].append(
            None if entries is None else {_text(one): _value(one) for one in entries.values()}
        )
        offset += len(text)
    return result


def num_chars(logprobs: Mapping[str, Any]) -> int:
    """Return the number of characters of the tokens in a completion's logprobs."""
    return sum(map(len, logprobs["tokens"]))


def prompt_logprobs(entries_by_token: Sequence[Mapping[int, Logprob] | None] | None) -> list[Any] | None:
    """Return vLLM's `prompt_logprobs`: null for the first token, then objects from token id to value, rank and text."""
    if entries_by_token is None:
        return None
    return [
        None if entries is None else {str(token_id): _ranked_entry(one) for token_id, one in entries.items()}
        for entries in entries_by_token
    ]


def _top(entries: Mapping[int, Logprob], num_top: int) -> list[Logprob]:
    """The most likely tokens, best first; the sampled one may be beyond them."""
    return sorted((one for one in entries.values() if one.rank <= num_top), key=lambda one: one.rank)


def _chat_entry(logprob: Logprob) -> dict[str, Any]:
    text = _text(logprob)
    return {"token": text, "logprob": _value(logprob), "bytes": list(text.encode())}


def _ranked_entry(logprob: Logprob) -> dict[str, Any]:
    return {"logprob": _value(logprob), "rank": logprob.rank, "decoded_token": logprob.decoded_token}


def _text(logprob: Logprob) -> str:
    return logprob.decoded_token or ""


def _value(logprob: Logprob) -> float:
    return max(logprob.logprob, FLOOR)
