"""Thousands of requests that are aborted, left or timed out at random: no block, row, task or open request remains."""

import asyncio
import contextlib
import random

import aiohttp
import pytest
from aiohttp import web

from pagedjax.async_engine import AsyncEngine
from servers import ServerConfig
from servers.app import create_app
from servers.http_log import http_logger
from servers.state import STATE
from tests.fakes import fake_engine

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"


def body_of(draw, number):
    """A request of a random endpoint, size and shape."""
    common = {"stream": draw.random() < 0.6, "request_id": str(number), "ignore_eos": True, "temperature": 0}
    text, num_tokens = "x" * draw.randint(1, 60), draw.randint(1, 60)
    kind = draw.random()
    if kind < 0.4:
        return CHAT, common | {
            "messages": [{"role": "user", "content": text}],
            "max_tokens": num_tokens,
            "n": draw.choice([1, 1, 3]),
        }
    if kind < 0.8:
        prompt = text if draw.random() < 0.6 else [text, "y" * 20]
        return COMPLETIONS, common | {"prompt": prompt, "max_tokens": num_tokens}
    return RESPONSES, common | {"input": text, "max_output_tokens": num_tokens}


async def interrupted(session, draw, number):
    """Send one request and end it in one of five ways; return how."""
    path, body = body_of(draw, number)
    prefix = {CHAT: "chatcmpl-", COMPLETIONS: "cmpl-", RESPONSES: "resp_"}[path]
    way = draw.choice(["finish", "abort", "leave at once", "leave later", "deadline"])
    headers = {"X-Request-Timeout": f"{draw.uniform(0.001, 0.05):.4f}"} if way == "deadline" else {}
    if way == "leave at once":
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(draw.uniform(0, 0.03)), session.post(path, json=body) as response:
                await response.read()
        return way
    asked = asyncio.create_task(session.post(path, json=body, headers=headers))
    if way == "abort":
        await asyncio.sleep(draw.uniform(0, 0.03))
        await (await session.post("/abort", json={"request_id": f"{prefix}{number}"})).read()
    response = await asked
    assert response.status in ((200, 504) if way == "deadline" else (200,)), (way, await response.text())
    if way == "leave later" and body["stream"]:
        await response.content.readline()
        response.close()
    else:
        await response.read()
    return way


async def interrupt(engine, count, *, concurrency=24):
    """Send `count` requests and return what the server and the event loop still hold after the last one."""
    draw = random.Random(7)
    app = create_app(engine, ServerConfig())
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, logger=http_logger())
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    tasks_before = asyncio.all_tasks()
    ways = set()
    numbers = iter(range(count))

    async def client(session):
        for number in numbers:
            ways.add(await interrupted(session, draw, number))

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(f"http://127.0.0.1:{runner.addresses[0][1]}", connector=connector) as session:
        await asyncio.gather(*(client(session) for _ in range(concurrency)))
    assert len(ways) == 5
    async with asyncio.timeout(30):
        await app[STATE].open_requests.wait_empty()
        # connections that were left are closing, and blocks come back in the step after the last output
        while asyncio.all_tasks() - tasks_before or engine.stats()["kv_cache_usage_perc"]:  # noqa: ASYNC110  no event
            await asyncio.sleep(0.01)
    view = await engine.inspect()
    metrics = app[STATE].metrics.exposition().decode()
    await runner.cleanup()
    return view, engine.stats(), metrics


async def check(count):
    llm_engine = fake_engine(max_num_seqs=8)
    engine = AsyncEngine(llm_engine)
    view, stats, metrics = await interrupt(engine, count)
    assert view.requests == ()
    assert not any(view.num_block_refs)
    assert (stats["num_requests_running"], stats["num_requests_waiting"], stats["kv_cache_usage_perc"]) == (0, 0, 0)
    assert stats["num_compilations_after_ready"] == 0
    llm_engine.check_integrity()
    lines = [line for line in metrics.splitlines() if line.startswith("vllm:")]
    counts = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}
    finished = sum(value for name, value in counts.items() if name.startswith("vllm:request_success_total"))
    (e2e,) = [value for name, value in counts.items() if name.startswith("vllm:e2e_request_latency_seconds_count")]
    assert finished == e2e > 0.5 * count
    await engine.shutdown()


@pytest.mark.slow
async def test_nothing_is_left_of_requests_that_end_in_any_way():
    await check(200)


@pytest.mark.fuzz
async def test_nothing_is_left_of_five_thousand_requests_that_end_in_any_way():
    await check(5000)
