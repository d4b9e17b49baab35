"""Run a server from its options to its end: take the port, load the engine, serve, stop cleanly."""

import asyncio
import errno
import gc
import logging
import os
import signal
import socket
import ssl
import stat
import sys
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from aiohttp import web

import pagedjax
from pagedjax import AsyncEngine, ConfigError, EngineConfig
from servers.app import ROUTES, create_app
from servers.config import ServerConfig
from servers.http_log import http_logger
from servers.state import STATE, ServerState

logger = logging.getLogger(__name__)

SWITCH_INTERVAL = 0.001  # seconds the event loop may keep the interpreter from the engine thread; Python's own is 0.005
IDLE_SECONDS = 75.0  # a connection may wait so long between requests, and take so long to send a request's headers
BACKLOG = 1024  # connections that wait to be accepted: those past aiohttp's 128 would try again after a second
SHUTDOWN_SECONDS = 5.0  # for answers under way to say that the engine has stopped


def run_server(engine_config: EngineConfig, server_config: ServerConfig) -> int:
    """Serve until SIGINT or SIGTERM. Returns the exit status: 1 if the engine died.

    Raises:
      ConfigError: the port is taken (found before anything loads), or the engine cannot start.
    """
    tls_context(server_config)  # its errors come before anything loads
    listener = listen(server_config)
    with listener:
        llm_engine = pagedjax.LLMEngine(engine_config, show_progress=True)
        sys.setswitchinterval(SWITCH_INTERVAL)
        gc.collect()
        gc.freeze()  # what is loaded now stays: the collector need not walk it again during a step
        return asyncio.run(serve(AsyncEngine(llm_engine), server_config, listener))


def listen(config: ServerConfig) -> socket.socket:
    """Take the address, without accepting connections yet: who asks too early is refused, not kept waiting.

    Raises:
      ConfigError: it is in use or not this machine's.
    """
    if config.uds is not None:
        return _listen_on_path(config, config.uds)
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise _cannot_listen(config, error) from None
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise _cannot_listen(config, error) from None
    return listener


def tls_context(config: ServerConfig) -> ssl.SSLContext | None:
    """Return the TLS options, None for plain HTTP.

    Raises:
      ConfigError: a file cannot be read, or key and certificate do not fit.
    """
    if config.ssl_certfile is None:
        return None
    for name in ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs"):
        if (path := getattr(config, name)) is not None:
            _check_readable(name, path)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, password=_no_password)
        if config.ssl_ca_certs is not None:
            context.load_verify_locations(config.ssl_ca_certs)
            context.verify_mode = ssl.CERT_REQUIRED
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the TLS files cannot be used: {error}; check --ssl-certfile, --ssl-keyfile and --ssl-ca-certs"
        ) from None
    return context


async def serve(engine: AsyncEngine, config: ServerConfig, listener: socket.socket) -> int:
    """Serve `engine` on `listener` until a signal comes or the engine dies, then shut both down.

    SIGTERM lets running requests finish for `shutdown_timeout` seconds; SIGINT, and any second signal, does not.

    Raises:
      ConfigError: another process has begun to listen on the address meanwhile, or TLS cannot be set up.
    """
    app = create_app(engine, config)
    app.on_shutdown.append(lambda _: engine.shutdown())  # after the last connection, before waiting for answers
    runner = web.AppRunner(
        app,
        handler_cancellation=True,  # a client that leaves aborts its requests
        access_log_format='%a "%r" %s %b bytes %Tf s',
        access_log=None if config.disable_access_log else logging.getLogger("aiohttp.access"),
        shutdown_timeout=SHUTDOWN_SECONDS,
        keepalive_timeout=IDLE_SECONDS,
        logger=http_logger(),
    )
    with _signals() as signals:
        await runner.setup()
        try:
            await _start(runner, config, listener)
            _log_start(engine, config, listener)
            return await _until_stopped(app[STATE], signals)
        finally:
            await runner.cleanup()


async def _start(runner: web.AppRunner, config: ServerConfig, listener: socket.socket) -> None:
    context = tls_context(config)
    try:
        await web.SockSite(runner, listener, ssl_context=context, backlog=BACKLOG).start()
    except OSError as error:
        raise _cannot_listen(config, error) from None


def _listen_on_path(config: ServerConfig, path: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    try:
        with suppress(FileNotFoundError):
            if stat.S_ISSOCK(os.stat(path).st_mode) and listener.connect_ex(path) == errno.ECONNREFUSED:
                os.unlink(path)  # what a server left that is no more
        listener.bind(path)
    except OSError as error:
        listener.close()
        raise _cannot_listen(config, error) from None
    return listener


def _check_readable(name: str, path: str) -> None:
    """Open the file: the TLS library's errors do not say which one they mean."""
    try:
        with open(path, "rb"):
            pass
    except OSError as error:
        raise ConfigError(
            f"{name} is {path!r}: {error.strerror}; give a file that can be read with --{name.replace('_', '-')}"
        ) from None


def _no_password() -> str:
    raise ValueError("the key is encrypted; give one without a password")


def _cannot_listen(config: ServerConfig, error: OSError) -> ConfigError:
    if config.uds is not None:
        return ConfigError(f"cannot listen on {config.uds}: {error.strerror}; choose another path with --uds")
    return ConfigError(
        f"cannot listen on {config.host}:{config.port}: {error.strerror}; "
        "stop what uses it or choose another with --port and --host"
    )


@contextmanager
def _signals() -> Iterator["asyncio.Queue[signal.Signals]"]:
    """Turn SIGINT and SIGTERM into the items of a queue."""
    loop = asyncio.get_running_loop()
    signals: asyncio.Queue[signal.Signals] = asyncio.Queue()
    numbers = (signal.SIGINT, signal.SIGTERM)
    for number in numbers:
        loop.add_signal_handler(number, signals.put_nowait, number)
    try:
        yield signals
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


async def _until_stopped(state: ServerState, signals: "asyncio.Queue[signal.Signals]") -> int:
    died = asyncio.create_task(state.engine.wait_stopped())
    try:
        number = await _first(signals.get(), died)
        if number == signal.SIGTERM:
            state.open_requests.close()
        if number == signal.SIGTERM and state.open_requests.num_handled:
            await _drain(state, signals, died)
        elif number is not None:
            logger.info("Shutting down: %s", number.name)
    finally:
        died.cancel()
    if state.engine.is_alive:
        return 0
    logger.error("Shutting down: %s", state.engine.dead_error)
    return 1


async def _drain(state: ServerState, signals: "asyncio.Queue[signal.Signals]", died: asyncio.Task[None]) -> None:
    """Wait until all requests are over, those that are still being read too, for as long as allowed."""
    requests, seconds = state.open_requests, state.config.shutdown_timeout
    logger.info("Shutting down: %d requests have %g seconds to finish", requests.num_handled, seconds)
    empty = asyncio.create_task(requests.wait_empty())
    try:
        async with asyncio.timeout(seconds):
            await _first(signals.get(), died, empty)
    except TimeoutError:
        logger.warning("Shutting down: %d requests have not finished", requests.num_handled)
    finally:
        empty.cancel()


async def _first(signalled: Coroutine[Any, Any, signal.Signals], *others: asyncio.Task[None]) -> signal.Signals | None:
    """Wait for a signal or for one of the others; return the signal if it was that."""
    waiting = asyncio.create_task(signalled)
    try:
        await asyncio.wait((waiting, *others), return_when=asyncio.FIRST_COMPLETED)
        return waiting.result() if waiting.done() else None
    finally:
        waiting.cancel()


def _log_start(engine: AsyncEngine, config: ServerConfig, listener: socket.socket) -> None:
    if config.uds is not None:
        where = f"unix:{config.uds}"
    else:
        host, port = listener.getsockname()[:2]
        scheme = "http" if config.ssl_certfile is None else "https"
        where = f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
    logger.info("Serving %s on %s", engine.config.model_name, where)
    if not config.is_local and not config.api_keys:
        logger.warning("Everyone who reaches this address may use the server; --api-key asks for a key")
    logger.info("Available routes are: %s", ", ".join(f"{route.method} {route.path}" for route in ROUTES))
