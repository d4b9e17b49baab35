"""Taking the port, serving, and the ways to stop."""

import asyncio
import os
import signal

import aiohttp
import pytest

from pagedjax.async_engine import AsyncEngine
from pagedjax.errors import ConfigError
from servers.config import ServerConfig
from servers.run import listen, serve
from tests.servers.fakes import FakeEngine

CONFIG = ServerConfig(port=0)


async def started(fake):
    """Start a server; return its task and its address, which takes connections at once."""
    listener = listen(CONFIG)
    listener.listen()
    address = "http://{}:{}".format(*listener.getsockname())
    return asyncio.create_task(serve(AsyncEngine(fake), CONFIG, listener)), address


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_the_server_cleanly(number):
    fake = FakeEngine()
    server, address = await started(fake)
    async with aiohttp.ClientSession() as session, session.get(f"{address}/health") as answer:
        assert answer.status == 200
    os.kill(os.getpid(), number)
    assert await asyncio.wait_for(server, 10) == 0
    assert fake.was_shut_down
    async with aiohttp.ClientSession() as session:
        with pytest.raises(aiohttp.ClientConnectorError):
            await session.get(f"{address}/health")


async def test_a_signal_tells_the_streams_under_way():
    fake = FakeEngine()
    fake.gate.clear()
    server, address = await started(fake)
    body = {"messages": [{"role": "user", "content": "x"}], "stream": True}
    async with aiohttp.ClientSession() as session, session.post(f"{address}/v1/chat/completions", json=body) as answer:
        await answer.content.readline()
        os.kill(os.getpid(), signal.SIGTERM)
        text = await answer.text()
    assert '"error"' in text
    assert text.endswith("data: [DONE]\n\n")
    assert await asyncio.wait_for(server, 10) == 0


async def test_a_dead_engine_ends_the_server_with_status_1():
    fake = FakeEngine()
    server, address = await started(fake)
    fake.error = RuntimeError("device lost")
    body = {"prompt": "a"}
    async with aiohttp.ClientSession() as session, session.post(f"{address}/v1/completions", json=body) as answer:
        assert answer.status == 500
    assert await asyncio.wait_for(server, 10) == 1


def test_a_port_in_use_is_a_clear_error():
    with listen(CONFIG) as first:
        first.listen()
        port = first.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}: Address already in use; .*--port"):
            listen(ServerConfig(port=port))


async def test_a_port_that_another_server_took_while_the_engine_loaded_is_a_clear_error():
    """Two sockets may be bound to one address until one of them listens."""
    fake = FakeEngine()
    with listen(CONFIG) as first:
        config = ServerConfig(port=first.getsockname()[1])
        with listen(config) as second:
            second.listen()
            with pytest.raises(ConfigError, match="Address already in use"):
                await serve(AsyncEngine(fake), config, first)
    assert fake.was_shut_down


def test_an_unknown_host_is_a_clear_error():
    with pytest.raises(ConfigError, match=r"999\.999\.999\.999"):
        listen(ServerConfig(host="999.999.999.999"))


def test_the_default_is_this_machine_only():
    assert ServerConfig().host == "127.0.0.1"


@pytest.mark.parametrize("options", [{"port": -1}, {"port": 70000}, {"port": "80"}, {"max_request_bytes": 0}])
def test_options_out_of_range_are_refused(options):
    with pytest.raises(ConfigError, match="it must be an integer"):
        ServerConfig(**options)
