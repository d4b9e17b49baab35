"""Ctrl-C during work that must not be torn in half. Knows nothing of engines."""

import signal
import threading
import time
import types
from typing import Any

PATIENCE = 3.0  # seconds from the first Ctrl-C on in which another one is held back too


class InterruptAfterwards:
    """Holds back Ctrl-C while the `with` block runs, unless it goes on for PATIENCE and another one comes.

    Whoever handled the signal before still does, only later.
    """

    def __enter__(self) -> None:
        self._seen: tuple[int, types.FrameType | None] | None = None
        self._first_time = 0.0
        self._handler: Any = None
        if threading.current_thread() is threading.main_thread():
            handler = signal.getsignal(signal.SIGINT)
            if callable(handler):  # otherwise it is ignored, or ends the process
                self._handler = handler
                signal.signal(signal.SIGINT, self._note)

    def __exit__(self, *exception: object) -> None:
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)
            if self._seen is not None:
                self._handler(*self._seen)

    def _note(self, number: int, frame: types.FrameType | None) -> None:
        if self._seen is None:
            self._seen, self._first_time = (number, frame), time.monotonic()
        elif time.monotonic() - self._first_time > PATIENCE:
            self._handler(number, frame)
