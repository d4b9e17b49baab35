"""Prompts as requests send them: texts or token ids, one or several. Every one ends as token ids."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pagedjax import AsyncEngine, InvalidRequestError
from servers.checks import is_token_ids

MAX_PROMPTS = 1024  # in one request


@dataclass(frozen=True)
class Truncation:
    """The fields truncate_prompt_tokens and truncation_side. `length` None keeps everything."""

    length: int | None
    side: str

    def apply(self, token_ids: list[int]) -> list[int]:
        """Return the last `length` ids, or the first ones where the right side is cut."""
        if self.length is None:
            return token_ids
        return token_ids[-self.length :] if self.side == "left" else token_ids[: self.length]


def truncation(engine: AsyncEngine, fields: Mapping[str, Any], *, max_tokens: int | None) -> Truncation:
    """Read the fields that shorten prompts; a length of -1 keeps what fits beside `max_tokens` of output.

    Raises:
      InvalidRequestError: no prompt of that length can run.
    """
    length, limit = fields["truncate_prompt_tokens"], engine.config.max_model_len
    assert limit is not None, "the engine resolves it"
    if length is not None and length != -1 and not 1 <= length < limit:
        raise InvalidRequestError(
            f"truncate_prompt_tokens is {length}; it must be -1, or at least 1 and below max_model_len {limit}",
            param="truncate_prompt_tokens",
        )
    if length == -1:
        length = max(1, limit - max(1, max_tokens or 1))
    return Truncation(length, fields["truncation_side"])


@dataclass(frozen=True)
class Prompt:
    """One prompt. `text` is None where the client sent ids, or the text was truncated."""

    token_ids: list[int]
    text: str | None = None


def check_prompts(value: Any) -> list[str] | list[list[int]]:
    """Return the `prompt` field as a list of texts or a list of token id lists.

    Raises:
      InvalidRequestError: it is neither, or a prompt is empty, or there are too many.
    """
    prompts = [value] if isinstance(value, str) or (is_token_ids(value) and value) else value
    is_list = isinstance(prompts, list) and bool(prompts)
    if not is_list or not (all(isinstance(one, str) for one in prompts) or all(map(is_token_ids, prompts))):
        raise InvalidRequestError(
            "prompt must be a string, a list of strings, a list of token ids or a list of such lists, and not empty",
            param="prompt",
        )
    if not all(prompts):
        raise InvalidRequestError("prompt is empty; send at least one token", param="prompt")
    if len(prompts) > MAX_PROMPTS:
        raise InvalidRequestError(
            f"prompt holds {len(prompts)} prompts, the limit is {MAX_PROMPTS}; send fewer", param="prompt"
        )
    return prompts


async def encode_prompt(
    engine: AsyncEngine, text: str, truncated: Truncation, *, add_special_tokens: bool, param: str = "prompt"
) -> Prompt:
    """Tokenize, unless the text is so long that it cannot fit; then truncate."""
    if len(text) > engine.max_prompt_chars:
        raise InvalidRequestError(
            f"the prompt has {len(text)} characters, more than {engine.max_prompt_chars} never fit max_model_len "
            f"{engine.config.max_model_len}; shorten it or raise --max-model-len",
            param=param,
        )
    token_ids = await engine.encode(text, add_special_tokens)
    kept = truncated.apply(token_ids)
    return Prompt(kept, text if len(kept) == len(token_ids) else None)


def of_token_ids(engine: AsyncEngine, token_ids: list[int], truncated: Truncation) -> Prompt:
    """Take ids as they are, unless there are so many that the engine need not look at each."""
    limit = engine.config.max_model_len
    assert limit is not None, "the engine resolves it"
    token_ids = truncated.apply(token_ids)
    if len(token_ids) > limit:
        raise InvalidRequestError(
            f"prompt has {len(token_ids)} tokens, max_model_len is {limit}; shorten it or raise --max-model-len",
            param="prompt",
        )
    return Prompt(token_ids)
