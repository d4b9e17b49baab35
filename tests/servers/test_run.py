"""Taking the port, serving, and the ways to stop."""

import asyncio
import logging
import os
import signal
import socket
import ssl
import subprocess
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from pagedjax.async_engine import AsyncEngine
from pagedjax.errors import ConfigError
from servers.config import ServerConfig
from servers.run import listen, serve, tls_context
from tests.servers.fakes import FakeEngine

CONFIG = ServerConfig(port=0)


async def started(fake, **options):
    """Start a server; return its task and its address, which takes connections at once."""
    config = ServerConfig(port=0, **options)
    listener = listen(config)
    listener.listen()
    address = "http://{}:{}".format(*listener.getsockname())
    return asyncio.create_task(serve(AsyncEngine(fake), config, listener)), address


async def until_unwell(session, address):
    while (await session.get(f"{address}/health")).status != 503:
        pass


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


async def test_a_signal_tells_the_streams_under_way_when_their_time_is_over():
    fake = FakeEngine()
    fake.gate.clear()
    server, address = await started(fake, shutdown_timeout=0.01)
    body = {"messages": [{"role": "user", "content": "x"}], "stream": True}
    async with aiohttp.ClientSession() as session, session.post(f"{address}/v1/chat/completions", json=body) as answer:
        await answer.content.readline()
        os.kill(os.getpid(), signal.SIGTERM)
        text = await answer.text()
    assert '"error"' in text
    assert text.endswith("data: [DONE]\n\n")
    assert await asyncio.wait_for(server, 10) == 0


async def test_clients_that_come_all_at_once_are_connected_at_once():
    """Of 256 streams that began together, those past 128 began a second later, when their clients tried again."""
    server, address = await started(FakeEngine())
    async with aiohttp.ClientSession() as session, session.get(f"{address}/health"):
        pass
    where = ("127.0.0.1", int(address.rpartition(":")[2]))
    clients = [socket.create_connection(where, timeout=0.9) for _ in range(300)]  # the loop accepts none meanwhile
    for client in clients:
        client.close()
    os.kill(os.getpid(), signal.SIGINT)
    assert await asyncio.wait_for(server, 10) == 0


async def test_malformed_requests_are_logged_without_their_content(caplog):
    """aiohttp logs the bytes that it could not parse, which may be a key or a prompt."""
    caplog.set_level(logging.INFO)
    server, address = await started(FakeEngine())
    reader, writer = await asyncio.open_connection("127.0.0.1", int(address.rpartition(":")[2]))
    writer.write(b"POST /v1/completions HTTP/1.1\r\nAuthorization: Bearer key\x00\r\n\r\n")
    assert b" 400 " in await reader.readline()
    writer.close()
    os.kill(os.getpid(), signal.SIGINT)
    assert await asyncio.wait_for(server, 10) == 0
    assert "Error handling request from 127.0.0.1 (BadHttpMessage)" in caplog.text
    assert "Bearer" not in caplog.text


async def test_a_body_that_cannot_be_unpacked_is_one_line_in_the_log(caplog):
    """aiohttp meets the error again when it reads what is left of the body, and logged three tracebacks as an error."""
    caplog.set_level(logging.INFO)
    server, address = await started(FakeEngine())
    headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
    async with aiohttp.ClientSession() as session:
        answer = await session.post(f"{address}/v1/completions", data=b'{"prompt": "a"}', headers=headers)
        assert (answer.status, "Content-Encoding" in await answer.text()) == (400, True)
    os.kill(os.getpid(), signal.SIGINT)
    assert await asyncio.wait_for(server, 10) == 0
    (line,) = [record for record in caplog.records if record.name == "servers.http"]
    assert (line.levelname, line.getMessage()) == ("INFO", "Unhandled exception (RequestPayloadError)")
    assert line.exc_info is None


async def test_sigterm_lets_running_requests_finish_and_admits_no_more():
    fake = FakeEngine()
    fake.gate.clear()
    server, address = await started(fake)
    body = {"prompt": "ab", "max_tokens": 3}
    async with aiohttp.ClientSession() as session:
        running = asyncio.create_task(session.post(f"{address}/v1/completions", json=body))
        await fake.until(lambda: fake.added)
        os.kill(os.getpid(), signal.SIGTERM)
        await until_unwell(session, address)
        refused = await session.post(f"{address}/v1/completions", json=body)
        assert (refused.status, refused.headers["Retry-After"]) == (503, "1")
        assert "shutting down" in await refused.text()
        fake.gate.set()
        answer = await running
        assert (await answer.json())["choices"][0]["text"] == "aba"
    assert await asyncio.wait_for(server, 10) == 0


@asynccontextmanager
async def connection(address, text):
    """Send `text` on a connection of its own."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(address.rpartition(":")[2]))
    writer.write(text)
    yield reader, writer
    writer.close()
    await writer.wait_closed()


async def test_sigterm_waits_for_the_body_of_a_request_and_answers_that_it_comes_too_late():
    """It looked for admitted requests only: one whose body was on its way lost its connection, or got a 500."""
    server, address = await started(FakeEngine())
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += b"Content-Length: 16\r\nExpect: 100-continue\r\n\r\n"
    async with connection(address, head + b'{"prompt"') as (reader, writer), aiohttp.ClientSession() as session:
        assert b" 100 " in await reader.readuntil(b"\r\n\r\n")  # it is being read
        os.kill(os.getpid(), signal.SIGTERM)
        await until_unwell(session, address)
        writer.write(b': "ab"}')
        answer = await reader.readuntil(b"\r\n\r\n")
        assert b" 503 " in answer
        assert b"Retry-After: 1" in answer
        assert await asyncio.wait_for(server, 10) == 0


@pytest.mark.parametrize("sent", [b"", b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"])
async def test_sigterm_does_not_wait_for_connections_without_a_request(sent):
    server, address = await started(FakeEngine())
    async with connection(address, sent) as (reader, _), aiohttp.ClientSession() as session:
        if sent:
            assert b" 200 " in await reader.readuntil(b"\r\n\r\n")
        await session.get(f"{address}/health")
        os.kill(os.getpid(), signal.SIGTERM)
        assert await asyncio.wait_for(server, 3) == 0


async def test_a_second_signal_ends_the_draining():
    fake = FakeEngine()
    fake.gate.clear()
    server, address = await started(fake)
    async with aiohttp.ClientSession() as session:
        running = asyncio.create_task(session.post(f"{address}/v1/completions", json={"prompt": "ab"}))
        await fake.until(lambda: fake.added)
        os.kill(os.getpid(), signal.SIGTERM)
        await until_unwell(session, address)
        os.kill(os.getpid(), signal.SIGINT)
        assert (await running).status == 500
    assert await asyncio.wait_for(server, 10) == 0


async def test_an_engine_that_dies_while_draining_is_a_failure():
    fake = FakeEngine()
    fake.gate.clear()
    server, address = await started(fake)
    async with aiohttp.ClientSession() as session:
        running = asyncio.create_task(session.post(f"{address}/v1/completions", json={"prompt": "ab"}))
        await fake.until(lambda: fake.added)
        os.kill(os.getpid(), signal.SIGTERM)
        await until_unwell(session, address)
        fake.error = RuntimeError("device lost")
        assert (await running).status == 500
    assert await asyncio.wait_for(server, 10) == 1


async def test_a_unix_socket_serves_and_replaces_what_a_dead_server_left(tmp_path):
    path = str(tmp_path / "socket")
    config = ServerConfig(uds=path)
    listen(config).close()
    listener = listen(config)
    listener.listen()
    with pytest.raises(ConfigError, match=r"cannot listen on .*socket: Address already in use; .*--uds"):
        listen(config)
    server = asyncio.create_task(serve(AsyncEngine(FakeEngine()), config, listener))
    async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(path)) as session:
        assert (await session.get("http://localhost/health")).status == 200
    os.kill(os.getpid(), signal.SIGINT)
    assert await asyncio.wait_for(server, 10) == 0


def test_unusable_tls_files_are_a_clear_error(tmp_path):
    files = {name: str(tmp_path / name) for name in ("ssl_keyfile", "ssl_certfile")}
    for path in files.values():
        Path(path).write_text("no key")
    with pytest.raises(ConfigError, match=r"TLS files cannot be used: .*--ssl-certfile"):
        tls_context(ServerConfig(**files))


@pytest.mark.parametrize("missing", ["ssl_keyfile", "ssl_certfile", "ssl_ca_certs"])
def test_a_tls_file_that_is_missing_is_named(tls_files, missing):
    """The error was "[Errno 2] No such file or directory", of any of three files."""
    path = f"{tls_files['ssl_keyfile']}.not"
    flag = missing.replace("_", "-")
    with pytest.raises(ConfigError, match=rf"{missing} is '{path}': No such file or directory; .*--{flag}"):
        tls_context(ServerConfig(**tls_files | {missing: path}))


@pytest.fixture
def tls_files(tmp_path):
    files = {"ssl_keyfile": str(tmp_path / "key.pem"), "ssl_certfile": str(tmp_path / "certificate.pem")}
    request = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    out = ["-keyout", files["ssl_keyfile"], "-out", files["ssl_certfile"]]
    subprocess.run([*request, *names, *out], check=True, capture_output=True)
    return files


async def test_tls_serves_https(tls_files):
    server, address = await started(FakeEngine(), **tls_files)
    context = ssl.create_default_context(cafile=tls_files["ssl_certfile"])
    async with aiohttp.ClientSession() as session:
        answer = await session.get(f"{address.replace('http', 'https')}/health", ssl=context)
        assert answer.status == 200
    os.kill(os.getpid(), signal.SIGINT)
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


@pytest.mark.parametrize(
    "options",
    [
        {"port": -1},
        {"port": 70000},
        {"port": "80"},
        {"max_request_bytes": 0},
        {"api_key": ("a", "a")},
        {"api_key": (" ",)},
        {"api_key": ("a", "b", "c"), "best_priority": (0, 1)},
        {"ssl_keyfile": "key.pem"},
        {"ssl_ca_certs": "ca.pem"},
        {"allowed_origins": ("*",)},
        {"allowed_origins": ("[1]",)},
        {"request_timeout": 0.0},
    ],
)
def test_options_that_make_no_sense_are_refused(options):
    with pytest.raises(ConfigError):
        ServerConfig(**options)


def test_an_empty_key_in_the_environment_is_none(monkeypatch):
    """It was an error about api_key, which nobody had given."""
    monkeypatch.setenv("VLLM_API_KEY", "")
    assert ServerConfig().api_keys == ()
    monkeypatch.setenv("VLLM_API_KEY", " ")
    with pytest.raises(ConfigError, match="VLLM_API_KEY holds a key that is empty"):
        ServerConfig()


def test_origins_come_as_vllms_json_or_one_by_one():
    both = [
        ServerConfig(allowed_origins=given) for given in (('["https://a", "https://b"]',), ("https://a", "https://b"))
    ]
    assert both[0].allowed_origins == both[1].allowed_origins
