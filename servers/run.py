"""Run a server from its options to its end: take the port, load the engine, serve, stop cleanly."""

import asyncio
import gc
import logging
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from aiohttp import web

import pagedjax
from pagedjax import AsyncEngine, ConfigError, EngineConfig
from servers.app import ROUTES, create_app
from servers.config import ServerConfig

logger = logging.getLogger(__name__)

SHUTDOWN_SECONDS = 5.0  # for answers under way to say that the engine has stopped


def run_server(engine_config: EngineConfig, server_config: ServerConfig) -> int:
    """Serve until SIGINT or SIGTERM. Returns the exit status: 1 if the engine died.

    Raises:
      ConfigError: the port is taken (found before anything loads), or the engine cannot start.
    """
    listener = listen(server_config)
    with listener:
        llm_engine = pagedjax.LLMEngine(engine_config, show_progress=True)
        gc.collect()
        gc.freeze()  # what is loaded now stays: the collector need not walk it again during a step
        return asyncio.run(serve(AsyncEngine(llm_engine), server_config, listener))


def listen(config: ServerConfig) -> socket.socket:
    """Take the address, without accepting connections yet: who asks too early is refused, not kept waiting.

    Raises:
      ConfigError: it is in use or not this machine's.
    """
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


async def serve(engine: AsyncEngine, config: ServerConfig, listener: socket.socket) -> int:
    """Serve `engine` on `listener` until a signal comes or the engine dies, then shut both down.

    Raises:
      ConfigError: another process has begun to listen on the address meanwhile.
    """
    app = create_app(engine, config)
    app.on_shutdown.append(lambda _: engine.shutdown())  # after the last connection, before waiting for answers
    runner = web.AppRunner(
        app,
        handler_cancellation=True,  # a client that leaves aborts its requests
        access_log_format='%a "%r" %s %b bytes %Tf s',
        access_log=None if config.disable_access_log else logging.getLogger("aiohttp.access"),
        shutdown_timeout=SHUTDOWN_SECONDS,
    )
    with _signals() as signalled:
        await runner.setup()
        try:
            await _start(runner, config, listener)
            _log_start(engine, listener)
            return await _until_stopped(engine, signalled)
        finally:
            await runner.cleanup()


async def _start(runner: web.AppRunner, config: ServerConfig, listener: socket.socket) -> None:
    try:
        await web.SockSite(runner, listener).start()
    except OSError as error:
        raise _cannot_listen(config, error) from None


def _cannot_listen(config: ServerConfig, error: OSError) -> ConfigError:
    return ConfigError(
        f"cannot listen on {config.host}:{config.port}: {error.strerror}; "
        "stop what uses it or choose another with --port and --host"
    )


@contextmanager
def _signals() -> Iterator["asyncio.Future[signal.Signals]"]:
    """Turn SIGINT and SIGTERM into a future."""
    loop = asyncio.get_running_loop()
    signalled: asyncio.Future[signal.Signals] = loop.create_future()

    def note(number: signal.Signals) -> None:
        if not signalled.done():
            signalled.set_result(number)

    numbers = (signal.SIGINT, signal.SIGTERM)
    for number in numbers:
        loop.add_signal_handler(number, note, number)
    try:
        yield signalled
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


async def _until_stopped(engine: AsyncEngine, signalled: "asyncio.Future[signal.Signals]") -> int:
    died = asyncio.create_task(engine.wait_stopped())
    try:
        await asyncio.wait((signalled, died), return_when=asyncio.FIRST_COMPLETED)
    finally:
        died.cancel()
    if signalled.done():
        logger.info("Shutting down: %s", signalled.result().name)
        return 0
    logger.error("Shutting down: %s", engine.dead_error)
    return 1


def _log_start(engine: AsyncEngine, listener: socket.socket) -> None:
    host, port = listener.getsockname()[:2]
    logger.info("Serving %s on http://%s:%d", engine.config.model_name, f"[{host}]" if ":" in host else host, port)
    logger.info("Available routes are: %s", ", ".join(f"{route.method} {route.path}" for route in ROUTES))
