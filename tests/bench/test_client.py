"""One streamed request against a server that answers with prepared bytes, packet by packet."""

import asyncio
import json

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from pagedjax.bench.client import send

USAGE = {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3}}
PATHS = {False: "/v1/completions", True: "/v1/chat/completions"}


def event(value):
    return b"data: " + (value if isinstance(value, bytes) else json.dumps(value).encode()) + b"\n\n"


def text(value, finish_reason=None):
    return {"choices": [{"text": value, "finish_reason": finish_reason}]}


def delta(finish_reason=None, **fields):
    return {"choices": [{"delta": fields, "finish_reason": finish_reason}]}


async def ask(packets, *, is_chat=False, status=200, is_cut=False):
    """Send one request to a server that sends `packets`, then waits until the client has read them."""

    async def answer(request):
        response = web.StreamResponse(status=status, headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for packet in packets:
            await response.write(packet)
            await asyncio.sleep(0.002)
        if is_cut:
            request.transport.abort()
        return response

    app = web.Application()
    app.router.add_post(PATHS[is_chat], answer)
    async with TestServer(app) as server, aiohttp.ClientSession() as session:
        return await send(session, str(server.make_url(PATHS[is_chat])), {}, headers={}, prompt_len=5)


DONE = event(b"[DONE]")


async def test_tokens_are_timed_and_counted_by_usage():
    outcome = await ask([event(text("a")), event(text("b")), event(text("c", "length")), event(USAGE), DONE])
    assert outcome.error is None
    assert (outcome.text, outcome.prompt_len, outcome.output_len, outcome.has_usage) == ("abc", 7, 3, True)
    assert len(outcome.itls) == 2
    assert 0 < outcome.ttft < outcome.latency
    assert outcome.latency == pytest.approx(outcome.ttft + sum(outcome.itls))
    assert outcome.tpot == pytest.approx(sum(outcome.itls) / 2)


async def test_events_may_be_cut_anywhere_and_comments_are_skipped():
    whole = b": waiting\n\n" + event(text("é")) + event(text("b", "stop")) + event(USAGE) + DONE
    outcome = await ask([whole[i : i + 7] for i in range(0, len(whole), 7)])
    assert (outcome.error, outcome.text, len(outcome.itls)) == (None, "éb", 1)


async def test_an_event_may_be_longer_than_a_buffer():
    outcome = await ask([event(text("x" * 300_000, "stop")), event(USAGE), DONE])
    assert (outcome.error, len(outcome.text)) == (None, 300_000)


async def test_a_role_and_an_end_of_a_chat_are_no_tokens():
    outcome = await ask(
        [
            event(delta(role="assistant", content="")),
            event(delta(content="a")),
            event(delta(content="b")),
            event(delta(finish_reason="stop")),
            event(USAGE),
            DONE,
        ],
        is_chat=True,
    )
    assert (outcome.error, outcome.text, len(outcome.itls)) == (None, "ab", 1)
    assert outcome.latency > outcome.ttft + sum(outcome.itls)  # the end came last


async def test_reasoning_is_text_of_a_chat():
    outcome = await ask([event(delta(reasoning="hm")), event(delta("stop", content="so")), DONE], is_chat=True)
    assert (outcome.text, len(outcome.itls)) == ("hmso", 1)


async def test_a_token_may_have_no_text():
    outcome = await ask([event(text("")), event(text("")), event(text("", "length")), event(USAGE), DONE])
    assert (outcome.error, outcome.output_len, len(outcome.itls)) == (None, 3, 1)


async def test_token_ids_tell_that_the_end_brought_a_token():
    last = {"choices": [{"text": "", "finish_reason": "length", "token_ids": [5]}]}
    outcome = await ask([event(text("")), event(last), event(USAGE), DONE])
    assert (outcome.error, len(outcome.itls)) == (None, 1)


async def test_an_answer_that_only_ends_came_when_it_ended():
    outcome = await ask([event(text("", "stop")), event(USAGE), DONE])
    assert outcome.error is None
    assert 0 < outcome.ttft == outcome.latency


async def test_without_usage_events_are_counted_and_the_prompt_is_as_sent():
    outcome = await ask([event(text("a")), event(text("b", "stop")), DONE])
    assert (outcome.prompt_len, outcome.output_len, outcome.has_usage) == (5, 2, False)


@pytest.mark.parametrize(
    ("packets", "options", "error"),
    [
        ([b'{"error": "busy"}'], {"status": 503}, '503: {"error": "busy"}'),
        (
            [event(text("a")), event({"error": {"message": "died"}}), DONE],
            {},
            'error in the stream: {"message": "died"}',
        ),
        ([event(text("a"))], {}, "the stream ended early"),
        ([event(USAGE), DONE], {}, "the stream held no choices"),
        ([event(b"{")], {}, "JSONDecodeError"),
        ([event([1])], {}, "AttributeError"),
        ([event(text("a"))], {"is_cut": True}, "Client"),
    ],
)
async def test_what_goes_wrong_is_in_the_outcome(packets, options, error):
    outcome = await ask(packets, **options)
    assert outcome.error is not None
    assert outcome.error.startswith(error)


async def test_a_server_that_is_not_there_is_an_error_of_the_request(unused_tcp_port):
    async with aiohttp.ClientSession() as session:
        outcome = await send(session, f"http://127.0.0.1:{unused_tcp_port}/v1/completions", {}, headers={})
    assert outcome.error.startswith("ClientConnectorError")
