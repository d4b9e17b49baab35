"""Server-sent events: `data: {json}` for each event, an error event if something breaks, `[DONE]` at the end.

Thousands of events a second pass here beside the engine thread, so the usual ones are not encoded as a whole.
"""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from servers.errors import ApiError, error_body, to_api_error

SLOW_READER_SECONDS = 60.0  # a client that takes nothing for so long is gone
_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # proxies must not collect tokens
}
_PLACE = "\ue000the text\ue000"  # no id and no model name holds this
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
to_json = _ENCODER.encode


@dataclass(frozen=True)
class Framing:
    """How JSON texts become events, what an error looks like among them, and what ends the stream."""

    frame: Callable[[str], str]
    error: Callable[[ApiError], str]
    end: bytes


DATA_EVENTS = Framing(
    frame="data: {}\n\n".format,
    error=lambda error: f"data: {to_json(error_body(error))}\n\n",
    end=b"data: [DONE]\n\n",
)


class TextTemplates:
    """JSON texts that differ in a choice's index and one string; all but the string is encoded once an index."""

    def __init__(self, build: Callable[[int, str], dict[str, Any]]):
        self._build = build
        self._around: dict[int, tuple[str, str]] = {}

    def fill(self, index: int, text: str) -> str:
        """Return what `to_json(build(index, text))` would."""
        around = self._around.get(index)
        if around is None:
            before, after = to_json(self._build(index, _PLACE)).split(to_json(_PLACE))
            around = self._around[index] = (before, after)
        return f"{around[0]}{to_json(text)}{around[1]}"


async def send_events(
    request: web.Request,
    events: AsyncGenerator[str],
    *,
    framing: Framing = DATA_EVENTS,
    keep_alive_interval: float = 0.0,
    timeout: float | None = None,  # noqa: ASYNC109  it ends the events, not the call: an error event follows
) -> web.StreamResponse:
    """Answer with `events`, each a JSON text. A client that leaves ends them; an exception becomes the last event.

    A client that reads slowly holds back its own events only, and is dropped when it takes nothing for
    SLOW_READER_SECONDS. After `keep_alive_interval` seconds of silence a comment is sent; 0 sends none. After `timeout`
    seconds the stream ends with an error.
    """
    response = web.StreamResponse(headers=_HEADERS)
    await response.prepare(request)
    stream = _EventStream(request, response)
    async with aclosing(events), _tended(stream, keep_alive_interval):
        try:
            async with asyncio.timeout(timeout):
                async for event in events:
                    await stream.send(framing.frame(event).encode())
        except (ConnectionError, asyncio.CancelledError):
            raise  # nobody listens any more
        except Exception as error:
            await stream.send(framing.error(to_api_error(error)).encode())
        await stream.send(framing.end, is_last=True)
    return response


class _EventStream:
    """One answer on its way to a client."""

    def __init__(self, request: web.Request, response: web.StreamResponse):
        self.sent_time = time.monotonic()  # when the last event was handed over
        self.is_blocked = False  # the client has not taken it yet
        self._request = request
        self._response = response

    async def send(self, data: bytes, *, is_last: bool = False) -> None:
        """Write `data`; wait while the client takes less than comes, and after the last until it has taken all.

        Raises:
          ConnectionError: the client has left.
        """
        self.sent_time = time.monotonic()
        self.is_blocked = True
        await (self._response.write_eof(data) if is_last else self._response.write(data))
        self.is_blocked = False

    def drop(self) -> None:
        """Cut the connection, which ends the handler."""
        if self._request.transport is not None:
            self._request.transport.abort()


@asynccontextmanager
async def _tended(stream: _EventStream, keep_alive_interval: float) -> AsyncIterator[None]:
    task = asyncio.create_task(_tend(stream, keep_alive_interval))
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError, ConnectionError):
            await task


async def _tend(stream: _EventStream, keep_alive_interval: float) -> None:
    """Look after a stream beside its events: a timer for each event would cost more than the event."""
    while True:
        is_blocked = stream.is_blocked
        limit = SLOW_READER_SECONDS if is_blocked or not keep_alive_interval else keep_alive_interval
        await asyncio.sleep(max(limit / 8, stream.sent_time + limit - time.monotonic()))
        silent_seconds = time.monotonic() - stream.sent_time
        if stream.is_blocked and silent_seconds >= SLOW_READER_SECONDS:
            stream.drop()
            return
        if not stream.is_blocked and keep_alive_interval and silent_seconds >= keep_alive_interval:
            await stream.send(b": keep-alive\n\n")


def json_answer(value: dict[str, Any]) -> web.Response:
    """Answer with one JSON object."""
    return web.json_response(value, dumps=to_json)


def large_json_answer(value: dict[str, Any]) -> web.Response:
    """Do what `json_answer` does, slower, but never keeping the interpreter for long; call it in a thread."""
    return web.Response(text="".join(_ENCODER.iterencode(value)), content_type="application/json")
