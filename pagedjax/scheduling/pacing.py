"""How fast new prompts come in beside requests that generate: later, as vLLM's delay factor says, or in smaller chunks.

Owns what it was told of past steps' times. Knows no clock and no queues.
"""

from collections.abc import Iterable

from pagedjax.scheduling.request import Request

MIN_CHUNK = 16  # tokens of prompts that an iteration may always compute, so that they come to an end
FIRST_CHUNK = 64  # before anything was measured
AIM = 0.8  # of the target: single steps take longer than they should


class Pacing:
    """Limits on what an iteration takes in. Without a delay factor and a target there are none.

    The limit on prompt tokens moves with every step that computed at least half as many: one that was too slow lowers
    it in proportion to its excess, one that was fast enough raises it, by a factor of two at most.
    """

    def __init__(self, *, delay_factor: float = 0.0, target_seconds: float | None = None) -> None:
        self._delay_factor = delay_factor
        self._target_seconds = target_seconds
        self._last_prompt_seconds = 0.0
        self._chunk = FIRST_CHUNK

    def admits(self, waiting: Iterable[Request], now: float, *, is_idle: bool) -> bool:
        """Return whether waiting requests may come in: the oldest has waited for delay_factor times the last prompt.

        `now` is on the clock of the arrival times; an idle scheduler takes everybody at once.
        """
        if not self._delay_factor or is_idle:
            return True
        oldest = min((request.arrival_time for request in waiting), default=now)
        return now - oldest > self._delay_factor * self._last_prompt_seconds

    def max_prompt_tokens(self, running: Iterable[Request]) -> int | None:
        """Return how many tokens of prompts the next iteration may compute; None if that delays nobody, or may."""
        if self._target_seconds is None:
            return None
        is_generating = any(request.num_computed_tokens >= request.num_prompt_tokens for request in running)
        return self._chunk if is_generating else None

    def note_step(self, *, num_requests: int, num_tokens: int, seconds: float) -> None:
        """Take note of a step that sampled: its requests, its tokens and how long the device took."""
        num_prompt_tokens = num_tokens - num_requests
        if num_prompt_tokens <= 0:
            return
        self._last_prompt_seconds = seconds
        if self._target_seconds is None or 2 * num_prompt_tokens < self._chunk:
            return
        ratio = AIM * self._target_seconds / seconds
        proposed = int(num_prompt_tokens * min(max(ratio, 0.5), 2.0))
        self._chunk = max(MIN_CHUNK, min(self._chunk, proposed) if ratio < 1 else max(self._chunk, proposed))
