"""Thousands of hostile requests of twelve classes: all refused, none costs the server or its other clients anything."""

import asyncio
import contextlib
import gc
import random
import re
import resource
from collections import Counter
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from pagedjax.async_engine import AsyncEngine
from servers import ServerConfig
from servers.app import create_app
from servers.http_log import http_logger
from tests.servers.fakes import FakeEngine
from tests.servers.hostile import CLASSES, slow_loris
from tests.servers.pauses import Pauses

STATUS = re.compile(rb"HTTP/1\.[01] (\d{3}) ")
MIB = 1 << 20


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


async def attack(port, kind, data):
    """Send `data` on a connection of its own and return the statuses of the answers until it closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        with contextlib.suppress(ConnectionError):
            writer.write(data)
            await writer.drain()
        if kind is slow_loris:
            await asyncio.sleep(0.005)
            return []
        answer = b""
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(20):
                answer = await reader.read(-1)
        return [int(status) for status in STATUS.findall(answer)]
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def pauses_of_a_stream(session, stopped):
    """Read a well-behaved stream until told to stop; return the pauses between its lines."""
    response = await session.post("/v1/completions", json={"prompt": "ab", "max_tokens": 10**9, "stream": True})
    pauses = Pauses()
    while not stopped.is_set():
        assert await response.content.readline()
        pauses.end()
    response.close()
    return pauses


async def battery(count, *, concurrency=8):
    """Run `count` hostile requests beside one stream; return statuses by class, pauses, memory growth, engine."""
    draw = random.Random(0)
    fake = FakeEngine(max_model_len=10**9 + 100, step_seconds=0.01)
    engine = AsyncEngine(fake)
    app = create_app(engine, ServerConfig(max_request_bytes=4 * MIB))
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, logger=http_logger())
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    statuses = Counter()
    sizes = []
    kinds = iter([CLASSES[i % len(CLASSES)] for i in range(count)])

    async def attacker():
        for kind in kinds:
            for status in await attack(port, kind, kind(draw)) or ["closed"]:
                statuses[kind.__name__, status] += 1
            if draw.random() < 200 / count:
                sizes.append(resident_bytes())

    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
        stopped = asyncio.Event()
        stream = asyncio.create_task(pauses_of_a_stream(session, stopped))
        await fake.until(lambda: fake.added)
        await asyncio.gather(*(attacker() for _ in range(concurrency)))
        stopped.set()
        pauses = await stream
        assert (await session.get("/health")).status == 200
    await fake.until(lambda: fake.aborted)
    await runner.cleanup()
    await engine.shutdown()
    gc.collect()
    third = len(sizes) // 3
    growth = max(sizes[-third:]) - max(sizes[third : 2 * third])
    return statuses, pauses, growth, fake


def check(statuses, pauses, growth, fake):
    assert {name for name, _ in statuses} == {kind.__name__ for kind in CLASSES}
    wrong = {key: n for key, n in statuses.items() if key[1] != "closed" and not 400 <= key[1] < 500}
    assert not wrong
    pauses.check()
    assert growth < 64 * MIB
    assert len(fake.added) == 1  # the well-behaved stream


async def test_hostile_requests_are_refused_and_cost_nobody_anything():
    check(*await battery(480))


@pytest.mark.fuzz
async def test_ten_thousand_hostile_requests_are_refused_and_cost_nobody_anything():
    found = await battery(10_000)
    print(found[0], f"longest pause {found[1]}, memory growth {found[2] / MIB:.1f} MiB")  # noqa: T201
    check(*found)
    assert found[1].clock < 1
