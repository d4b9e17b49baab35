"""Which requests have run out of time. Owns a heap of deadlines; knows no clock."""

import heapq
from itertools import count

from pagedjax.scheduling.request import Request


class Deadlines:
    """Deadlines of requests that have one."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Request]] = []
        self._serial = count()
        self._max_length = 64

    def add(self, request: Request) -> None:
        """Watch a request that has a deadline."""
        if request.deadline < float("inf"):
            heapq.heappush(self._heap, (request.deadline, next(self._serial), request))
            if len(self._heap) > self._max_length:
                self._forget_finished()

    def expired(self, now: float) -> list[Request]:
        """Return unfinished requests whose deadline is over, each once."""
        expired = []
        while self._heap and self._heap[0][0] <= now:
            request = heapq.heappop(self._heap)[2]
            if not request.is_finished:
                expired.append(request)
        return expired

    def _forget_finished(self) -> None:
        """Drop those that have ended in time, which is nearly all."""
        self._heap = [entry for entry in self._heap if not entry[2].is_finished]
        heapq.heapify(self._heap)
        self._max_length = max(64, 2 * len(self._heap))
