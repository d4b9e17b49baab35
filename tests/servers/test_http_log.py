"""What aiohttp's server logs of exceptions that reach it, and what not."""

from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from servers.http_log import http_logger


async def exceptions_in_the_log(error, caplog):
    """What is in the log of a server whose handler raises `error`."""

    async def handler(request):
        raise error

    app = web.Application()
    app.add_routes([web.get("/", handler)])
    server = TestServer(app)
    await server.start_server(logger=http_logger())
    async with TestClient(server) as client:
        assert (await client.get("/")).status == 500
    return [record.exc_info[1] for record in caplog.records if record.name == "servers.http"]


async def test_a_client_that_left_is_not_in_the_log(caplog):
    """Half of the clients that left a stream put a trace into it: of the write that found them gone."""
    assert await exceptions_in_the_log(ConnectionResetError("Cannot write to closing transport"), caplog) == []


async def test_an_exception_of_ours_is_in_the_log(caplog):
    error = ValueError("x")
    assert await exceptions_in_the_log(error, caplog) == [error]
