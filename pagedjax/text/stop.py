"""Find stop strings in text that arrives in pieces.

Owns the text held back while it may still become a stop string, and never holds back more: what is
held is always the start of one. The outcome does not depend on how the text was cut into pieces.
It does not know tokens, finish reasons or min_tokens.
"""

from collections.abc import Sequence
from typing import NamedTuple


class StopResult(NamedTuple):
    """Text that may go out now, and the stop string that ended it, if one did."""

    text_to_emit: str
    matched: str | None


class StopStrings:
    """Watches one completion. The stop string whose end comes first wins; of two that end together, the longer."""

    def __init__(self, stop: Sequence[str], *, include_stop_str_in_output: bool):
        self._stop = tuple(stop)
        self._include = include_stop_str_in_output
        self._tail = ""  # the longest end of the text so far that starts a stop string
        self._num_emitted = 0  # characters of the tail that went out already
        self._matched: str | None = None

    def push(self, text: str, *, may_match: bool = True) -> StopResult:
        """Add `text`. After a match all further text is dropped.

        A stop string that is complete while it may not match is text like any other; one that only began then counts.
        """
        if self._matched is not None:
            return StopResult("", self._matched)
        if not self._stop:
            return StopResult(text, None)
        text = self._tail + text
        match = self._first_match(text) if may_match else None
        if match is None:
            tail_start = min(_partial_match_start(text, stop) for stop in self._stop)
            end = len(text) if self._include else tail_start
        else:
            start, self._matched = match
            tail_start = len(text)
            end = start + len(self._matched) if self._include else start
        result = StopResult(text[self._num_emitted : end], self._matched)
        self._tail = text[tail_start:]
        self._num_emitted = max(end - tail_start, 0)
        return result

    def flush(self) -> str:
        """Return what was held back, when the completion ends for another reason."""
        held, self._tail, self._num_emitted = self._tail[self._num_emitted :], "", 0
        return held

    def _first_match(self, text: str) -> tuple[int, str] | None:
        found = [(start, stop) for stop in self._stop if (start := text.find(stop)) >= 0]
        return min(found, key=lambda match: (match[0] + len(match[1]), match[0]), default=None)


def _partial_match_start(text: str, stop: str) -> int:
    """Where the longest proper prefix of `stop` that ends `text` starts; len(text) if there is none."""
    start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while start >= 0 and not stop.startswith(text[start:]):
        start = text.find(stop[0], start + 1)
    return start if start >= 0 else len(text)
