"""Prompts as requests send them: texts or token ids, one or several. Every one ends as token ids."""

from dataclasses import dataclass
from typing import Any

from pagedjax import AsyncEngine, InvalidRequestError
from servers.checks import is_token_ids

MAX_PROMPTS = 1024  # in one request


@dataclass(frozen=True)
class Prompt:
    """One prompt. `text` is None where the client sent ids."""

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


async def encode_prompt(engine: AsyncEngine, text: str, *, add_special_tokens: bool, param: str = "prompt") -> Prompt:
    """Tokenize, unless the text is so long that it cannot fit."""
    if len(text) > engine.max_prompt_chars:
        raise InvalidRequestError(
            f"the prompt has {len(text)} characters, more than {engine.max_prompt_chars} never fit max_model_len "
            f"{engine.config.max_model_len}; shorten it or raise --max-model-len",
            param=param,
        )
    return Prompt(await engine.encode(text, add_special_tokens), text)


def of_token_ids(engine: AsyncEngine, token_ids: list[int]) -> Prompt:
    """Take ids as they are, unless there are so many that the engine need not look at each."""
    limit = engine.config.max_model_len
    assert limit is not None, "the engine resolves it"
    if len(token_ids) > limit:
        raise InvalidRequestError(
            f"prompt has {len(token_ids)} tokens, max_model_len is {limit}; shorten it or raise --max-model-len",
            param="prompt",
        )
    return Prompt(token_ids)
