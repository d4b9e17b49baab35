"""What the engine's iterations did and how long they took: plain counts for metrics, added to once an iteration.

Times are seconds of `time.perf_counter()`. Knows no names of metrics' formats and no devices.
"""

import time
from bisect import bisect_left
from dataclasses import dataclass, field

from pagedjax.scheduling.step_plan import SchedulerOutput

TOKEN_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
SECOND_BOUNDS = (
    0.0005,
    0.001,
    0.002,
    0.003,
    0.004,
    0.006,
    0.008,
    0.012,
    0.016,
    0.024,
    0.05,
    0.1,
    0.25,
    0.5,
    1,
    2.5,
    10,
)


@dataclass
class Histogram:
    """Counts of values up to each bound (itself included), a last count of those beyond, and their sum."""

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    sum: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def observe(self, value: float, count: int = 1) -> None:
        """Count a value, which may have occurred several times."""
        self.counts[bisect_left(self.bounds, value)] += count
        self.sum += value * count

    def copy(self) -> "Histogram":
        """Return what has been counted so far, for another thread."""
        return Histogram(self.bounds, list(self.counts), self.sum)


class IterationStats:
    """Sums over iterations. `weight_bytes` and `kv_bytes_per_token` are what a step reads of each."""

    def __init__(self, *, weight_bytes: int, kv_bytes_per_token: float):
        self._weight_bytes = weight_bytes
        self._kv_bytes_per_token = kv_bytes_per_token
        self._tokens = Histogram(TOKEN_BOUNDS)
        self._host_seconds = Histogram(SECOND_BOUNDS)
        self._step_seconds = Histogram(SECOND_BOUNDS)
        self._busy_seconds = 0.0
        self._busy_until = 0.0
        self._num_starved = 0
        self._read_bytes = 0.0

    def note_dispatch(self, plan: SchedulerOutput, *, is_starved: bool) -> None:
        """Take note of a step that went to the device; starved if the device had finished everything before it."""
        self._num_starved += is_starved
        num_read = plan.num_tokens + sum([item.context_len for item in plan.scheduled])
        self._read_bytes += self._weight_bytes + num_read * self._kv_bytes_per_token

    def note_result(self, dispatched_time: float, *, num_tokens: int) -> float:
        """Take note that the step dispatched then has been read; return the seconds the device took, at the longest.

        `num_tokens` are those that it computed, without drafts that were refused.
        """
        now = time.perf_counter()
        self._tokens.observe(num_tokens)
        began = max(dispatched_time, self._busy_until)
        self._busy_seconds += now - began
        self._step_seconds.observe(now - began)
        self._busy_until = now
        return now - began

    def note_host(self, seconds: float) -> None:
        """Take note of the time that the host worked on an iteration, waiting for the device excluded."""
        self._host_seconds.observe(seconds)

    def counters(self) -> dict[str, float]:
        """Return the sums under their metric names."""
        return {
            "device_busy_seconds": self._busy_seconds,
            "device_starved_iterations": self._num_starved,
            "estimated_read_bytes_per_gpu": self._read_bytes,
        }

    def histograms(self) -> dict[str, Histogram]:
        """Return copies of the histograms under their metric names."""
        named = {
            "iteration_tokens_total": self._tokens,
            "iteration_host_time_seconds": self._host_seconds,
            "iteration_step_time_seconds": self._step_seconds,
        }
        return {name: histogram.copy() for name, histogram in named.items()}
