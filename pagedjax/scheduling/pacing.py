"""How fast new prompts come in beside requests that generate: later, as vLLM's delay factor says, or in smaller chunks.

Owns what it was told of past steps' times. Knows no clock and no queues.
"""

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence

from pagedjax.scheduling.request import Request

AIM = 0.8  # of the target: single steps take longer than they should
FORGETTING = 0.995  # a step: a size that was slow once is tried again some time


class Pacing:
    """Limits on what an iteration takes in. Without a delay factor and a target there are none.

    A step takes as long as the bucket its tokens are padded to. The limit is the largest bucket that was fast enough
    when it was measured, or the next one, which is tried once; the least is one more token than requests generate.
    """

    def __init__(
        self, *, delay_factor: float = 0.0, target_seconds: float | None = None, token_buckets: Sequence[int] = (1,)
    ) -> None:
        self._delay_factor = delay_factor
        self._target_seconds = target_seconds
        self._buckets = token_buckets
        self._last_prompt_seconds = 0.0
        self._seconds: dict[int, float] = {}  # by bucket

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
        num_generating = sum(request.num_computed_tokens >= request.num_prompt_tokens for request in running)
        return max(1, self._limit(num_generating) - num_generating) if num_generating else None

    def note_step(self, *, num_requests: int, num_tokens: int, seconds: float) -> None:
        """Take note of a step: its requests, its tokens and how long the device took."""
        if num_tokens <= num_requests:
            return  # no tokens of prompts
        self._last_prompt_seconds = seconds
        if self._target_seconds is None:
            return
        bucket = self._buckets[min(bisect_left(self._buckets, num_tokens), len(self._buckets) - 1)]
        for other in self._seconds:
            self._seconds[other] *= FORGETTING
        self._seconds[bucket] = max(seconds, 0.8 * self._seconds.get(bucket, seconds) + 0.2 * seconds)

    def _limit(self, num_generating: int) -> int:
        """Tokens of all requests: the largest bucket that should keep to the target."""
        assert self._target_seconds is not None, "the caller asks first"
        limit, smaller = 0, math.inf
        for bucket in self._buckets:
            seconds = self._seconds.get(bucket, smaller)  # the first that was not measured is tried
            smaller = self._seconds.get(bucket, math.inf)
            if bucket > num_generating and (not limit or seconds <= AIM * self._target_seconds):
                limit = bucket
        return limit
