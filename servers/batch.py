"""Answer a file of requests in OpenAI's batch format: one JSON object a line in, one a line out, in the same order.

Every line goes through the server itself, over a Unix socket that only this process knows, so that it is checked and
answered as it would be there. Memory stays flat however long the file is.
"""

import asyncio
import json
import logging
import tempfile
import uuid
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import aiohttp
from aiohttp import web

import pagedjax
from pagedjax import AsyncEngine, ConfigError, EngineConfig, EngineDeadError, InvalidRequestError
from servers.app import create_app
from servers.body import parse_json
from servers.config import BatchConfig, ServerConfig

logger = logging.getLogger(__name__)

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
REPORT_LINES = 100


@dataclass
class Counts:
    """Lines that were answered, and how many of them with an error."""

    num_lines: int = 0
    num_failed: int = 0


def run_batch(engine_config: EngineConfig, config: BatchConfig) -> Counts:
    """Answer the whole file.

    Raises:
      ConfigError: a file cannot be used, or the engine cannot start.
      EngineDeadError: the engine died; the answers before that are in the file.
    """
    for name in ("input_file", "output_file"):
        if not getattr(config, name):
            raise ConfigError(f"{name} is missing; give it as --{name.replace('_', '-')}")
    if Path(config.output_file).exists():
        raise ConfigError(f"{config.output_file}: File exists; choose another file")
    try:
        with open(config.input_file, "rb") as lines:
            engine = AsyncEngine(pagedjax.LLMEngine(engine_config, show_progress=True))
            with open(config.output_file, "x", encoding="utf-8") as answers:
                return asyncio.run(answer_lines(engine, iter(lines), answers))
    except OSError as error:
        raise ConfigError(f"{error.filename}: {error.strerror}; choose another file") from None


async def answer_lines(engine: AsyncEngine, lines: Iterator[bytes], answers: TextIO) -> Counts:
    """Answer each of `lines` on `answers`, as many at once as keep the engine busy, and shut `engine` down."""
    counts, ids = Counts(), set[str]()
    pending: deque[asyncio.Task[dict[str, Any]]] = deque()
    try:
        async with _server(engine) as session:
            for line in lines:
                if not line.strip():
                    continue
                pending.append(asyncio.create_task(_answer(session, line, ids)))
                if len(pending) >= 2 * engine.config.max_num_seqs:
                    _write(await pending.popleft(), answers, counts)
            while pending:
                _write(await pending.popleft(), answers, counts)
    finally:
        for task in pending:
            task.cancel()
        await engine.shutdown()
    return counts


@asynccontextmanager
async def _server(engine: AsyncEngine) -> AsyncIterator[aiohttp.ClientSession]:
    with tempfile.TemporaryDirectory() as directory:
        config = ServerConfig(uds=str(Path(directory) / "socket"), disable_access_log=True)
        runner = web.AppRunner(create_app(engine, config), handler_cancellation=True, access_log=None)
        await runner.setup()
        try:
            await web.UnixSite(runner, config.uds or "").start()
            headers = {"Authorization": f"Bearer {config.api_keys[0]}"} if config.api_keys else {}
            timeout = aiohttp.ClientTimeout(total=None)
            connector = aiohttp.UnixConnector(config.uds or "", limit=0)
            async with aiohttp.ClientSession(
                "http://localhost", connector=connector, headers=headers, timeout=timeout
            ) as session:
                yield session
        finally:
            await runner.cleanup()


async def _answer(session: aiohttp.ClientSession, line: bytes, ids: set[str]) -> dict[str, Any]:
    custom_id = None
    try:
        request = parse_json(line)
        custom_id = request.get("custom_id")
        url, body = _check(request, ids)
    except InvalidRequestError as error:
        return _result(custom_id, None, {"code": "invalid_request", "message": str(error)})
    while True:
        async with session.post(url, json=body) as response:
            if response.status != 503 or "Retry-After" not in response.headers:
                answer = await response.json()
                whole = {"status_code": response.status, "request_id": answer.get("id"), "body": answer}
                return _result(custom_id, whole, None)
        await asyncio.sleep(float(response.headers["Retry-After"]))


def _check(request: dict[str, Any], ids: set[str]) -> tuple[str, dict[str, Any]]:
    for name in request.keys() - {"custom_id", "method", "url", "body"}:
        raise InvalidRequestError(f"{name[:64]!r} is no field of a batch line; remove it")
    custom_id, url, body = request.get("custom_id"), request.get("url"), request.get("body")
    if not isinstance(custom_id, str) or not custom_id or custom_id in ids:
        raise InvalidRequestError(f"custom_id is {custom_id!r:.80}; it must be a string that no earlier line has")
    ids.add(custom_id)
    if request.get("method", "POST") != "POST" or url not in URLS:
        raise InvalidRequestError(f"url is {url!r:.80}; it must be one of {', '.join(URLS)}, with method POST")
    if not isinstance(body, dict):
        raise InvalidRequestError("body must be an object")
    if body.get("stream"):
        raise InvalidRequestError("stream is true; a batch does not stream, leave it out")
    return url, body


def _result(custom_id: Any, response: dict[str, Any] | None, error: dict[str, Any] | None) -> dict[str, Any]:
    return {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": custom_id, "response": response, "error": error}


def _write(result: dict[str, Any], answers: TextIO, counts: Counts) -> None:
    response = result["response"]
    if response is not None and response["status_code"] == 500 and "has stopped" in str(response["body"]):
        raise EngineDeadError("the engine stopped while it answered the batch; its log says why")
    answers.write(json.dumps(result, ensure_ascii=False) + "\n")
    answers.flush()
    counts.num_lines += 1
    counts.num_failed += response is None or response["status_code"] != 200
    if counts.num_lines % REPORT_LINES == 0:
        logger.info("%d lines answered, %d with an error", counts.num_lines, counts.num_failed)
