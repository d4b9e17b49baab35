"""vLLM's statistics line, every ten seconds while there is something to say."""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping

logger = logging.getLogger(__name__)

INTERVAL = 10.0  # seconds


class StatsLog:
    """Turns successive statistics of an engine into lines."""

    def __init__(self, stats: Mapping[str, float], now: float):
        self._stats = stats
        self._time = now
        self._hit_rate = 0.0
        self._was_busy = False

    def line(self, stats: Mapping[str, float], now: float) -> str | None:
        """Return the line for the time since the last call; None while idle, after one last line."""
        seconds = max(now - self._time, 1e-9)
        grown = {name: stats[name] - self._stats[name] for name in ("prompt_tokens", "generation_tokens")}
        queries = stats["prefix_cache_queries"] - self._stats["prefix_cache_queries"]
        if queries:
            self._hit_rate = (stats["prefix_cache_hits"] - self._stats["prefix_cache_hits"]) / queries
        self._stats, self._time = stats, now
        running, waiting = stats["num_requests_running"], stats["num_requests_waiting"]
        is_busy = bool(running or waiting or any(grown.values()))
        is_silent = not (is_busy or self._was_busy)
        self._was_busy = is_busy
        if is_silent:
            return None
        return (
            f"Engine 000: Avg prompt throughput: {grown['prompt_tokens'] / seconds:.1f} tokens/s, "
            f"Avg generation throughput: {grown['generation_tokens'] / seconds:.1f} tokens/s, "
            f"Running: {running:.0f} reqs, Waiting: {waiting:.0f} reqs, "
            f"GPU KV cache usage: {100 * stats['kv_cache_usage_perc']:.1f}%, "
            f"Prefix cache hit rate: {100 * self._hit_rate:.1f}%"
        )


async def log_stats(read_stats: Callable[[], Mapping[str, float]]) -> None:
    """Log a line every INTERVAL until cancelled."""
    log = StatsLog(read_stats(), time.monotonic())
    while True:
        await asyncio.sleep(INTERVAL)
        line = log.line(read_stats(), time.monotonic())
        if line is not None:
            logger.info("%s", line)
