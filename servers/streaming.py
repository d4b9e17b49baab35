"""Server-sent events: `data: {json}` for each event, an error event if something breaks, `[DONE]` at the end.

Thousands of events a second pass here beside the engine thread, so the usual ones are not encoded as a whole.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from aiohttp import web

from servers.errors import error_body, to_api_error

_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # proxies must not collect tokens
}
_PLACE = "\ue000the text\ue000"  # no id and no model name holds this
to_json = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


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


async def send_events(request: web.Request, events: AsyncGenerator[str]) -> web.StreamResponse:
    """Answer with `events`, each a JSON text. A client that leaves ends them; an exception becomes the last event."""
    response = web.StreamResponse(headers=_HEADERS)
    await response.prepare(request)
    async with aclosing(events):
        try:
            async for event in events:
                await response.write(f"data: {event}\n\n".encode())
        except (ConnectionError, asyncio.CancelledError):
            raise  # nobody listens any more
        except Exception as error:
            await response.write(f"data: {to_json(error_body(to_api_error(error)))}\n\n".encode())
    await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response


def json_answer(value: dict[str, Any]) -> web.Response:
    """Answer with one JSON object."""
    return web.json_response(value, dumps=to_json)
