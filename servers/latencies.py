"""The newest latencies, for percentiles of now rather than since the start."""

import math
from collections import deque

NUM_KEPT = 2048


class Latencies:
    """Seconds of the last NUM_KEPT events of each kind."""

    def __init__(self) -> None:
        self.first_token: deque[float] = deque(maxlen=NUM_KEPT)
        self.between_tokens: deque[float] = deque(maxlen=NUM_KEPT)
        self.whole_request: deque[float] = deque(maxlen=NUM_KEPT)

    def percentiles(self) -> dict[str, dict[str, float] | None]:
        """Return p50, p90 and p99 of each kind in seconds; None of a kind that has not happened."""
        kinds = {
            "time_to_first_token": self.first_token,
            "inter_token_latency": self.between_tokens,
            "e2e_request_latency": self.whole_request,
        }
        return {name: _percentiles(sorted(values)) for name, values in kinds.items()}


def _percentiles(values: list[float]) -> dict[str, float] | None:
    """By the nearest rank."""
    if not values:
        return None
    return {f"p{p}": values[max(0, math.ceil(p / 100 * len(values)) - 1)] for p in (50, 90, 99)}
