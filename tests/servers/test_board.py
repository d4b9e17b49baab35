"""The board: what its JSON says, whom it shows what, and what the page may load."""

import asyncio
import re
from dataclasses import replace
from importlib import resources

import numpy as np
import pytest
from aiohttp.test_utils import TestClient, TestServer

from pagedjax.config import EngineConfig
from pagedjax.engine_view import EngineView, RequestView
from pagedjax.errors import EngineDeadError
from servers import ServerConfig, create_app
from servers.board.bottleneck import Load, bottleneck
from servers.board.history import History, Sample
from servers.board.state import block_map, request_table
from servers.latencies import Latencies
from servers.open_requests import OpenRequest

BUSY = Load(
    num_running=100,
    num_waiting=20,
    waiting_growth=0.5,
    kv_cache_usage=0.5,
    num_preemptions=0,
    num_iterations=100,
    tokens_per_iteration=2000,
    max_num_seqs=256,
    max_num_batched_tokens=2048,
)


@pytest.mark.parametrize(
    ("changes", "limit", "flag"),
    [
        ({}, "max_num_batched_tokens", "--max-num-batched-tokens up"),
        ({"tokens_per_iteration": 100}, "max_num_batched_tokens", "--max-num-batched-tokens up"),
        ({"tokens_per_iteration": 100, "waiting_growth": -1}, "arrivals", None),
        ({"num_running": 250}, "max_num_seqs", "--max-num-seqs up"),
        ({"num_running": 250, "kv_cache_usage": 0.95}, "max_num_seqs", None),
        ({"kv_cache_usage": 0.93}, "blocks", "--gpu-memory-utilization up, or --max-model-len down"),
        ({"num_preemptions": 3}, "blocks", "--gpu-memory-utilization up, or --max-num-seqs down"),
        ({"num_waiting": 0, "waiting_growth": 0}, "arrivals", None),
        ({"num_waiting": 0, "num_running": 0, "num_iterations": 0}, "nothing", None),
    ],
)
def test_the_line_names_the_limit_and_the_flag_to_turn(changes, limit, flag):
    found = bottleneck(replace(BUSY, **changes))
    assert (found.limit, found.flag) == (limit, flag)


def test_healthy_saturation_is_called_so():
    assert "Healthy saturation" in bottleneck(replace(BUSY, num_running=256)).text
    assert "which is good" in bottleneck(replace(BUSY, kv_cache_usage=0.92)).text


def stats(**values):
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions", "prompt_tokens")
    return dict.fromkeys(names, 0.0) | values


def test_the_history_sums_up_the_last_seconds():
    history = History(Sample(0.0, stats(), 0, 0))
    for i in range(1, 40):
        values = stats(num_requests_running=8.0, num_requests_waiting=float(i), prompt_tokens=100.0 * i)
        history.samples.append(Sample(float(i), values, 10 * i, 640.0 * i))
    load = history.load(EngineConfig(max_num_batched_tokens=512))
    assert (load.num_running, load.waiting_growth, load.num_iterations, load.tokens_per_iteration) == (8, 1, 140, 64)
    assert history.rates("prompt_tokens") == [100.0] * 39


def view(refs, cached=(), requests=()):
    return EngineView(requests=requests, num_block_refs=refs, cached_block_ids=cached, ledger=())


def test_blocks_are_free_cached_used_or_shared():
    found = block_map(view((0, 0, 1, 2, 0, 1, 0), cached=(4, 5)))
    assert found["cells"] == "023120"
    assert (found["free"], found["cached"], found["used"], found["shared"]) == (2, 1, 2, 1)


def test_a_large_pool_is_drawn_by_its_busiest_blocks():
    refs = np.zeros(100_001, int)
    refs[30] = 1
    found = block_map(view(tuple(refs.tolist()), cached=(1,)))
    assert (len(found["cells"]), found["blocks_per_cell"], found["num_blocks"]) == (4000, 25, 100_000)
    assert found["cells"][:3] == "120"
    assert found["free"] + found["cached"] + found["used"] + found["shared"] == 100_000


def test_a_request_of_several_prompts_is_one_row():
    opened = OpenRequest("cmpl-1", "", "/v1/completions", 0.0, ("a-0", "a-1", "a-2"), 3, 30)
    views = [RequestView(f"a-{i}", status, 10, i, 16, 2, 0, 1) for i, status in ((0, "waiting"), (1, "running"))]
    (row,) = request_table([opened], views)
    assert (row["id"], row["status"], row["prompt_tokens"], row["output_tokens"]) == ("cmpl-1", "running", 20, 1)
    away = [RequestView("a-0", "swapped", 10, 0, 16, 2, 0, 1)]
    assert request_table([opened], away)[0]["status"] == "swapped"
    assert request_table([opened], [])[0]["status"] == "ending"


def test_percentiles_are_those_of_the_newest():
    latencies = Latencies()
    latencies.first_token.extend([9.0] * 1000 + [i / 1000 for i in range(1, 2049)])
    found = latencies.percentiles()
    assert found["time_to_first_token"] == {"p50": 1.024, "p90": 1.844, "p99": 2.028}
    assert found["inter_token_latency"] is None


async def test_the_state_shows_the_server_as_it_is(http, fake):
    fake.gate.clear()
    running = asyncio.create_task(http.post("/v1/completions", json={"prompt": "abc", "request_id": "one"}))
    await fake.until(lambda: fake.added)
    answer = await http.get("/board/state")
    assert answer.status == 200
    state = await answer.json()
    assert (state["model"], state["limits"]) == ("fake", {"max_num_seqs": fake.config.max_num_seqs})
    assert [(row["id"], row["status"], row["prompt_tokens"]) for row in state["requests"]] == [
        ("cmpl-one", "running", 3)
    ]
    assert state["blocks"]["cells"] == "2310"
    assert state["ledger"][0] == ["weights", 1 << 20]
    assert state["bottleneck"]["text"]
    fake.gate.set()
    await running


async def test_a_key_sees_its_own_requests_only(engine, fake):
    async with TestClient(TestServer(create_app(engine, ServerConfig(api_key=("a", "b"))))) as client:
        mine, theirs = {"Authorization": "Bearer a"}, {"Authorization": "Bearer b"}
        fake.gate.clear()
        running = asyncio.create_task(client.post("/v1/completions", json={"prompt": "abc"}, headers=mine))
        await fake.until(lambda: fake.added)
        counts = [
            len((await (await client.get("/board/state", headers=one)).json())["requests"]) for one in (mine, theirs)
        ]
        assert counts == [1, 0]
        fake.gate.set()
        await running
        page = await client.get("/")
        assert (page.status, page.headers["WWW-Authenticate"].split()[0]) == (401, "Basic")


async def test_the_page_loads_nothing_from_elsewhere_and_has_nothing_inline(http):
    page = await http.get("/")
    assert page.headers["Content-Type"] == "text/html; charset=utf-8"
    text = await page.text()
    assert not re.search(r"https?://|<style|style=|\son\w+=|<script(?! src=)", text)
    for name, kind in (("board.js", "text/javascript"), ("board.css", "text/css")):
        asset = await http.get(f"/board/{name}")
        assert (asset.status, asset.content_type) == (200, kind)
        assert not re.search(r"https?://|\.innerHTML|eval\(", await asset.text())
    assert (await http.get("/board/__init__.py")).status == 404


def test_the_script_finds_every_element_it_names():
    files = resources.files("servers.board")
    page = files.joinpath("index.html").read_text()
    script = files.joinpath("board.js").read_text()
    named = set(re.findall(r'(?:byId|show)\("([\w-]+)"', script))
    assert len(named) > 20
    assert named <= set(re.findall(r'id="([\w-]+)"', page))


async def test_a_look_that_fails_stops_nothing(http, fake, monkeypatch):
    """It was said to have reached a deadline."""
    monkeypatch.setattr(fake, "inspect", lambda: 1 // 0)
    assert (await http.get("/board/state")).status == 500
    assert (await http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1})).status == 200


async def test_a_look_into_a_dead_engine_is_an_error(engine, fake):
    assert (await engine.inspect()).ledger
    await engine.shutdown()
    with pytest.raises(EngineDeadError):
        await engine.inspect()
