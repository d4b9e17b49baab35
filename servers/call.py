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
    options, timeout = parse_stream_options(fields), _timeout(request, state)
    request_id = _claim_id(request, fields["request_id"], id_prefix)
    return Call(request, state, fields, options, request_id, arrival_time, timeout)


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


def _claim_id(request: web.Request, chosen: str | None, prefix: str) -> str:
    """Give the request the id that its client chose, else that of the header X-Request-Id, else a new one.

    Proxies write the header, in forms of their own and again when they try again: one that cannot be had is no error.
    """
    claim = request.app[STATE].open_requests.claim
    if chosen is not None:
        _check_id(chosen)
        if not claim(request, f"{prefix}{chosen}"):
            raise InvalidRequestError(
                f"request_id {chosen!r} belongs to a request that is still running; choose another", param="request_id"
            )
        return f"{prefix}{chosen}"
    request_id = f"{prefix}{request.headers.get('X-Request-Id', '')}"
    if not (_REQUEST_ID.fullmatch(request_id, len(prefix)) and claim(request, request_id)):
        request_id = f"{prefix}{uuid.uuid4().hex}"
        claim(request, request_id)
    return request_id


def _check_id(chosen: str) -> None:
    if not _REQUEST_ID.fullmatch(chosen):
        raise InvalidRequestError(
            f"request_id is {chosen[:100]!r}; it must be 1 to 128 letters, digits and signs of _.:-",
            param="request_id",
        )
