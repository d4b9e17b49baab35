"""Hostile forms of output, all at once, against a server over the real engine: each costs its own request alone."""

import asyncio
import json

import pytest
from aiohttp.test_utils import TestClient, TestServer

from pagedjax import AsyncEngine
from servers import ServerConfig, create_app
from tests.fakes import fake_engine
from tests.kept_executables import few_buckets
from tests.servers.pauses import Pauses

pytestmark = pytest.mark.slow  # it compiles an engine


def nested(depth):
    schema = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def doubling(depth):
    """A GBNF grammar of `depth` lines whose only text has 2 ** depth characters."""
    lines = [f"a{i} ::= a{i + 1} a{i + 1}" for i in range(depth)]
    return "\n".join(["root ::= a0", *lines, f'a{depth} ::= "x"'])


HOSTILE = [
    {"regex": "("},
    {"regex": "(a{1,1000}){1,1000}"},
    {"regex": "((a{0,100}){0,100}){0,100}"},
    {"regex": "(" * 5000 + "a" + ")" * 5000},
    {"regex": ".*a.{100}b.*c.{100}"},
    {"regex": "|".join(f"x{i}y" for i in range(15_000))},
    {"choice": [f"value {i}" for i in range(1024)]},
    {"json": {"enum": [f"value {i}" for i in range(8000)]}},
    {"json": {"allOf": [{"anyOf": [{"properties": {f"a{i}": {"const": j}}} for j in range(10)]} for i in range(8)]}},
    {"json": {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(2500)}}},
    {"json": {"type": "string", "minLength": 100_000, "maxLength": 200_000}},
    {"json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}},
    {"json": {"type": "string", "pattern": "^(([a-z])+.)+[A-Z]([a-z])+$"}},
    {"json": nested(20)},
    {"grammar": doubling(60)},
    {"grammar": 'start: A\nA: /(.*a.{12}b.*)/ & /(.*b.{13}c.*)/ & /.*d.{11}e.*/'},
    {"grammar": 'start: s\ns: s s s | s s | "a" | ""'},
    {"grammar": "start: " + " | ".join(f'"{i}"' for i in range(10_000))},
    {"grammar": "start: start"},
    {"grammar": "%llguidance {}\nstart: %json {}"},
    {"json_object": True, "whitespace_pattern": "(a*)*"},
]  # fmt: skip


@pytest.fixture(scope="module")
def seen():
    return asyncio.run(attack())


async def attack():
    with few_buckets():
        engine = AsyncEngine(fake_engine(max_num_seqs=8, max_num_batched_tokens=64, is_ahead=True))
    try:
        async with TestClient(TestServer(create_app(engine, ServerConfig()))) as http:
            done = asyncio.Event()
            watching = asyncio.create_task(watch(http, done))
            answers = await asyncio.gather(*(ask(http, form) for form in HOSTILE))
            done.set()
            num_events, pauses = await watching
            last = await ask(http, {"regex": "[a-z]{3}"})
    finally:
        await engine.shutdown()
    return {"num_events": num_events, "pauses": pauses, "answers": answers, "last": last, "stats": engine.stats()}


async def ask(http, form):
    body = {"prompt": "x", "max_tokens": 8, "structured_outputs": form}
    answer = await http.post("/v1/completions", json=body)
    return answer.status, await answer.json()


async def watch(http, done):
    """Stream one answer after the other; return the number of events and the pauses between them."""
    body = {"prompt": "hello", "max_tokens": 100, "temperature": 0, "ignore_eos": True, "stream": True}
    num_events, pauses = 0, Pauses()
    while not done.is_set():
        async with http.post("/v1/completions", json=body) as answer:
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    assert "error" not in json.loads(line[6:])
                    num_events += 1
                    pauses.end()
    return num_events, pauses


def test_each_is_refused_by_name_or_answered(seen):
    for (status, body), form in zip(seen["answers"], HOSTILE, strict=True):
        if status == 400:
            assert body["error"]["param"] == "structured_outputs", form
            assert len(body["error"]["message"]) < 500
        elif status == 500:  # it reached the library's limits while it was followed
            assert "form could not be followed" in body["error"]["message"], form
        else:
            assert status == 200, form


def test_at_least_the_impossible_ones_are_refused(seen):
    for i in (0, 3, 8, 11, 14):
        assert seen["answers"][i][0] == 400, HOSTILE[i]


def test_a_stream_beside_them_never_pauses(seen):
    assert seen["num_events"] > 100
    seen["pauses"].check()


def test_the_server_goes_on(seen):
    status, body = seen["last"]
    assert status == 200
    assert body["choices"][0]["text"].isalpha()
    assert seen["stats"]["num_requests_running"] == 0
    assert seen["stats"]["num_compilations_after_ready"] == 0
