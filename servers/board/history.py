"""The engine's statistics once a second for the last minutes: what the board draws, and what it judges the load by."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pagedjax import EngineConfig
from servers.board.bottleneck import Load

INTERVAL = 1.0  # seconds
NUM_KEPT = 300
WINDOW = 15  # samples that the present is made of


@dataclass(frozen=True)
class Sample:
    """Statistics at one moment, on time.monotonic()."""

    time: float
    stats: Mapping[str, float]
    num_iterations: int
    num_iteration_tokens: float


class History:
    """The newest samples, oldest first."""

    def __init__(self, first: Sample):
        self.samples = deque([first], maxlen=NUM_KEPT)

    def rates(self, name: str) -> list[float]:
        """Return the growth per second of a counter, between each two samples."""
        pairs = zip(self.samples, list(self.samples)[1:], strict=False)
        return [(new.stats[name] - old.stats[name]) / max(new.time - old.time, 1e-9) for old, new in pairs]

    def growth(self, name: str) -> float:
        """Return by how much a statistic has grown over all samples."""
        return _growth(list(self.samples), name)

    def load(self, config: EngineConfig) -> Load:
        """Sum up the window."""
        recent = self._window()
        seconds = max(recent[-1].time - recent[0].time, 1e-9)
        num_iterations = recent[-1].num_iterations - recent[0].num_iterations
        num_tokens = recent[-1].num_iteration_tokens - recent[0].num_iteration_tokens
        return Load(
            num_running=_mean(recent, "num_requests_running"),
            num_waiting=_mean(recent, "num_requests_waiting"),
            waiting_growth=_growth(recent, "num_requests_waiting") / seconds,
            kv_cache_usage=_mean(recent, "kv_cache_usage_perc"),
            num_preemptions=_growth(recent, "num_preemptions"),
            num_iterations=num_iterations,
            tokens_per_iteration=num_tokens / max(num_iterations, 1),
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens or 0,
        )

    def _window(self) -> list[Sample]:
        return list(self.samples)[-WINDOW:]


async def keep_history(history: History, take_sample: Callable[[], Sample]) -> None:
    """Add a sample every INTERVAL until cancelled."""
    while True:
        await asyncio.sleep(INTERVAL)
        history.samples.append(take_sample())


def sample(stats: Mapping[str, float], num_iterations: int, num_iteration_tokens: float) -> Sample:
    """Return a sample of now."""
    return Sample(time.monotonic(), stats, num_iterations, num_iteration_tokens)


def _growth(samples: list[Sample], name: str) -> float:
    return samples[-1].stats[name] - samples[0].stats[name]


def _mean(samples: list[Sample], name: str) -> float:
    recent = samples[1:] or samples
    return sum(one.stats[name] for one in recent) / len(recent)
