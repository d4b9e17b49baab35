"""Let coroutines talk to an engine that runs in a thread of its own.

What crosses between the two is plain picklable data, so that the engine may move to another process. It is a thread
because pickling a token's output and reading it again takes over half of the CPU that serving the token takes in all
(tests/performance/server_overhead.py), and the engine leaves the interpreter to others while the device computes.
Knows no HTTP.
"""

import asyncio
import time
import weakref
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import jax

from pagedjax.async_engine.engine_thread import Abort, Add, Ask, Engine, EngineThread
from pagedjax.async_engine.mailboxes import Mailbox, Mailboxes
from pagedjax.async_engine.questions import Questions
from pagedjax.engine_view import EngineView
from pagedjax.errors import EngineDeadError, InvalidRequestError
from pagedjax.iteration_stats import Histogram
from pagedjax.outputs import RequestOutput
from pagedjax.sampling_params import RequestOutputKind, SamplingParams
from pagedjax.text.template_worker import TemplateWorker

ANSWER_SECONDS = 5.0
TEXT_THREADS = 2  # tokenize and render chats while the engine thread computes
GRAMMAR_THREADS = 4  # apart from those: each waits for a process that compiles, which may take seconds


class AsyncEngine:
    """Serve one engine to any number of coroutines; dropping it stops the thread and frees the engine."""

    def __init__(self, engine: Engine):
        self.config = engine.config
        self.model_config = engine.model_config
        self.default_sampling_params = dict(engine.default_sampling_params)
        self._tokenizer = engine.tokenizer
        self._text_threads = ThreadPoolExecutor(TEXT_THREADS, thread_name_prefix="pagedjax-text")
        self._grammar_threads = ThreadPoolExecutor(GRAMMAR_THREADS, thread_name_prefix="pagedjax-grammar")
        self._template_worker: TemplateWorker | None = None
        self._mailboxes = Mailboxes()
        self._questions = Questions()
        self._thread = EngineThread(engine, self._mailboxes, self._questions)
        self._stop = weakref.finalize(self, self._thread.stop)  # also runs when the interpreter exits

    def generate(
        self,
        prompt: str | list[int],
        sampling_params: SamplingParams,
        request_id: str,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        client: tuple[str, str] = ("", ""),
        arrival_time: float | None = None,
        timeout: float | None = None,  # the engine's, from the arrival on: the last output says that it is over
    ) -> "RequestStream":
        """Start a request; iterate the result for its outputs, or `await` it first to know that it was accepted.

        Raises:
          InvalidRequestError: the request is wrong (from here, the await or the first item).
          EngineDeadError: the engine has stopped (from here or any item).
        """
        is_delta = sampling_params.output_kind is RequestOutputKind.DELTA
        mailbox = self._mailboxes.open(request_id, is_delta=is_delta)
        arrival_time = time.monotonic() if arrival_time is None else arrival_time
        add = Add(request_id, prompt, sampling_params, priority, cache_salt, client, arrival_time, timeout)
        if self._thread.is_prepared(sampling_params):
            self._thread.inbox.put(add)
        else:
            self._prepare_and_put(add, mailbox)
        return RequestStream(request_id, mailbox, self)

    async def abort(self, request_ids: str | Iterable[str]) -> None:
        """End requests; each one's stream gets a last output with finish_reason "abort"."""
        self.send_abort((request_ids,) if isinstance(request_ids, str) else tuple(request_ids))

    def send_abort(self, request_ids: tuple[str, ...]) -> None:
        """Do what `abort` does, from any thread or a destructor."""
        self._thread.inbox.put(Abort(request_ids))

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Tokenize text outside the event loop."""
        return await self._in_text_thread(self._need_tokenizer().encode, text, add_special_tokens)

    async def render_chat(self, messages: list[dict[str, Any]], **kwargs: Any) -> str:
        """Turn messages into prompt text by the chat template, outside the event loop.

        A `chat_template` of the request's own is rendered in a process that can be killed.
        """
        tokenizer = self._need_tokenizer()
        render = tokenizer.render_chat
        if kwargs.get("chat_template") is not None:
            if self._template_worker is None:
                self._template_worker = TemplateWorker(tokenizer.hf, max_chars=self.max_prompt_chars)
            render = self._template_worker.render
        return await self._in_text_thread(lambda: render(messages, **kwargs))

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """Turn token ids into text."""
        return self._need_tokenizer().decode(token_ids, skip_special_tokens=skip_special_tokens)

    async def decode_async(self, token_ids: list[int]) -> str:
        """Do what `decode` does for any number of ids, special ones shown, outside the event loop."""
        decode = self._need_tokenizer().decode
        return await self._in_text_thread(lambda: decode(token_ids, skip_special_tokens=False))

    async def decode_each(self, token_ids: list[int]) -> list[str]:
        """Turn each id into a text of its own, outside the event loop."""
        decode = self._need_tokenizer().decode
        return await self._in_text_thread(lambda: [decode([one], skip_special_tokens=False) for one in token_ids])

    @property
    def max_prompt_chars(self) -> int:
        """No longer text can fit max_model_len: refuse it before the work of tokenizing."""
        assert self.config.max_model_len is not None, "the engine resolves it"
        return self.config.max_model_len * self._need_tokenizer().max_chars_per_token

    def stats(self) -> dict[str, float]:
        """Return the newest statistics: at most STATS_INTERVAL old under load, exact when idle."""
        return self._thread.stats

    def histograms(self) -> dict[str, Histogram]:
        """Return the engine's distributions, as old as `stats`."""
        return self._thread.histograms

    def add_observer(self, observer: Callable[[RequestOutput], None]) -> None:
        """Call `observer` with every output before its request's consumer sees it, even if that one has left."""
        self._mailboxes.observers.append(observer)

    async def inspect(self) -> EngineView:
        """Look into the engine between two steps.

        Raises:
          EngineDeadError: it has stopped.
          TimeoutError: its step takes longer than ANSWER_SECONDS.
        """
        return await self._ask("inspect")

    async def reset_prefix_cache(self, *, reset_running_requests: bool = False) -> bool:
        """Forget all cached blocks; False, with the reason in the log, while some are in use by requests or pinned.

        Args:
          reset_running_requests: preempt running requests, which compute all their tokens again.

        Raises:
          EngineDeadError, TimeoutError: as for `inspect`.
        """
        return await self._ask("reset_prefix_cache", reset_running_requests=reset_running_requests)

    async def start_profile(self, directory: str) -> None:
        """Begin to trace this process and its device; the trace goes to `directory`.

        Raises:
          InvalidRequestError: a trace is under way.
        """
        await self._profile(jax.profiler.start_trace, directory)

    async def stop_profile(self) -> None:
        """End the trace and write it.

        Raises:
          InvalidRequestError: none is under way.
        """
        await self._profile(jax.profiler.stop_trace)

    @property
    def is_alive(self) -> bool:
        """Whether the engine still answers."""
        return self.dead_error is None

    @property
    def step_seconds(self) -> float:
        """How long the engine thread has been at its current step; 0 while it has nothing to do."""
        began = self._thread.step_began
        return 0.0 if began is None else time.monotonic() - began

    @property
    def dead_error(self) -> EngineDeadError | None:
        """Why the engine no longer answers; None while it does."""
        reason = self._mailboxes.dead_reason
        return None if reason is None else EngineDeadError(reason)

    def _prepare_and_put(self, add: Add, mailbox: Mailbox) -> None:
        """Have the grammar compiled, then start the request, unless it was refused or its consumer has left."""

        def go_on(prepared: "asyncio.Future[None]") -> None:
            error = None if prepared.cancelled() else prepared.exception()
            if prepared.cancelled() or mailbox.is_over:  # nobody waits: shut down, or left
                self._mailboxes.forget(add.request_id, mailbox)
            elif isinstance(error, Exception):
                self._mailboxes.deliver([(add.request_id, error)])
            else:
                self._thread.inbox.put(add)

        loop = asyncio.get_running_loop()
        loop.run_in_executor(self._grammar_threads, self._thread.prepare, add.sampling_params).add_done_callback(go_on)

    async def shutdown(self) -> None:
        """Stop the thread after its current step and fail what still waits; harmless when repeated."""
        await asyncio.to_thread(self._stop)
        if self._template_worker is not None:
            await asyncio.to_thread(self._template_worker.close)
        self._text_threads.shutdown(wait=False)
        self._grammar_threads.shutdown(wait=False, cancel_futures=True)

    async def wait_stopped(self) -> None:
        """Return when the engine thread has ended, whether it was shut down or died."""
        await asyncio.to_thread(self._thread.join)

    async def _ask(self, method: Literal["inspect", "reset_prefix_cache"], **options: Any) -> Any:
        """Have the engine thread call a method of the engine between two steps; return, or raise, what it does."""
        number, answer = self._questions.open()
        self._thread.inbox.put(Ask(number, method, options))
        async with asyncio.timeout(ANSWER_SECONDS):
            return await asyncio.wrap_future(answer)

    def _need_tokenizer(self) -> Any:
        if self._tokenizer is None:
            raise InvalidRequestError("this engine has no tokenizer; send token ids", param="prompt")
        return self._tokenizer

    async def _profile(self, function: Callable[..., None], *args: Any) -> None:
        try:
            await asyncio.to_thread(function, *args)
        except RuntimeError as error:
            raise InvalidRequestError(f"the profiler refuses: {error}") from None

    async def _in_text_thread(self, function: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._text_threads, function, *args)


class RequestStream:
    """The outputs of one request in order. Leaving it early (`aclose`, or dropping it) aborts the request.

    A slow consumer finds several deltas joined into one.
    """

    def __init__(self, request_id: str, mailbox: Mailbox, engine: AsyncEngine):
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
