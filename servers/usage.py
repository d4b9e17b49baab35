"""Count the tokens of one HTTP request for its `usage` object."""

from collections.abc import Sequence
from typing import Any

from pagedjax import RequestOutput
from servers.prompts import Prompt


class Usage:
    """Grows with each output of the request's streams."""

    def __init__(self, prompts: Sequence[Prompt]):
        self._num_prompt_tokens = sum(len(prompt.token_ids) for prompt in prompts)
        self._num_completion_tokens = 0
        self._num_cached_tokens: dict[str, int] = {}

    def add(self, output: RequestOutput) -> None:
        """Count a DELTA or a final output."""
        self._num_completion_tokens += sum(len(completion.token_ids) for completion in output.outputs)
        self._num_cached_tokens[output.request_id] = output.num_cached_tokens

    def as_json(self) -> dict[str, Any]:
        """Return what has been counted so far."""
        return {
            "prompt_tokens": self._num_prompt_tokens,
            "completion_tokens": self._num_completion_tokens,
            "total_tokens": self._num_prompt_tokens + self._num_completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self._num_cached_tokens.values())},
        }
