"""A server over the fake engine on a loopback port, and clients for it."""

import openai
import pytest
from aiohttp.test_utils import TestClient, TestServer

from pagedjax.async_engine import AsyncEngine
from servers import ServerConfig, create_app
from tests.servers.fakes import FakeEngine


@pytest.fixture
def fake():
    return FakeEngine()


@pytest.fixture
async def engine(fake):
    engine = AsyncEngine(fake)
    yield engine
    await engine.shutdown()


@pytest.fixture
async def http(engine):
    """An aiohttp client of the server."""
    async with TestClient(TestServer(create_app(engine, ServerConfig(max_request_bytes=4 << 20)))) as client:
        yield client


@pytest.fixture
async def client(http):
    """The official client of the server."""
    async with openai.AsyncOpenAI(base_url=str(http.make_url("/v1")), api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
async def serve(engine):
    """Start servers of one engine with given options; return clients."""
    clients = []

    async def start(**options):
        client = TestClient(TestServer(create_app(engine, ServerConfig(**options))))
        await client.start_server()
        clients.append(client)
        return client

    yield start
    for client in clients:
        await client.close()
