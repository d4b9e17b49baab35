"""Bring what happens to requests from the engine thread to the event loops of their consumers.

Owns one mailbox an unfinished request. Knows neither the engine nor HTTP.
"""

import asyncio
import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

from pagedjax.async_engine.courier import Courier
from pagedjax.errors import EngineDeadError, InvalidRequestError
from pagedjax.outputs import CompletionOutput, RequestOutput

logger = logging.getLogger(__name__)

ACCEPTED = None
type Event = RequestOutput | Exception | None  # None: accepted
type _Courier = Courier[tuple[Mailbox, Event]]


class Mailbox:
    """What one request has to tell its consumer; used in the consumer's event loop only, to which `courier` goes."""

    def __init__(self, courier: _Courier, *, is_delta: bool):
        self.courier = courier
        self._is_delta = is_delta
        self._outputs: list[RequestOutput] = []
        self._is_accepted = False
        self._is_over = False
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def is_over(self) -> bool:
        """Whether nothing more will come, or nobody listens."""
        return self._is_over

    def put(self, event: Event) -> None:
        """Take in an event and wake the consumer."""
        if self._is_over:
            return
        self._is_accepted = True
        if isinstance(event, RequestOutput):
            self._outputs.append(event)
            self._is_over = event.finished
        elif event is not ACCEPTED:
            self._error = event
            self._is_over = True
        self._wake()

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
        self._outputs = []
        self._wake()
        return was_running

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _wait(self) -> None:
        self._waiter = self.courier.loop.create_future()
        await self._waiter


class Mailboxes:
    """The mailboxes of all unfinished requests, and whether the engine still answers."""

    def __init__(self) -> None:
        self.observers: list[Callable[[RequestOutput], None]] = []
        self.dead_reason: str | None = None
        self._by_id: dict[str, Mailbox] = {}
        self._couriers: dict[asyncio.AbstractEventLoop, _Courier] = {}
        self._lock = threading.Lock()  # a request must not slip in while the engine thread says goodbye

    def open(self, request_id: str, *, is_delta: bool) -> Mailbox:
        """Make the mailbox of a new request, in the event loop that will read it.

        Raises:
          EngineDeadError: the engine has stopped.
          InvalidRequestError: the id is in use.
        """
        with self._lock:
            if self.dead_reason is not None:
                raise EngineDeadError(self.dead_reason)
            if request_id in self._by_id:
                raise InvalidRequestError(
                    f"request_id {request_id!r:.80} belongs to a request that is still running; choose another"
                )
            mailbox = self._by_id[request_id] = Mailbox(self._courier(), is_delta=is_delta)
        return mailbox

    def forget(self, request_id: str, mailbox: Mailbox) -> None:
        """Drop the mailbox of a request that will not reach the engine."""
        if self._by_id.get(request_id) is mailbox:
            del self._by_id[request_id]

    def deliver(self, events: Iterable[tuple[str, Event]]) -> list[str]:
        """Hand events over to the event loops of their mailboxes; return the requests whose loop has closed."""
        by_courier: dict[_Courier, list[tuple[Mailbox, Event]]] = defaultdict(list)
        orphans = []
        for request_id, event in events:
            mailbox = self._by_id.get(request_id)
            if mailbox is None:
                continue  # its loop has closed
            if isinstance(event, Exception) or (isinstance(event, RequestOutput) and event.finished):
                del self._by_id[request_id]
            if mailbox.courier.loop.is_closed():
                self._by_id.pop(request_id, None)
                orphans.append(request_id)
            else:
                by_courier[mailbox.courier].append((mailbox, event))
        for courier, addressed in by_courier.items():
            try:
                courier.carry(addressed)
            except RuntimeError:  # its loop closed this moment; the next delivery finds it closed and aborts
                logger.warning("an event loop closed with %d outputs on their way to it", len(addressed))
        return orphans

    def close(self, reason: str) -> None:
        """Tell every waiting request that the engine has stopped, and refuse new ones."""
        with self._lock:
            self.dead_reason = reason
            waiting = list(self._by_id)
        self.deliver([(request_id, EngineDeadError(reason)) for request_id in waiting])

    def _courier(self) -> _Courier:
        """Return the one to the running event loop."""
        loop = asyncio.get_running_loop()
        if loop not in self._couriers:
            self._couriers = {one: courier for one, courier in self._couriers.items() if not one.is_closed()}
            self._couriers[loop] = Courier(loop, self._dispatch)
        return self._couriers[loop]

    def _dispatch(self, addressed: Sequence[tuple[Mailbox, Event]]) -> None:
        for mailbox, event in addressed:  # first: an observer that fails must cost no request its output
            mailbox.put(event)
        for observer in self.observers:
            for _, event in addressed:
                if isinstance(event, RequestOutput):
                    observer(event)


def _join(deltas: list[RequestOutput]) -> RequestOutput:
    """Join consecutive deltas of one request: the last takes in the others, which are of no use afterwards."""
    parts: dict[int, list[CompletionOutput]] = {}
    for delta in deltas:
        for new in delta.outputs:
            parts.setdefault(new.index, []).append(new)
    joined = deltas[-1]
    joined.outputs = [_join_completions(one) if len(one) > 1 else one[0] for one in parts.values()]
    joined.prompt_logprobs = next((one.prompt_logprobs for one in deltas if one.prompt_logprobs is not None), None)
    return joined


def _join_completions(parts: list[CompletionOutput]) -> CompletionOutput:
    joined = parts[-1]
    joined.text = "".join([part.text for part in parts])
    joined.token_ids = [token_id for part in parts for token_id in part.token_ids]
    if any(part.logprobs is not None for part in parts):
        joined.logprobs = [entry for part in parts for entry in part.logprobs or ()]
    return joined
