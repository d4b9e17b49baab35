"""The web application: which path goes to which handler, and what they share."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any

from aiohttp import web

from pagedjax import AsyncEngine
from servers import abort, board, chat, completions, health, models, profile, responses, tokenization
from servers.access import access_control, add_headers
from servers.board import BOARD, Board
from servers.board.history import keep_history
from servers.config import ServerConfig
from servers.errors import errors_as_json
from servers.http_metrics import http_metrics
from servers.open_requests import handling
from servers.state import STATE, ServerState
from servers.stats_log import log_stats

ROUTES = (
    web.get("/", board.page),
    web.get("/board/{name:board\\.(?:js|css)}", board.asset),
    web.get("/board/state", board.state),
    web.get("/v1/models", models.list_models),
    web.get("/v1/models/{model:.+}", models.get_model),
    web.post("/v1/completions", completions.completions),
    web.post("/v1/chat/completions", chat.chat_completions),
    web.post("/v1/responses", responses.responses),
    web.post("/tokenize", tokenization.tokenize),
    web.post("/detokenize", tokenization.detokenize),
    web.post("/abort", abort.abort),
    web.get("/health", health.health),
    web.get("/ping", health.health),
    web.post("/ping", health.health),
    web.get("/version", health.version),
    web.get("/load", health.load),
    web.post("/start_profile", profile.start_profile),
    web.post("/stop_profile", profile.stop_profile),
    web.get("/metrics", health.metrics),
)


def create_app(engine: AsyncEngine, config: ServerConfig) -> web.Application:
    """Return the application that serves `engine`, which the caller owns and shuts down.

    Run it with handler_cancellation=True (an argument of web.AppRunner and web.run_app), so that a client that leaves
    aborts its requests.
    """
    state = ServerState.of(engine, config)
    app = web.Application(
        middlewares=[
            handling(state.open_requests),
            http_metrics(state.metrics.registry),
            errors_as_json,
            access_control(state.access),
        ],
        client_max_size=config.max_request_bytes,
    )
    app[STATE] = state
    app.on_response_prepare.append(add_headers)
    app[BOARD] = Board(state)
    app.add_routes(ROUTES)
    app.on_startup.append(_show_cache)
    app.cleanup_ctx.append(_keep_history)
    if not engine.config.disable_log_stats:
        app.cleanup_ctx.append(_log_stats)
    return app


async def _show_cache(app: web.Application) -> None:
    state = app[STATE]
    state.metrics.show_cache(state.engine.config, await state.engine.inspect())


async def _log_stats(app: web.Application) -> AsyncIterator[None]:
    async with _beside(log_stats(app[STATE].engine.stats)):
        yield


async def _keep_history(app: web.Application) -> AsyncIterator[None]:
    async with _beside(keep_history(app[BOARD].history, app[BOARD].take_sample)):
        yield


@asynccontextmanager
async def _beside(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
