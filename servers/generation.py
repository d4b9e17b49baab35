"""The engine requests behind one call: start them together, follow them, abort them when the client leaves."""

import asyncio
import dataclasses
import logging
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any, Protocol

from aiohttp import web

from pagedjax import InvalidRequestError, RequestOutput, SamplingParams
from pagedjax.async_engine import RequestStream
from servers.call import Call
from servers.errors import ApiError
from servers.metrics import ServerMetrics
from servers.open_requests import OpenRequest
from servers.prompts import Prompt
from servers.streaming import DATA_EVENTS, Framing, json_answer, large_json_answer, send_events

logger = logging.getLogger(__name__)

GRACE_SECONDS = 0.5  # beyond a deadline, which the engine keeps between two steps: for an engine that is stuck


class Answer(Protocol):
    """Turns outputs of the engine into an endpoint's JSON."""

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """Return the answer to a call that does not stream, from the one output of each prompt."""
        ...

    def events(self, streams: Sequence[RequestStream]) -> AsyncGenerator[str]:
        """Yield the JSON texts of a stream's events, from one stream of outputs a prompt."""
        ...


async def respond(
    call: Call,
    answer: Answer,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    *,
    framing: Framing = DATA_EVENTS,
) -> web.StreamResponse:
    """Generate for each prompt and answer as the call asked for it; a client that leaves aborts its requests."""
    async with submit(call, prompts, params) as streams:
        if call.is_stream:
            interval = call.state.config.sse_keep_alive_interval
            events = answer.events(streams)
            return await send_events(
                call.request, events, framing=framing, keep_alive_interval=interval, timeout=_patience(call)
            )
        async with asyncio.timeout(_patience(call)):
            outputs = await final_outputs(streams)
        if params.prompt_logprobs is not None:  # entries for every prompt token: too many to build in the event loop
            return await asyncio.to_thread(lambda: large_json_answer(answer.whole(outputs)))
        return json_answer(answer.whole(outputs))


@asynccontextmanager
async def submit(call: Call, prompts: Sequence[Prompt], params: SamplingParams) -> AsyncIterator[list[RequestStream]]:
    """Start one engine request a prompt; leaving the context aborts those that still run.

    Raises:
      ApiError: the queue is full.
      InvalidRequestError: the engine refuses one of them; then none runs.
      TimeoutError: it has not accepted all of them by the call's deadline.
    """
    _check_priority(call)
    metrics = call.state.metrics
    opened = _open_request(call, prompts, params)
    streams: list[RequestStream] = []
    with call.state.open_requests.admit(opened):
        _log(call, "Received", "%d prompt tokens, %s", opened.num_prompt_tokens, _without_text(params))
        try:
            for engine_request_id, prompt in zip(opened.engine_request_ids, prompts, strict=True):
                stream = call.engine.generate(
                    prompt.token_ids,
                    params,
                    engine_request_id,
                    priority=call.fields["priority"],
                    cache_salt=_cache_salt(call),
                    client=(call.owner, call.fields["user"] or ""),
                    arrival_time=call.arrival_time,
                    timeout=call.timeout,
                )
                streams.append(stream)
                metrics.start_request(stream.request_id, params)
            async with asyncio.timeout(_patience(call)):
                await _accepted(streams, metrics)
            yield streams
        finally:
            for stream in streams:
                await stream.aclose()
            _log(call, "Left", "after %.3f s", time.monotonic() - call.arrival_time)


async def final_outputs(streams: Sequence[RequestStream]) -> list[RequestOutput]:
    """Return the one output of each FINAL_ONLY request, in order."""
    async with aclosing(interleave(streams)) as arriving:
        outputs = {i: output async for i, output in arriving}
    return [outputs[i] for i in range(len(streams))]


def checked(output: RequestOutput) -> RequestOutput:
    """Return `output`; a 504 if the engine ended the request at its deadline, a 500 if it could not finish it."""
    if output.error is not None:
        is_late = any(completion.finish_reason == "timeout" for completion in output.outputs)
        raise ApiError(504 if is_late else 500, output.error)
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


def _patience(call: Call) -> float | None:
    """Seconds from now that the answer may take."""
    if call.timeout is None:
        return None
    return max(0.0, call.arrival_time + call.timeout + GRACE_SECONDS - time.monotonic())


def _open_request(call: Call, prompts: Sequence[Prompt], params: SamplingParams) -> OpenRequest:
    """Describe the call for the queue. The engine's own ids are unique, whatever ids the clients choose."""
    unique = uuid.uuid4().hex
    return OpenRequest(
        id=call.id,
        owner=call.owner,
        path=call.request.path,
        arrival_time=call.arrival_time,
        engine_request_ids=tuple(f"{unique}-{i}" for i in range(len(prompts))),
        num_sequences=len(prompts) * params.num_requests,
        num_prompt_tokens=sum(len(prompt.token_ids) for prompt in prompts),
    )


async def _accepted(streams: Sequence[RequestStream], metrics: ServerMetrics) -> None:
    try:
        for stream in streams:
            await stream
    except BaseException:  # refused, or the client has left already: as if it had never come
        for stream in streams:
            metrics.forget_request(stream.request_id)
        raise


def _log(call: Call, event: str, details: str, *values: Any) -> None:
    if call.state.config.enable_log_requests:
        logger.info(f"%s request %s: {details}", event, call.id, *values)


def _without_text(params: SamplingParams) -> str:
    """The parameters that differ from the defaults, without those that hold a client's words."""
    given = {
        field.name: getattr(params, field.name)
        for field in dataclasses.fields(params)
        if getattr(params, field.name) != field.default and field.name not in ("stop", "bad_words", "output_kind")
    }
    return ", ".join(f"{name}={value!r:.80}" for name, value in given.items()) or "default parameters"


def _cache_salt(call: Call) -> str | None:
    """Whose cached prefixes may be used. Where keys are in use each has its own, unless a request names a salt.

    The two kinds begin differently, so that no salt that a client can name is another key's own.
    """
    given = call.fields["cache_salt"]
    if not call.owner:
        return given
    return f"key:{call.owner}" if given is None else f"salt:{given}"


def _check_priority(call: Call) -> None:
    priority = call.fields["priority"]
    if priority and call.engine.config.scheduling_policy != "priority":
        raise InvalidRequestError(
            f"priority is {priority}, but this server schedules first come first served; "
            "leave it out or start the server with --scheduling-policy priority",
            param="priority",
        )
    best = call.state.access.best_priority(call.owner)
    if priority < best:
        raise InvalidRequestError(
            f"priority is {priority}, the lowest value you may ask for is {best}; raise it (--best-priority)",
            param="priority",
        )
