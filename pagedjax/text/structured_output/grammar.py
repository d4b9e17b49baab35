"""Where one output stands in its form, and which tokens may come next.

Owns one matcher of llguidance. A mask is packed bits: token v is bit v % 32 of word v // 32. Knows no requests and
nothing of where masks go.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

ALL_BITS = 0xFFFFFFFF


@dataclass(frozen=True)
class Reasoning:
    """The two tokens around reasoning, and whether the prompt has begun it."""

    start_id: int
    end_id: int
    is_open: bool


class Grammar:
    """The form of one output, advanced token by token.

    Reasoning before the output proper is free, save that it cannot end the output. Where the prompt has not begun it,
    the first token decides: the token that begins it, or the output proper.
    """

    def __init__(self, matcher: Any, eos_token_ids: Sequence[int], reasoning: Reasoning | None):
        self._matcher = matcher
        self._eos_token_ids = eos_token_ids
        self._reasoning = reasoning
        self._is_reasoning = reasoning is not None and reasoning.is_open
        self._is_first = True
        self.error: str | None = None  # why it can go on no more

    @property
    def is_finished(self) -> bool:
        """Whether nothing more can follow."""
        return not self._is_reasoning and self.error is None and self._matcher.is_stopped()

    def accept(self, token_id: int) -> None:
        """Take in the token that was sampled under the last mask."""
        is_first, self._is_first = self._is_first, False
        if self._is_reasoning:
            self._is_reasoning = self._reasoning is None or token_id != self._reasoning.end_id
        elif is_first and self._reasoning is not None and token_id == self._reasoning.start_id:
            self._is_reasoning = True
        elif not self._matcher.consume_token(token_id):
            self._note_error()

    def copy(self) -> "Grammar":
        """Return a form that stands where this one stands and goes its own way."""
        copy = Grammar(self._matcher.deep_copy(), self._eos_token_ids, self._reasoning)
        copy._is_reasoning, copy._is_first, copy.error = self._is_reasoning, self._is_first, self.error
        return copy

    @property
    def masking_matcher(self) -> Any | None:
        """The matcher whose mask holds for the next token; None where all tokens but EOS may come."""
        return None if self._is_reasoning or self.error is not None else self._matcher

    def complete_mask(self, mask: np.ndarray) -> None:
        """Add reasoning to `mask`, [W] uint32, which holds the matcher's bits where `masking_matcher` is not None."""
        if self.masking_matcher is None:
            mask[:] = ALL_BITS
            for token_id in self._eos_token_ids:
                mask[token_id // 32] &= ALL_BITS ^ (1 << token_id % 32)
        elif self._matcher.is_error():
            self._note_error()
            mask[:] = ALL_BITS
        elif self._is_first and self._reasoning is not None:
            mask[self._reasoning.start_id // 32] |= 1 << self._reasoning.start_id % 32

    def _note_error(self) -> None:
        problem = self._matcher.get_error().split("<")[0].strip()
        self.error = f"the output's form could not be followed further: {problem:.200}"
