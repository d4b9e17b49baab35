"""GET /health, /ping, /version and /metrics: what machines ask about the server."""

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

import pagedjax
from servers.state import STATE


async def health(request: web.Request) -> web.Response:
    """Answer 200 with nothing while the engine lives, then 503."""
    return web.Response(status=200 if request.app[STATE].engine.is_alive else 503)


async def version(request: web.Request) -> web.Response:
    """Answer the package's version."""
    return web.json_response({"version": pagedjax.__version__})


async def metrics(request: web.Request) -> web.Response:
    """Answer all metrics in Prometheus' text format."""
    body = request.app[STATE].metrics.exposition()
    return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_LATEST})
