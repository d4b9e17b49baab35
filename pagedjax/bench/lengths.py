"""Ranges of token counts, as flags write them and as samples draw them."""

import math
import re
from dataclasses import dataclass

import numpy as np

from pagedjax.errors import ConfigError


@dataclass(frozen=True)
class Lengths:
    """Token counts drawn uniformly from `low` to `high`, both included."""

    low: int
    high: int

    @classmethod
    def parse(cls, flag: str, text: str) -> "Lengths":
        """Read "512" or "100:1024".

        Raises:
          ConfigError: it is neither, or holds no positive count.
        """
        matched = re.fullmatch(r"(\d+)(?::(\d+))?", text)
        low, high = (int(matched[1]), int(matched[2] or matched[1])) if matched else (0, 0)
        if not 1 <= low <= high:
            raise ConfigError(f"{flag} is {text!r:.40}; give a number of tokens, or a range such as 100:1024")
        return cls(low, high)

    @classmethod
    def around(cls, length: int, ratio: float) -> "Lengths":
        """From `length` less that share of it to `length` plus that share, as vLLM's --random-range-ratio draws."""
        return cls(max(1, math.floor(length * (1 - ratio))), math.ceil(length * (1 + ratio)))

    def draw(self, rng: np.random.Generator, count: int) -> list[int]:
        """Return `count` lengths."""
        return rng.integers(self.low, self.high + 1, count).tolist()
