"""One call of an endpoint that generates: its body, read and checked field by field.

What all such endpoints share. What the fields mean together is each endpoint's to say.
"""

import math
import re
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from pagedjax import AsyncEngine, InvalidRequestError
from servers.access import OWNER
from servers.body import read_json
from servers.protocol import Field, StreamOptions, parse, parse_stream_options
from servers.state import STATE, ServerState

_REQUEST_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")


@dataclass(frozen=True)
class Call:
    """An HTTP request whose fields have been checked one by one. `id` is what its answer bears."""

    request: web.Request
    state: ServerState
    fields: Mapping[str, Any]
    stream_options: StreamOptions
    id: str
    arrival_time: float  # on time.monotonic()
    timeout: float | None  # seconds that the answer may take

    @property
    def engine(self) -> AsyncEngine:
        return self.state.engine

    @property
    def owner(self) -> str:
        return self.request[OWNER]

    @property
    def is_stream(self) -> bool:
        return self.fields["stream"]


async def read_call(request: web.Request, table: Mapping[str, Field], *, id_prefix: str) -> Call:
    """Read the body of `request` and check its fields and its model's name.

    Raises:
      InvalidRequestError, ApiError: what the client hears.
    """
    arrival_time = time.monotonic()
    state = request.app[STATE]
    fields = parse(await read_json(request), table)
    state.check_model(fields["model"])
    request_id = f"{id_prefix}{_chosen_id(request, fields) or uuid.uuid4().hex}"
    return Call(
        request, state, fields, parse_stream_options(fields), request_id, arrival_time, _timeout(request, state)
    )


def _timeout(request: web.Request, state: ServerState) -> float | None:
    """The shorter of the server's limit and the client's own, the header X-Request-Timeout."""
    text, limit = request.headers.get("X-Request-Timeout"), state.config.request_timeout
    if text is None:
        return limit
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise InvalidRequestError(f"X-Request-Timeout is {text[:40]!r}; it must be a number of seconds above 0")
    return seconds if limit is None else min(seconds, limit)


def _chosen_id(request: web.Request, fields: Mapping[str, Any]) -> str | None:
    """The id that the client gives its request, in the body or a header."""
    chosen = fields.get("request_id") or request.headers.get("X-Request-Id")
    if chosen is not None and not _REQUEST_ID.fullmatch(chosen):
        raise InvalidRequestError(
            f"request_id is {chosen[:100]!r}; it must be 1 to 128 letters, digits and signs of _.:-",
            param="request_id",
        )
    return chosen
