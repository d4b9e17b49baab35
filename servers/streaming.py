"""Server-sent events: `data: {json}` for each event, an error event if something breaks, `[DONE]` at the end."""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from aiohttp import web

from servers.errors import error_body, to_api_error

_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # proxies must not collect tokens
}
to_json = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


async def send_events(request: web.Request, events: AsyncGenerator[dict[str, Any]]) -> web.StreamResponse:
    """Answer with `events`. A client that leaves ends them; an exception becomes the last event."""
    response = web.StreamResponse(headers=_HEADERS)
    await response.prepare(request)
    async with aclosing(events):
        try:
            async for event in events:
                await response.write(b"data: %b\n\n" % to_json(event).encode())
        except (ConnectionError, asyncio.CancelledError):
            raise  # nobody listens any more
        except Exception as error:
            await response.write(b"data: %b\n\n" % to_json(error_body(to_api_error(error))).encode())
    await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response


def json_answer(value: dict[str, Any]) -> web.Response:
    """Answer with one JSON object."""
    return web.json_response(value, dumps=to_json)
