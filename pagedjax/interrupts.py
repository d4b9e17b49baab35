"""Ctrl-C during work that must not be torn in half. Knows nothing of engines."""

import signal
import threading
import types
from typing import Any


class InterruptAfterwards:
    """Holds back Ctrl-C while the `with` block runs; a second one goes through at once.

    Whoever handled the signal before still does, only later.
    """

    def __enter__(self) -> None:
        self._seen: tuple[int, types.FrameType | None] | None = None
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
        if self._seen is not None:
            self._handler(number, frame)
        self._seen = (number, frame)
