"""Run an engine in a thread of its own and let coroutines talk to it.

Owns that thread, its inbox and one mailbox a request. Only the thread calls the engine, and what crosses the border
is plain picklable data, so that the engine may move to another process. Knows nothing of HTTP.
"""

import asyncio
import dataclasses
import logging
import queue
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from pagedjax.config import EngineConfig
from pagedjax.errors import EngineDeadError, InvalidRequestError
from pagedjax.outputs import CompletionOutput, RequestOutput
from pagedjax.sampling_params import RequestOutputKind, SamplingParams

logger = logging.getLogger(__name__)

TEXT_THREADS = 2  # tokenize and render chats while the engine thread computes
STATS_INTERVAL = 0.1  # seconds between snapshots of the statistics under load


@runtime_checkable
class Engine(Protocol):
    """What AsyncEngine needs of an engine; LLMEngine has it.

    `add_request` raises InvalidRequestError at once. Every accepted request ends with exactly one finished
    RequestOutput from a later `step`, an aborted one (finish_reason "abort") included.
    """

    config: EngineConfig
    model_config: Any
    tokenizer: Any
    default_sampling_params: Mapping[str, Any]

    def add_request(
        self,
        request_id: str,
        prompt: str | list[int],
        sampling_params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        arrival_time: float | None = None,
    ) -> Any: ...

    def step(self) -> Iterable[RequestOutput]: ...

    def abort(self, request_ids: Sequence[str]) -> Any: ...

    def has_unfinished_requests(self) -> bool: ...

    def stats(self) -> dict[str, float]: ...

    def shutdown(self) -> None: ...


class AsyncEngine:
    """Serve one engine to any number of coroutines; dropping it stops the thread and frees the engine."""

    def __init__(self, engine: Engine):
        self.config = engine.config
        self.model_config = engine.model_config
        self.default_sampling_params = dict(engine.default_sampling_params)
        self._tokenizer = engine.tokenizer
        self._text_threads = ThreadPoolExecutor(TEXT_THREADS, thread_name_prefix="pagedjax-text")
        self._mailboxes = _Mailboxes()
        self._thread = _EngineThread(engine, self._mailboxes)
        self._stop = weakref.finalize(self, self._thread.stop)  # also runs when the interpreter exits

    def generate(
        self,
        prompt: str | list[int],
        sampling_params: SamplingParams,
        request_id: str,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        arrival_time: float | None = None,
    ) -> "RequestStream":
        """Start a request; iterate the result for its outputs, or `await` it first to know that it was accepted.

        Raises:
          InvalidRequestError: the request is wrong (from here, the await or the first item).
          EngineDeadError: the engine has stopped (from here or any item).
        """
        is_delta = sampling_params.output_kind is RequestOutputKind.DELTA
        mailbox = self._mailboxes.open(request_id, is_delta=is_delta)
        arrival_time = time.monotonic() if arrival_time is None else arrival_time
        self._thread.inbox.put(_Add(request_id, prompt, sampling_params, priority, cache_salt, arrival_time))
        return RequestStream(request_id, mailbox, self)

    async def abort(self, request_ids: str | Iterable[str]) -> None:
        """End requests; each one's stream gets a last output with finish_reason "abort"."""
        self.send_abort((request_ids,) if isinstance(request_ids, str) else tuple(request_ids))

    def send_abort(self, request_ids: tuple[str, ...]) -> None:
        """Do what `abort` does, from any thread or a destructor."""
        self._thread.inbox.put(_Abort(request_ids))

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Tokenize text outside the event loop."""
        return await self._in_text_thread(self._need_tokenizer().encode, text, add_special_tokens)

    async def render_chat(self, messages: list[dict[str, Any]], **kwargs: Any) -> str:
        """Turn messages into prompt text by the chat template, outside the event loop."""
        tokenizer = self._need_tokenizer()
        return await self._in_text_thread(lambda: tokenizer.render_chat(messages, **kwargs))

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """Turn token ids into text."""
        return self._need_tokenizer().decode(token_ids, skip_special_tokens=skip_special_tokens)

    @property
    def max_prompt_chars(self) -> int:
        """No longer text can fit max_model_len: refuse it before the work of tokenizing."""
        assert self.config.max_model_len is not None, "the engine resolves it"
        return self.config.max_model_len * self._need_tokenizer().max_chars_per_token

    def stats(self) -> dict[str, float]:
        """Return the newest statistics: at most STATS_INTERVAL old under load, exact when idle."""
        return self._thread.stats

    def add_observer(self, observer: Callable[[RequestOutput], None]) -> None:
        """Call `observer` with every output before its request's consumer sees it, even if that one has left."""
        self._mailboxes.observers.append(observer)

    @property
    def is_alive(self) -> bool:
        return self.dead_error is None

    @property
    def dead_error(self) -> EngineDeadError | None:
        """Why the engine no longer answers; None while it does."""
        reason = self._mailboxes.dead_reason
        return None if reason is None else EngineDeadError(reason)

    async def shutdown(self) -> None:
        """Stop the thread after its current step and fail what still waits; harmless when repeated."""
        await asyncio.to_thread(self._stop)
        self._text_threads.shutdown(wait=False)

    async def wait_stopped(self) -> None:
        """Return when the engine thread has ended, whether it was shut down or died."""
        await asyncio.to_thread(self._thread.join)

    def _need_tokenizer(self) -> Any:
        if self._tokenizer is None:
            raise InvalidRequestError("this engine has no tokenizer; send token ids", param="prompt")
        return self._tokenizer

    async def _in_text_thread(self, function: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._text_threads, function, *args)


class RequestStream:
    """The outputs of one request in order. Leaving it early (`aclose`, or dropping it) aborts the request.

    A slow consumer finds several deltas joined into one.
    """

    def __init__(self, request_id: str, mailbox: "_Mailbox", engine: AsyncEngine):
        self.request_id = request_id
        self._mailbox = mailbox
        self._engine = engine

    def __await__(self) -> Generator[Any, None, "RequestStream"]:
        yield from self._mailbox.wait_accepted().__await__()
        return self

    def __aiter__(self) -> "RequestStream":
        return self

    async def __anext__(self) -> RequestOutput:
        output = await self._mailbox.take()
        if output is None:
            raise StopAsyncIteration
        return output

    async def aclose(self) -> None:
        """Abort the request unless it is over."""
        self._leave()

    def __del__(self) -> None:
        self._leave()

    def _leave(self) -> None:
        if self._mailbox.close():
            self._engine.send_abort((self.request_id,))


@dataclass(frozen=True)
class _Add:
    request_id: str
    prompt: str | list[int]
    sampling_params: SamplingParams
    priority: int
    cache_salt: str | None
    arrival_time: float


@dataclass(frozen=True)
class _Abort:
    request_ids: tuple[str, ...]


_ACCEPTED = None
type _Event = RequestOutput | Exception | None  # None: accepted


class _Mailbox:
    """What one request has to tell its consumer; used in the consumer's event loop only."""

    def __init__(self, *, is_delta: bool):
        self.loop = asyncio.get_running_loop()
        self._is_delta = is_delta
        self._outputs: list[RequestOutput] = []
        self._is_accepted = False
        self._is_over = False  # nothing more will come, or nobody listens
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    def put(self, event: _Event) -> None:
        """Take in an event and wake the consumer."""
        if self._is_over:
            return
        self._is_accepted = True
        if isinstance(event, RequestOutput):
            self._outputs.append(event)
            self._is_over = event.finished
        elif event is not _ACCEPTED:
            self._error = event
            self._is_over = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait_accepted(self) -> None:
        """Return when the engine has accepted the request; raise what it raised if it refused."""
        while not (self._is_accepted or self._is_over):
            await self._wait()
        if self._error is not None:
            raise self._error

    async def take(self) -> RequestOutput | None:
        """Return what has come since the last call, waiting for it; None at the end."""
        while not (self._outputs or self._is_over):
            await self._wait()
        if self._outputs:
            outputs, self._outputs = self._outputs, []
            return _join(outputs) if self._is_delta and len(outputs) > 1 else outputs[-1]
        if self._error is not None:
            raise self._error
        return None

    def close(self) -> bool:
        """Stop listening; return whether the request was still running."""
        was_running = not self._is_over
        self._is_over = True
        return was_running

    async def _wait(self) -> None:
        self._waiter = self.loop.create_future()
        await self._waiter


class _Mailboxes:
    """The mailboxes of all unfinished requests, and whether the engine still answers."""

    def __init__(self) -> None:
        self.observers: list[Callable[[RequestOutput], None]] = []
        self.dead_reason: str | None = None
        self._by_id: dict[str, _Mailbox] = {}
        self._lock = threading.Lock()  # a request must not slip in while the engine thread says goodbye

    def open(self, request_id: str, *, is_delta: bool) -> _Mailbox:
        mailbox = _Mailbox(is_delta=is_delta)
        with self._lock:
            if self.dead_reason is not None:
                raise EngineDeadError(self.dead_reason)
            if request_id in self._by_id:
                raise InvalidRequestError(
                    f"request_id {request_id!r:.80} belongs to a request that is still running; choose another"
                )
            self._by_id[request_id] = mailbox
        return mailbox

    def deliver(self, events: Iterable[tuple[str, _Event]]) -> list[str]:
        """Hand events over with one call for each event loop; return the requests whose loop has closed."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Mailbox, _Event]]] = defaultdict(list)
        orphans = []
        for request_id, event in events:
            mailbox = self._by_id.get(request_id)
            if mailbox is None:
                continue  # its loop has closed
            if isinstance(event, Exception) or (isinstance(event, RequestOutput) and event.finished):
                del self._by_id[request_id]
            if mailbox.loop.is_closed():
                self._by_id.pop(request_id, None)
                orphans.append(request_id)
            else:
                by_loop[mailbox.loop].append((mailbox, event))
        for loop, addressed in by_loop.items():
            self._call(loop, addressed)
        return orphans

    def close(self, reason: str) -> None:
        """Tell every waiting request that the engine has stopped, and refuse new ones."""
        with self._lock:
            self.dead_reason = reason
            waiting = list(self._by_id)
        self.deliver([(request_id, EngineDeadError(reason)) for request_id in waiting])

    def _call(self, loop: asyncio.AbstractEventLoop, addressed: list[tuple[_Mailbox, _Event]]) -> None:
        try:
            loop.call_soon_threadsafe(self._dispatch, addressed)
        except RuntimeError:  # it closed this moment; the next delivery finds it closed and aborts
            logger.warning("an event loop closed with %d outputs on their way to it", len(addressed))

    def _dispatch(self, addressed: list[tuple[_Mailbox, _Event]]) -> None:
        for mailbox, event in addressed:  # first: an observer that fails must cost no request its output
            mailbox.put(event)
        for observer in self.observers:
            for _, event in addressed:
                if isinstance(event, RequestOutput):
                    observer(event)


class _EngineThread:
    """Calls step() while there is work and sleeps on the inbox when there is none."""

    def __init__(self, engine: Engine, mailboxes: _Mailboxes):
        self.inbox: queue.SimpleQueue[_Add | _Abort | None] = queue.SimpleQueue()  # None: stop
        self.stats = engine.stats()
        self._engine = engine
        self._mailboxes = mailboxes
        self._stats_time = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="pagedjax-engine", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread after its current step and wait for that."""
        self.inbox.put(None)
        if threading.current_thread() is not self._thread:  # the last reference may be dropped there
            self._thread.join()

    def join(self) -> None:
        self._thread.join()

    def _run(self) -> None:
        reason = "the engine was shut down; start a new one"
        try:
            self._serve()
        except BaseException as error:  # whatever it was, every waiting request must hear it
            logger.exception("the engine stopped")
            reason = f"the engine stopped after {type(error).__name__}: {error}; start it again"
        self._mailboxes.close(reason)
        try:
            self._engine.shutdown()
        except Exception:
            logger.exception("the engine failed to shut down")

    def _serve(self) -> None:
        has_work = False
        while self._read_inbox(wait=not has_work):
            has_work = self._engine.has_unfinished_requests()
            if has_work:
                self._publish(list(self._engine.step()))

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

    def _act(self, message: _Add | _Abort | None) -> bool:
        match message:
            case None:
                return False
            case _Abort():
                self._engine.abort(message.request_ids)
            case _Add():
                self._add(message)
        return True

    def _add(self, message: _Add) -> None:
        event: _Event = _ACCEPTED
        try:
            self._engine.add_request(
                message.request_id,
                message.prompt,
                message.sampling_params,
                priority=message.priority,
                cache_salt=message.cache_salt,
                arrival_time=message.arrival_time,
            )
        except InvalidRequestError as error:
            event = error
        except Exception as error:  # one request's trouble, not everyone's: the engine has not taken it
            logger.exception("add_request failed")
            event = error
        self._deliver([(message.request_id, event)])

    def _publish(self, outputs: list[RequestOutput]) -> None:
        if any(output.finished for output in outputs) or time.monotonic() - self._stats_time > STATS_INTERVAL:
            self._snapshot_stats()
        if outputs:
            self._deliver([(output.request_id, output) for output in outputs])

    def _deliver(self, events: list[tuple[str, _Event]]) -> None:
        orphans = self._mailboxes.deliver(events)
        if orphans:
            self._engine.abort(orphans)

    def _snapshot_stats(self) -> None:
        self.stats = self._engine.stats()
        self._stats_time = time.monotonic()


def _join(deltas: list[RequestOutput]) -> RequestOutput:
    """Join consecutive deltas of one request into one."""
    completions: dict[int, CompletionOutput] = {}
    for delta in deltas:
        for new in delta.outputs:
            old = completions.get(new.index)
            completions[new.index] = new if old is None else _join_completion(old, new)
    prompt_logprobs = next((delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs is not None), None)
    return dataclasses.replace(deltas[-1], outputs=list(completions.values()), prompt_logprobs=prompt_logprobs)


def _join_completion(old: CompletionOutput, new: CompletionOutput) -> CompletionOutput:
    has_logprobs = old.logprobs is not None or new.logprobs is not None
    return dataclasses.replace(
        new,
        text=old.text + new.text,
        token_ids=old.token_ids + new.token_ids,
        logprobs=(old.logprobs or []) + (new.logprobs or []) if has_logprobs else None,
    )
