"""Carry events from the engine thread to the mailboxes of one event loop, and no faster than their consumers take them.

A round puts what has come into the mailboxes; the consumers that it wakes run next. If the engine has made more by the
time that all of them have run, the loop is the slower one: then rounds begin LAGGING_INTERVAL apart, so that a consumer
finds several deltas joined, and the engine thread finds the interpreter free between two rounds. Otherwise nothing
waits. Owns what is on its way; knows nothing of what it carries.
"""

import asyncio
import threading
from collections.abc import Callable, Sequence

LAGGING_INTERVAL = 0.012  # seconds; serving a round of 256 streams takes about 5 ms more


class Courier[Parcel]:
    """Calls `dispatch` in `loop` with what was given to `carry` in any thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, dispatch: Callable[[Sequence[Parcel]], None]):
        self.loop = loop
        self._dispatch = dispatch
        self._parcels: list[Parcel] = []
        self._is_under_way = False  # a round was called for, or is not over
        self._began = 0.0  # the latest one, on the loop's clock
        self._lock = threading.Lock()

    def carry(self, parcels: Sequence[Parcel]) -> None:
        """Dispatch these in a later iteration of the loop, after those that were given before.

        Raises:
          RuntimeError: the loop has closed.
        """
        with self._lock:
            self._parcels += parcels
            if self._is_under_way:
                return
            self._is_under_way = True
        self.loop.call_soon_threadsafe(self._begin_round)

    def _begin_round(self) -> None:
        with self._lock:
            parcels, self._parcels = self._parcels, []
        self._began = self.loop.time()
        try:
            self._dispatch(parcels)
        finally:
            self.loop.call_soon(self._end_round)  # after every consumer that was woken

    def _end_round(self) -> None:
        with self._lock:
            self._is_under_way = bool(self._parcels)
        if self._is_under_way:
            self.loop.call_at(self._began + LAGGING_INTERVAL, self._begin_round)
