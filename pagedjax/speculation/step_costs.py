"""What a step costs at one size of batch, plain and with drafts to verify, from the times of steps that ran.

Times are medians of the last few, so that a pause of the host counts for nothing. Nothing is assumed about the device:
what was not measured is interpolated, and beyond the largest number of drafts that was measured the cost is taken not
to grow, so that a larger one is tried and then known. Owns the times of one size of batch.
"""

from collections import deque

import numpy as np

MEMORY = 15  # steps: drifts such as growing contexts are followed within these
MIN_MEASURED = 3  # steps before a median counts


class Times:
    """The last few steps of one kind: their median time in seconds, and the mean size of what they verified."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=MEMORY)
        self.median = 0.0
        self.size = 0.0

    def __len__(self) -> int:
        return len(self._recent)

    def add(self, seconds: float, size: float = 0.0) -> None:
        """Take note of one more."""
        self._recent.append(seconds)
        self.median = sorted(self._recent)[len(self._recent) // 2]
        self.size += (size - self.size) / len(self._recent)

    def clear(self) -> None:
        """Measure anew; the old median serves until the next step."""
        self._recent.clear()


class StepCosts:
    """Times of plain steps, and of steps that verify drafts by their size: drafts a request, of all or the longest."""

    def __init__(self, max_drafts: int) -> None:
        self.plain = Times()
        self.num_measured = 0  # of those with drafts
        self._verifying = [Times() for _ in range(max_drafts)]
        self._known: list[Times] = []

    @property
    def is_plain_known(self) -> bool:
        """Whether enough plain steps were measured."""
        return len(self.plain) >= MIN_MEASURED

    @property
    def max_known(self) -> float:
        """The largest size whose cost is known; 0 if none is."""
        return self._known[-1].size if self._known else 0.0

    def add(self, size: float, seconds: float) -> None:
        """Take note of a step that verified drafts."""
        self.num_measured += 1
        times = self._verifying[max(1, round(size)) - 1]
        times.add(seconds, size)
        if len(times) == MIN_MEASURED:
            self._known = [times for times in self._verifying if len(times) >= MIN_MEASURED]

    def relative(self, sizes: np.ndarray) -> np.ndarray:
        """Return what steps of these sizes cost, in plain steps."""
        known_sizes = [0.0, *(times.size for times in self._known)]
        seconds = [self.plain.median, *(times.median for times in self._known)]
        return np.interp(sizes, known_sizes, seconds) / self.plain.median

    def describe(self) -> str:
        """Return the measured times in words."""
        parts = [f"a plain step takes {self.plain.median * 1e3:.2f} ms"]
        parts += [f"{times.median * 1e3:.2f} ms with {times.size:.1f} drafts a request" for times in self._known]
        return ", ".join(parts)
