"""What the handlers of one application share. Created with the application; which objects it holds never changes."""

import time
from dataclasses import dataclass, field

from aiohttp import web

from pagedjax import AsyncEngine
from servers.access import Access
from servers.config import ServerConfig
from servers.errors import ApiError
from servers.metrics import ServerMetrics
from servers.open_requests import OpenRequests


@dataclass(frozen=True)
class ServerState:
    """The engine behind the application, its metrics and options."""

    engine: AsyncEngine
    metrics: ServerMetrics
    config: ServerConfig
    access: Access
    open_requests: OpenRequests
    started: int = field(default_factory=lambda: int(time.time()))

    @classmethod
    def of(cls, engine: AsyncEngine, config: ServerConfig) -> "ServerState":
        """Make everything that a server of `engine` needs."""
        metrics = ServerMetrics(engine)
        open_requests = OpenRequests(
            max_sequences=engine.config.max_num_seqs + config.max_num_queued_reqs,
            max_prompt_tokens=config.max_num_queued_tokens,
            on_rejection=metrics.count_rejection,
        )
        return cls(engine, metrics, config, Access(config), open_requests)

    @property
    def model_name(self) -> str:
        return self.engine.config.model_name

    def check_model(self, name: str | None) -> str:
        """Return the model's name; a 404 if the request names another."""
        if name not in (None, self.model_name):
            message = f"the model {name!r:.100} does not exist; this server has {self.model_name!r}"
            raise ApiError(404, message, param="model")
        return self.model_name


STATE = web.AppKey("STATE", ServerState)
