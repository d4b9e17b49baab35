"""One call of an endpoint that generates: read its body, start its engine requests, answer in one piece or as a stream.

What the endpoints share. What a body means and how an answer looks is theirs: they give an `Answer`.
"""

import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from aiohttp import web

from pagedjax import AsyncEngine, RequestOutput, SamplingParams
from pagedjax.async_engine import RequestStream
from servers.body import read_json
from servers.generation import final_outputs, submit
from servers.prompts import Prompt
from servers.protocol import Field, StreamOptions, parse, parse_stream_options
from servers.state import STATE, ServerState
from servers.streaming import json_answer, send_events


@dataclass(frozen=True)
class Call:
    """An HTTP request whose fields have been checked one by one."""

    request: web.Request
    state: ServerState
    fields: Mapping[str, Any]
    stream_options: StreamOptions
    arrival_time: float  # on time.monotonic()

    @property
    def engine(self) -> AsyncEngine:
        return self.state.engine

    @property
    def is_stream(self) -> bool:
        return self.fields["stream"]


class Answer(Protocol):
    """Turns outputs of the engine into an endpoint's JSON."""

    id: str

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """Return the answer to a call that does not stream, from the one output of each prompt."""
        ...

    def events(self, streams: Sequence[RequestStream]) -> AsyncGenerator[str]:
        """Yield the JSON texts of a stream's events, from one stream of outputs a prompt."""
        ...


async def read_call(request: web.Request, table: Mapping[str, Field]) -> Call:
    """Read the body of `request` and check its fields and its model's name.

    Raises:
      InvalidRequestError, ApiError: what the client hears.
    """
    arrival_time = time.monotonic()
    state = request.app[STATE]
    fields = parse(await read_json(request), table)
    state.check_model(fields["model"])
    return Call(request, state, fields, parse_stream_options(fields), arrival_time)


async def respond(call: Call, answer: Answer, prompts: Sequence[Prompt], params: SamplingParams) -> web.StreamResponse:
    """Generate for each prompt and answer as the call asked for it; a client that leaves aborts its requests."""
    started = submit(
        call.engine,
        call.state.metrics,
        answer.id,
        prompts,
        params,
        fields=call.fields,
        arrival_time=call.arrival_time,
    )
    async with started as streams:
        if call.is_stream:
            return await send_events(call.request, answer.events(streams))
        return json_answer(answer.whole(await final_outputs(streams)))
