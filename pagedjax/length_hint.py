"""Notices that max_model_len is far above what requests use, which costs memory and says nothing about the load."""

import math

NUM_REQUESTS = 200  # finished ones, of which the 99th percentile is taken
FAR_ABOVE = 4.0  # times the suggestion


class LengthHint:
    """Sees the length of each finished request; says once what would do."""

    def __init__(self, max_model_len: int) -> None:
        self._max_model_len = max_model_len
        self._lengths: list[int] = []
        self._is_said = False

    def note(self, num_tokens: int) -> str | None:
        """Take note of a request of so many tokens, prompt and output; return the hint if it is due."""
        if self._is_said:
            return None
        self._lengths.append(num_tokens)
        if len(self._lengths) < NUM_REQUESTS:
            return None
        longest = sorted(self._lengths)[math.ceil(0.99 * NUM_REQUESTS) - 1]
        self._lengths = []
        suggestion = -(-6 * longest // 5)
        if suggestion * FAR_ABOVE > self._max_model_len:
            return None
        self._is_said = True
        return (
            f"Hint: max_model_len is {self._max_model_len:,}, 99 % of the last {NUM_REQUESTS} requests had {longest:,} "
            f"tokens or less; --max-model-len {suggestion} (a fifth more) makes block tables and what is kept free for "
            "the longest request smaller, and refuses longer ones"
        )
