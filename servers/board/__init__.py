"""GET / and what its page asks for: a live view of the server, for people. Needs no outside network."""

import time
from importlib import resources

from aiohttp import web

from pagedjax import EngineView
from servers.access import OWNER
from servers.board.history import History, Sample, sample
from servers.board.state import board_state
from servers.state import STATE, ServerState
from servers.streaming import json_answer

MIN_VIEW_SECONDS = 0.5  # pages that ask more often share a look into the engine
_TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css"}


class Board:
    """What the board of one server remembers: the last minutes, and the newest look into the engine."""

    def __init__(self, state: ServerState):
        self._state = state
        self.history = History(self.take_sample())
        self._view: EngineView | None = None
        self._view_time = 0.0

    def take_sample(self) -> Sample:
        """Return the statistics of now."""
        tokens = self._state.engine.histograms()["iteration_tokens_total"]
        return sample(self._state.engine.stats(), sum(tokens.counts), tokens.sum)

    async def view(self) -> EngineView:
        """Look into the engine, not more often than is good for it."""
        if self._view is None or time.monotonic() - self._view_time > MIN_VIEW_SECONDS:
            self._view = await self._state.engine.inspect()
            self._view_time = time.monotonic()
        return self._view


BOARD = web.AppKey("BOARD", Board)


async def page(request: web.Request) -> web.Response:
    """Answer the page."""
    return _file("index.html")


async def asset(request: web.Request) -> web.Response:
    """Answer the page's script or style."""
    return _file(request.match_info["name"])


async def state(request: web.Request) -> web.Response:
    """Answer what the page shows: everything of the server, and of requests the client's own."""
    server, board = request.app[STATE], request.app[BOARD]
    opened = server.open_requests.of_owner(request[OWNER])
    view = await board.view()
    return json_answer(
        board_state(server.engine.config, board.history, view, opened, server.metrics.latencies.percentiles())
    )


def _file(name: str) -> web.Response:
    text = resources.files("servers.board").joinpath(name).read_text(encoding="utf-8")
    headers = {"Cache-Control": "no-cache"}
    return web.Response(text=text, content_type=_TYPES[name.rpartition(".")[2]], charset="utf-8", headers=headers)
