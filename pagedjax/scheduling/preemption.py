"""What a preemption costs: to copy a request's blocks to the host and back, or to compute its tokens again.

Owns what it was told of the speed of copies and of prompts. Knows no queues and no blocks.
"""

import logging
import math
from dataclasses import dataclass
from typing import Literal

from pagedjax.scheduling.request import Request

logger = logging.getLogger(__name__)

type PreemptionMode = Literal["auto", "swap", "recompute"]
FORGETTING = 0.98  # a step: the speed of prompts follows the load


@dataclass(frozen=True)
class CopySpeed:
    """Seconds that a chunk of blocks takes to the host and back, as measured at start; 0 where nothing was."""

    seconds_out: float = 0.0
    seconds_in: float = 0.0


class PreemptionCosts:
    """Chooses the cheaper way. Until a prompt was measured, computing again counts as the dearer one."""

    def __init__(self, mode: PreemptionMode = "auto", speed: CopySpeed | None = None) -> None:
        self.mode: PreemptionMode = mode
        self._speed = speed or CopySpeed()
        self._num_tokens = self._seconds = 0.0

    def note_step(self, *, num_requests: int, num_tokens: int, seconds: float) -> None:
        """Take note of a step: its requests, its tokens and how long the device took."""
        if num_tokens > 2 * num_requests:  # mostly prompts
            self._num_tokens = FORGETTING * self._num_tokens + num_tokens
            self._seconds = FORGETTING * self._seconds + seconds

    def prefers_swap(self, victim: Request, *, num_tokens: int, num_out: int, num_in: int, has_room: bool) -> bool:
        """Choose for a victim and log why: compute `num_tokens` again, or copy chunks out now and in later."""
        swap = num_out * self._speed.seconds_out + num_in * self._speed.seconds_in
        recompute = self._recompute_seconds(num_tokens)
        is_swapped = has_room and (self.mode == "swap" or (self.mode == "auto" and swap < recompute))
        ways = f"to swap them {1000 * swap:.2f} ms" if has_room else "to swap them more host memory"
        if not num_in:
            ways = "none of them fill a block that is not shared"
        why = f"to compute them takes {1000 * recompute:.2f} ms, {ways}"
        log_preemption(victim, "swap" if is_swapped else "recompute", num_tokens, why)
        return is_swapped

    def is_worth_copying(self, *, num_chunks: int, num_tokens: int) -> bool:
        """Whether to bring chunks back takes less time than to compute the tokens in them."""
        seconds = num_chunks * self._speed.seconds_in
        return self.mode == "swap" or seconds < self._recompute_seconds(num_tokens)

    def _recompute_seconds(self, num_tokens: int) -> float:
        return num_tokens * self._seconds / self._num_tokens if self._num_tokens else math.inf


def log_preemption(victim: Request, mode: Literal["swap", "recompute"], num_tokens: int, why: str) -> None:
    """Say which request is preempted, what becomes of its computed tokens, and why that."""
    logger.info("preempting %s: %s %d tokens (%s)", victim.request_id, mode, num_tokens, why)
