"""Questions to the engine between two steps, from any thread, and what the engine thread answers.

Owns what waits for an answer. Knows neither the engine nor what is asked.
"""

import itertools
import threading
from concurrent.futures import Future
from typing import Any

from pagedjax.errors import EngineDeadError


class Questions:
    """The open questions by number: what crosses to the engine thread is plain data. Each is answered once."""

    def __init__(self) -> None:
        self._by_number: dict[int, Future[Any]] = {}
        self._numbers = itertools.count()
        self._dead_reason: str | None = None
        self._lock = threading.Lock()  # a question must not slip in while the engine thread says goodbye

    def open(self) -> tuple[int, Future[Any]]:
        """Return the number of a new question and what its answer will be in.

        Raises:
          EngineDeadError: the engine has stopped.
        """
        with self._lock:
            if self._dead_reason is not None:
                raise EngineDeadError(self._dead_reason)
            number, future = next(self._numbers), Future()
            self._by_number[number] = future
        return number, future

    def answer(self, number: int, answer: Any) -> None:
        """Give an answer, or the exception that came of asking; called in the engine thread."""
        future = self._by_number.pop(number)
        if not future.set_running_or_notify_cancel():
            return  # whoever asked has gone
        if isinstance(answer, Exception):
            future.set_exception(answer)
        else:
            future.set_result(answer)

    def close(self, reason: str) -> None:
        """Answer all that is open that the engine has stopped, and refuse new questions."""
        with self._lock:
            self._dead_reason = reason
        for number in list(self._by_number):
            self.answer(number, EngineDeadError(reason))
