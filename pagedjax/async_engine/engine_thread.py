"""The thread that owns an engine: it alone calls it, steps while there is work and sleeps on its inbox otherwise.

The inbox takes plain picklable messages; what comes of them goes to the mailboxes, or answers questions.
"""

import logging
import queue
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

from pagedjax.async_engine.mailboxes import ACCEPTED, Event, Mailboxes
from pagedjax.async_engine.questions import Questions
from pagedjax.config import EngineConfig
from pagedjax.engine_view import EngineView
from pagedjax.errors import InvalidRequestError
from pagedjax.iteration_stats import Histogram
from pagedjax.outputs import RequestOutput
from pagedjax.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

STATS_INTERVAL = 0.1  # seconds between snapshots of the statistics under load


@runtime_checkable
class Engine(Protocol):
    """What the thread needs of an engine; LLMEngine has it.

    `add_request` raises InvalidRequestError at once, and so does `prepare`, which any thread may call beforehand. Every
    accepted request ends with exactly one finished RequestOutput from a later `step`, an aborted one (finish_reason
    "abort") included.
    """

    config: EngineConfig
    model_config: Any
    tokenizer: Any
    default_sampling_params: dict[str, Any]

    def add_request(
        self,
        request_id: str,
        prompt: str | list[int],
        sampling_params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        client: tuple[str, str] = ("", ""),
        arrival_time: float | None = None,
        timeout: float | None = None,
    ) -> Any: ...

    def is_prepared(self, sampling_params: SamplingParams) -> bool: ...

    def prepare(self, sampling_params: SamplingParams) -> None: ...

    def step(self) -> Iterable[RequestOutput]: ...

    def abort(self, request_ids: Sequence[str]) -> Any: ...

    def has_unfinished_requests(self) -> bool: ...

    def stats(self) -> dict[str, float]: ...

    def histograms(self) -> dict[str, Histogram]: ...

    def inspect(self) -> EngineView: ...

    def reset_prefix_cache(self, *, reset_running_requests: bool = False) -> bool: ...

    def shutdown(self) -> None: ...


@dataclass(frozen=True)
class Add:
    """Message: start a request."""

    request_id: str
    prompt: str | list[int]
    sampling_params: SamplingParams
    priority: int
    cache_salt: str | None
    client: tuple[str, str]
    arrival_time: float
    timeout: float | None


@dataclass(frozen=True)
class Abort:
    """Message: end requests early."""

    request_ids: tuple[str, ...]


@dataclass(frozen=True)
class Ask:
    """Message: ask the engine between two steps; what its method returns or raises answers the question so numbered."""

    number: int
    method: Literal["inspect", "reset_prefix_cache"]
    options: dict[str, Any]


type Message = Add | Abort | Ask


class EngineThread:
    """Calls step() while there is work and sleeps on the inbox when there is none."""

    def __init__(self, engine: Engine, mailboxes: Mailboxes, questions: Questions):
        self.inbox: queue.SimpleQueue[Message | None] = queue.SimpleQueue()  # None: stop
        self.stats = engine.stats()
        self.histograms = engine.histograms()
        self.step_began: float | None = None  # on time.monotonic(); None between steps
        self._engine = engine
        self._mailboxes = mailboxes
        self._questions = questions
        self._stats_time = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="pagedjax-engine", daemon=True)
        self._thread.start()

    def is_prepared(self, sampling_params: SamplingParams) -> bool:
        """Whether the engine could add a request with these parameters at once."""
        return self._engine.is_prepared(sampling_params)

    def prepare(self, sampling_params: SamplingParams) -> None:
        """Do in the caller's thread what adding a request with these parameters would have to wait for."""
        self._engine.prepare(sampling_params)

    def stop(self) -> None:
        """End the thread after its current step and wait for that."""
        self.inbox.put(None)
        if threading.current_thread() is not self._thread:  # the last reference may be dropped there
            self._thread.join()

    def join(self) -> None:
        """Wait until the thread has ended."""
        self._thread.join()

    def _run(self) -> None:
        reason = "the engine was shut down; start a new one"
        try:
            self._serve()
        except BaseException as error:  # whatever it was, whoever waits must hear it
            logger.exception("the engine stopped")
            reason = f"the engine stopped after {type(error).__name__}: {error}; start it again"
        self._mailboxes.close(reason)
        self._questions.close(reason)
        try:
            self._engine.shutdown()
        except Exception:
            logger.exception("the engine failed to shut down")

    def _serve(self) -> None:
        has_work = False
        while self._read_inbox(wait=not has_work):
            has_work = self._engine.has_unfinished_requests()
            if has_work:
                self.step_began = time.monotonic()
                outputs = list(self._engine.step())
                self.step_began = None
                self._publish(outputs)

    def _read_inbox(self, *, wait: bool) -> bool:
        """Act on all messages there are, waiting for the first if asked to; return False to stop."""
        if wait:
            self._snapshot_stats()
            if not self._act(self.inbox.get()):
                return False
        while not self.inbox.empty():  # this thread is the only reader
            if not self._act(self.inbox.get_nowait()):
                return False
        return True

    def _act(self, message: Message | None) -> bool:
        match message:
            case None:
                return False
            case Abort():
                self._engine.abort(message.request_ids)
            case Ask():
                self._ask(message)
            case Add():
                self._add(message)
        return True

    def _add(self, message: Add) -> None:
        event: Event = ACCEPTED
        try:
            self._engine.add_request(
                message.request_id,
                message.prompt,
                message.sampling_params,
                priority=message.priority,
                cache_salt=message.cache_salt,
                client=message.client,
                arrival_time=message.arrival_time,
                timeout=message.timeout,
            )
        except InvalidRequestError as error:
            event = error
        except Exception as error:  # one request's trouble, not everyone's: the engine has not taken it
            logger.exception("add_request failed")
            event = error
        self._deliver([(message.request_id, event)])

    def _ask(self, message: Ask) -> None:
        try:
            answer = getattr(self._engine, message.method)(**message.options)
        except Exception as error:  # whoever watches must not stop what is watched
            logger.exception("%s of the engine failed", message.method)
            answer = error
        self._questions.answer(message.number, answer)

    def _publish(self, outputs: list[RequestOutput]) -> None:
        if any(output.finished for output in outputs) or time.monotonic() - self._stats_time > STATS_INTERVAL:
            self._snapshot_stats()
        if outputs:
            self._deliver([(output.request_id, output) for output in outputs])

    def _deliver(self, events: list[tuple[str, Event]]) -> None:
        orphans = self._mailboxes.deliver(events)
        if orphans:
            self._engine.abort(orphans)

    def _snapshot_stats(self) -> None:
        self.stats = self._engine.stats()
        self.histograms = self._engine.histograms()
        self._stats_time = time.monotonic()
