"""GET /health, /ping, /version, /load and /metrics: what machines ask about the server."""

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

import pagedjax
from servers.state import STATE


async def health(request: web.Request) -> web.Response:
    """Answer 200 with nothing while requests are served: 503 if the engine is dead or stuck, or about to stop."""
    state = request.app[STATE]
    is_stuck = state.engine.step_seconds > state.config.watchdog_timeout
    is_well = state.engine.is_alive and not is_stuck and not state.open_requests.is_closed
    return web.Response(status=200 if is_well else 503)


async def version(request: web.Request) -> web.Response:
    """Answer the package's version."""
    return web.json_response({"version": pagedjax.__version__})


async def load(request: web.Request) -> web.Response:
    """Answer the number of requests in work."""
    return web.json_response({"server_load": len(request.app[STATE].open_requests)})


async def metrics(request: web.Request) -> web.Response:
    """Answer all metrics in Prometheus' text format."""
    body = request.app[STATE].metrics.exposition()
    return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_LATEST})
