"""One engine for calls that overlap, in one thread (two streams read in turn) or in several.

Whoever needs an output steps the engine and hands the others theirs. An interrupt ends the running call, not the
engine.
"""

import itertools
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm

from pagedjax.engine import LLMEngine
from pagedjax.errors import EngineDeadError
from pagedjax.interrupts import InterruptAfterwards
from pagedjax.outputs import RequestOutput
from pagedjax.sampling_params import SamplingParams


class SharedEngine:
    """Owns the lock that is held whenever the engine is called, and what came for calls that have not read it yet."""

    def __init__(self, engine: LLMEngine):
        self.engine = engine
        self._request_ids = (f"llm-{i}" for i in itertools.count())
        self._lock = threading.Lock()
        self._inside: int | None = None  # the thread that holds it
        self._arrived: dict[str, deque[RequestOutput]] = {}  # by request: its call's outputs that nobody has read yet
        self._ended: list[str] = []  # requests that their calls have left, to be aborted by the next step

    @contextmanager
    def alone(self) -> Iterator[LLMEngine]:
        """Hold the lock, and Ctrl-C back, and note who does, for what the garbage collector may find meanwhile."""
        with self._lock, InterruptAfterwards():
            self._inside = threading.get_ident()
            try:
                yield self.engine
            finally:
                self._inside = None

    @contextmanager
    def call(self) -> Iterator["Call"]:
        """Begin a call; whatever of it is unfinished when the context ends is aborted."""
        call = Call(self)
        try:
            yield call
        finally:
            self._end(call.request_ids)

    def add(self, arrived: deque[RequestOutput], prompt: Any, params: SamplingParams, *, priority: int) -> str:
        """Queue a request, whose outputs go to `arrived`, and return its id."""
        request_id = next(self._request_ids)
        with self.alone() as engine:
            engine.add_request(request_id, prompt, params, priority=priority)
            self._arrived[request_id] = arrived
        return request_id

    def fill(self, arrived: deque[RequestOutput]) -> None:
        """Step until something has arrived there, which another call's step may bring while this one waits its turn.

        Raises:
          EngineDeadError: nothing will.
        """
        while not arrived:
            with self.alone() as engine:
                if not arrived:
                    self._step()
                    if not arrived and not engine.has_unfinished_requests():
                        raise EngineDeadError("the request's last output went to another caller of step()")

    def _step(self) -> None:
        """Step the engine, for whoever holds the lock, and bring each output to the call that waits for it."""
        ended, self._ended = self._ended, []
        for request_id in ended:
            self._arrived.pop(request_id, None)
        self.engine.abort(ended)
        for output in self.engine.step():
            if output.request_id in self._arrived:
                self._arrived[output.request_id].append(output)

    def _end(self, request_ids: list[str]) -> None:
        """Abort what an error, an interrupt or a closed iterator left unfinished, and let the engine drain."""
        self._ended += request_ids
        if self._inside == threading.get_ident():
            return  # the garbage collector found a forgotten stream in the middle of a call: the next step aborts it
        with self.alone() as engine:
            for request_id in request_ids:
                self._arrived.pop(request_id, None)
            while not engine.unfinished_request_ids().isdisjoint(request_ids):
                self._step()


class Call:
    """Some requests, and their outputs in the order in which they come."""

    def __init__(self, shared: SharedEngine):
        self.request_ids: list[str] = []
        self._shared = shared
        self._arrived: deque[RequestOutput] = deque()

    def add(self, prompt: Any, params: SamplingParams, *, priority: int = 0) -> None:
        """Queue a request.

        Raises:
          InvalidRequestError: the engine refuses it.
        """
        self.request_ids.append(self._shared.add(self._arrived, prompt, params, priority=priority))

    def outputs(self, *, use_tqdm: bool = False) -> Iterator[RequestOutput]:
        """Step until all requests are done and yield what comes of them."""
        num_left, num_generated, began = len(self.request_ids), 0, time.monotonic()
        with tqdm(total=num_left, desc="Generating", unit="request", disable=not use_tqdm) as progress:
            while num_left:
                self._shared.fill(self._arrived)
                while self._arrived:
                    output = self._arrived.popleft()
                    if output.finished:
                        num_left -= 1
                        num_generated += sum(len(completion.token_ids) for completion in output.outputs)
                        progress.set_postfix_str(f"{num_generated / (time.monotonic() - began):.1f} tokens/s", False)
                        progress.update()
                    yield output
