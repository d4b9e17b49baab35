"""The engine requests behind one HTTP request: start them together, follow them, abort them when the client leaves."""

import asyncio
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any

from pagedjax import AsyncEngine, InvalidRequestError, RequestOutput, SamplingParams
from pagedjax.async_engine import RequestStream
from servers.errors import ApiError
from servers.metrics import ServerMetrics
from servers.prompts import Prompt


def new_request_id(prefix: str) -> str:
    """Return an id that no other request has."""
    return f"{prefix}-{uuid.uuid4().hex}"


@asynccontextmanager
async def submit(
    engine: AsyncEngine,
    metrics: ServerMetrics,
    request_id: str,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    *,
    fields: Mapping[str, Any],
    arrival_time: float,
) -> AsyncIterator[list[RequestStream]]:
    """Start one engine request a prompt; leaving the context aborts those that still run.

    Raises:
      InvalidRequestError: the engine refuses one of them; then none runs.
    """
    _check_priority(engine, fields["priority"])
    streams: list[RequestStream] = []
    try:
        for i, prompt in enumerate(prompts):
            stream = engine.generate(
                prompt.token_ids,
                params,
                request_id if len(prompts) == 1 else f"{request_id}-{i}",
                priority=fields["priority"],
                cache_salt=fields["cache_salt"],
                arrival_time=arrival_time,
            )
            streams.append(stream)
            metrics.start_request(stream.request_id, params)
        await _accepted(streams, metrics)
        yield streams
    finally:
        for stream in streams:
            await stream.aclose()


async def final_outputs(streams: Sequence[RequestStream]) -> list[RequestOutput]:
    """Return the one output of each FINAL_ONLY request, in order."""
    async with aclosing(interleave(streams)) as arriving:
        outputs = {i: output async for i, output in arriving}
    return [outputs[i] for i in range(len(streams))]


def checked(output: RequestOutput) -> RequestOutput:
    """Return `output`; a 500 if the engine could not finish the request."""
    if output.error is not None:
        raise ApiError(500, output.error)
    return output


async def interleave(streams: Sequence[RequestStream]) -> AsyncGenerator[tuple[int, RequestOutput]]:
    """Yield the outputs of several streams as they come, each with its stream's index."""
    if len(streams) == 1:
        async for output in streams[0]:
            yield 0, checked(output)
        return
    arrived: asyncio.Queue[tuple[int, RequestOutput | Exception | None]] = asyncio.Queue()
    pumps = [asyncio.create_task(_pump(i, stream, arrived)) for i, stream in enumerate(streams)]
    num_open = len(streams)
    try:
        while num_open:
            i, output = await arrived.get()
            if isinstance(output, Exception):
                raise output
            if output is None:
                num_open -= 1
            else:
                yield i, checked(output)
    finally:
        for pump in pumps:
            pump.cancel()


async def _pump(
    i: int, stream: RequestStream, arrived: "asyncio.Queue[tuple[int, RequestOutput | Exception | None]]"
) -> None:
    try:
        async for output in stream:
            arrived.put_nowait((i, output))
    except Exception as error:  # raised again by whoever reads the queue
        arrived.put_nowait((i, error))
    else:
        arrived.put_nowait((i, None))


async def _accepted(streams: Sequence[RequestStream], metrics: ServerMetrics) -> None:
    try:
        for stream in streams:
            await stream
    except BaseException:  # refused, or the client has left already: as if it had never come
        for stream in streams:
            metrics.forget_request(stream.request_id)
        raise


def _check_priority(engine: AsyncEngine, priority: int) -> None:
    if priority and engine.config.scheduling_policy != "priority":
        raise InvalidRequestError(
            f"priority is {priority}, but this server schedules first come first served; "
            "leave it out or start the server with --scheduling-policy priority",
            param="priority",
        )
