"""What one client can use up: the queue, time, connections that send or read slowly."""

import asyncio
import json
import socket
import threading
import time

import pytest
from aiohttp.test_utils import TestClient, TestServer

from pagedjax.async_engine import AsyncEngine
from servers import ServerConfig, body, create_app, generation, streaming
from servers.state import STATE
from tests.servers.fakes import FakeEngine
from tests.servers.pauses import Pauses

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture
def fake():
    return FakeEngine(max_num_seqs=2)


async def test_a_full_queue_is_a_503_that_says_when_to_retry(serve, fake):
    client = await serve(max_num_queued_reqs=1)
    fake.gate.clear()
    running = [
        asyncio.create_task(client.post(COMPLETIONS, json={"prompt": "ab", "n": n, "max_tokens": 1})) for n in (1, 2)
    ]
    await fake.until(lambda: len(fake.added) == 2)
    refused = await client.post(COMPLETIONS, json={"prompt": "ab", "stream": True})
    assert (refused.status, refused.headers["Retry-After"]) == (503, "1")
    error = (await refused.json())["error"]
    assert error["type"] == "ServiceUnavailableError"
    assert "3 completions of at most 3" in error["message"]
    assert "--max-num-queued-reqs" in error["message"]
    fake.gate.set()
    assert [(await one).status for one in running] == [200, 200]
    assert (await client.post(COMPLETIONS, json={"prompt": "ab", "n": 3})).status == 200


async def test_prompt_tokens_fill_the_queue_too(serve, fake):
    client = await serve(max_num_queued_tokens=10)
    fake.gate.clear()
    running = asyncio.create_task(client.post(COMPLETIONS, json={"prompt": "abcdef", "max_tokens": 1}))
    await fake.until(lambda: fake.added)
    refused = await client.post(COMPLETIONS, json={"prompt": "abcdef"})
    assert refused.status == 503
    assert "--max-num-queued-tokens" in (await refused.json())["error"]["message"]
    assert (await client.post(COMPLETIONS, json={"prompt": "abcdefabcdef"})).status == 400  # it never fits
    fake.gate.set()
    assert (await running).status == 200


async def test_what_can_never_fit_the_queue_is_a_400(serve):
    client = await serve(max_num_queued_reqs=5)
    refused = await client.post(COMPLETIONS, json={"prompt": ["a"] * 4, "n": 2})
    assert refused.status == 400
    assert "8 completions, the server never holds more than 7" in (await refused.json())["error"]["message"]


@pytest.mark.parametrize(("options", "headers"), [({"request_timeout": 0.05}, {}), ({}, {"X-Request-Timeout": "0.05"})])
async def test_a_deadline_ends_a_request_in_the_engine_and_frees_its_place(serve, fake, monkeypatch, options, headers):
    monkeypatch.setattr(generation, "GRACE_SECONDS", 60.0)  # however late the engine is, the answer is its own
    client = await serve(**options)
    fake.gate.clear()
    response = await client.post(COMPLETIONS, json={"prompt": ["a", "b"]}, headers=headers)
    assert response.status == 504
    error = (await response.json())["error"]
    assert (error["type"], error["message"]) == ("TimeoutError", "the request has reached its deadline")
    await fake.until(lambda: not fake.requests)
    assert 'finished_reason="timeout",model_name="fake"} 2.0' in await (await client.get("/metrics")).text()


async def test_a_deadline_is_kept_where_the_engine_is_stuck(serve, fake, monkeypatch):
    monkeypatch.setattr(generation, "GRACE_SECONDS", 0.05)
    fake.is_stuck = True
    client = await serve(request_timeout=0.05)
    fake.gate.clear()
    response = await client.post(COMPLETIONS, json={"prompt": ["a", "b"]})
    assert response.status == 504
    assert "allow it more time" in (await response.json())["error"]["message"]
    await fake.until(lambda: len(fake.aborted) == 2)


@pytest.mark.parametrize("is_stuck", [False, True])
async def test_a_deadline_is_an_error_event_in_a_stream(serve, fake, monkeypatch, is_stuck):
    monkeypatch.setattr(generation, "GRACE_SECONDS", 0.05 if is_stuck else 60.0)
    fake.is_stuck = is_stuck
    client = await serve(request_timeout=60.0)
    fake.gate.clear()
    response = await client.post(CHAT, json={"messages": HI, "stream": True}, headers={"X-Request-Timeout": "0.05"})
    events = (await response.text()).removesuffix("\n\n").split("\n\n")
    assert events[-1] == "data: [DONE]"
    assert json.loads(events[-2].removeprefix("data: "))["error"]["code"] == 504
    await fake.until(lambda: not fake.requests)
    assert len(fake.aborted) == is_stuck


@pytest.fixture
def stuck(fake, engine):
    """Have every step take for ever, and the compilation of every form. Returns the event of the first step."""
    is_entered, go_on = threading.Event(), threading.Event()

    def step():
        is_entered.set()
        go_on.wait()
        return []

    fake.step, fake.prepare = step, lambda params: go_on.wait()
    yield is_entered
    go_on.set()


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_deadline_is_kept_before_a_stuck_engine_has_even_taken_the_request(
    stuck, serve, monkeypatch, is_stream
):
    """The deadline was watched from the acceptance on only: a client waited for as long as the step took."""
    monkeypatch.setattr(generation, "GRACE_SECONDS", 0.05)
    client = await serve()
    async with asyncio.timeout(20):
        running = asyncio.create_task(client.post(COMPLETIONS, json={"prompt": "a"}))
        assert await asyncio.to_thread(stuck.wait, 10)
        body, headers = {"prompt": "b", "stream": is_stream}, {"X-Request-Timeout": "0.05"}
        response = await client.post(COMPLETIONS, json=body, headers=headers)
        assert (response.status, (await response.json())["error"]["type"]) == (504, "TimeoutError")
    running.cancel()


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_deadline_is_kept_while_a_form_is_compiled(stuck, serve, monkeypatch, is_stream):
    """It was not watched before the engine had accepted the request."""
    monkeypatch.setattr(generation, "GRACE_SECONDS", 0.05)
    client = await serve()
    body = {"prompt": "b", "stream": is_stream, "structured_outputs": {"regex": "x"}}
    async with asyncio.timeout(20):
        response = await client.post(COMPLETIONS, json=body, headers={"X-Request-Timeout": "0.05"})
    assert response.status == 504


@pytest.mark.parametrize("seconds", ["soon", "0", "-1", "nan", "inf", ""])
async def test_a_deadline_that_is_no_time_is_refused(http, seconds):
    response = await http.post(COMPLETIONS, json={"prompt": "a"}, headers={"X-Request-Timeout": seconds})
    assert response.status == 400


async def test_a_silent_stream_sends_comments(serve, fake):
    client = await serve(sse_keep_alive_interval=0.02)
    fake.gate.clear()
    response = await client.post(CHAT, json={"messages": HI, "stream": True, "max_tokens": 4})
    lines = [await response.content.readline() for _ in range(6)]
    assert [line for line in lines[2:] if line != b"\n"] == [b": keep-alive\n"] * 2
    fake.gate.set()
    text = await response.text()
    assert text.endswith("data: [DONE]\n\n")


class BusyStream:
    """A stream that has just sent an event whenever one looks."""

    is_blocked = False

    def __init__(self):
        self.num_looks = 0
        self.comments = []

    @property
    def sent_time(self):
        self.num_looks += 1
        return time.monotonic()

    async def send(self, data):
        self.comments.append(data)


async def test_a_busy_stream_sends_no_comments():
    """The test streamed four tokens under an interval of seconds: no comment was due whatever the stream sent."""
    stream = BusyStream()
    tending = asyncio.create_task(streaming._tend(stream, 0.001))
    while stream.num_looks < 20 and not stream.comments:  # noqa: ASYNC110  no event
        await asyncio.sleep(0.001)
    tending.cancel()
    assert stream.comments == []


async def slow_reader(client, request):
    """Connect with a small window, send `request` and read nothing."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.setblocking(False)
    await asyncio.get_running_loop().sock_connect(connection, (client.host, client.port))
    reader, writer = await asyncio.open_connection(sock=connection, limit=1)
    body = json.dumps(request).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    return reader, writer


async def test_a_slow_reader_holds_back_only_itself(monkeypatch):
    """It is dropped when it takes nothing at all, its request is aborted, and a stream beside it runs on."""
    monkeypatch.setattr(streaming, "SLOW_READER_SECONDS", 0.2)
    fake = FakeEngine(max_model_len=10**8, step_seconds=0.001)
    engine = AsyncEngine(fake)
    async with TestClient(TestServer(create_app(engine, ServerConfig(max_request_bytes=16 << 20)))) as client:
        body = {"prompt": "x" * 8_000_000, "max_tokens": 10**8, "stream": True, "echo": True}
        _, writer = await slow_reader(client, body)
        await fake.until(lambda: fake.added)
        quick = await client.post(COMPLETIONS, json={"prompt": "ab", "max_tokens": 10**8, "stream": True})
        pauses = Pauses()
        async with asyncio.timeout(60):
            while not fake.aborted:
                await quick.content.readline()
                pauses.end()
        assert fake.aborted == [fake.added[0][0]]
        pauses.check()
        quick.close()
        writer.close()
        await fake.until(lambda: len(fake.aborted) == 2)
    await engine.shutdown()


async def test_a_reader_that_stops_before_the_end_is_dropped_too(monkeypatch):
    """Only events were watched, not the last bytes: it kept its place in the queue for as long as it was connected."""
    monkeypatch.setattr(streaming, "SLOW_READER_SECONDS", 0.2)
    fake, listening = FakeEngine(max_model_len=10**6), socket.create_server(("127.0.0.1", 0))
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    engine = AsyncEngine(fake)
    app = create_app(engine, ServerConfig())
    async with TestServer(app, socket_factory=lambda *_: listening) as server:
        # 100 kB in pieces: aiohttp waits for the client after 64 kB, when it still has room, and at the end
        body = {"prompt": "x" * 2400, "n": 40, "max_tokens": 1, "stream": True, "echo": True}
        _, writer = await slow_reader(server, body)
        await fake.until(lambda: fake.added)
        async with asyncio.timeout(20):
            await app[STATE].open_requests.wait_empty()
        writer.close()
    await engine.shutdown()


async def test_a_body_that_never_ends_is_given_up(http, fake, monkeypatch):
    monkeypatch.setattr(body, "BODY_SECONDS", 0.05)
    reader, writer = await asyncio.open_connection(http.host, http.port)
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    writer.write(f'{head}Content-Length: 1000\r\n\r\n{{"prompt"'.encode())
    status = await reader.readline()
    assert b" 408 " in status
    writer.close()


async def test_headers_are_bounded(http):
    for headers in ({"X": "y" * 10_000}, {f"X{i}": "y" for i in range(200)}):
        response = await http.get("/v1/models", headers=headers)
        assert response.status in (400, 431)
