"""Files of requests: every line is answered, in order, and a bad line costs the others nothing."""

import io
import json

import pytest

from pagedjax import ConfigError, EngineConfig, EngineDeadError
from pagedjax.async_engine import AsyncEngine
from servers.batch import answer_lines, run_batch
from servers.config import BatchConfig
from tests.servers.fakes import FakeEngine

HI = [{"role": "user", "content": "hi"}]


def line(custom_id, url="/v1/completions", **body):
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body}).encode()


async def answer(lines, fake):
    out = io.StringIO()
    counts = await answer_lines(AsyncEngine(fake), iter(lines), out)
    return counts, [json.loads(one) for one in out.getvalue().splitlines()]


async def test_every_endpoint_answers_in_the_order_of_the_file():
    fake = FakeEngine(max_num_seqs=2)  # so that only four lines are in work at once
    lines = [line(f"c{i}", prompt=f"<{i}>", max_tokens=20 - i) for i in range(15)]
    lines += [b"\n", line("chat", "/v1/chat/completions", messages=HI, max_tokens=4)]
    lines += [line("response", "/v1/responses", input="hi", max_output_tokens=4)]
    counts, results = await answer(lines, fake)
    assert [result["custom_id"] for result in results] == [*(f"c{i}" for i in range(15)), "chat", "response"]
    assert (counts.num_lines, counts.num_failed) == (17, 0)
    for i, result in enumerate(results[:15]):
        assert result["response"]["body"]["choices"][0]["text"] == (f"<{i}>" * 20)[: 20 - i]
        assert (result["error"], result["response"]["status_code"]) == (None, 200)
        assert result["response"]["request_id"] == result["response"]["body"]["id"]
    assert results[15]["response"]["body"]["choices"][0]["message"]["content"] == "user"
    assert results[16]["response"]["body"]["output"][0]["content"][0]["text"] == "user"
    assert fake.was_shut_down


BAD = [
    (b"{", "is not JSON"),
    (b"[]", "is a JSON array"),
    (line("", prompt="a"), "custom_id is ''"),
    (line("ok", prompt="a"), "no earlier line has"),
    (line("x1", "/v1/embeddings", input="a"), "url is '/v1/embeddings'"),
    (line("x2", prompt="a", stream=True), "does not stream"),
    (json.dumps({"custom_id": "x3", "url": "/v1/completions", "body": []}).encode(), "body must be an object"),
    (json.dumps({"custom_id": "x4", "url": "/v1/completions", "bodies": {}}).encode(), "'bodies' is no field"),
    (json.dumps({"custom_id": "x5", "method": "GET", "url": "/v1/completions", "body": {}}).encode(), "method POST"),
]


async def test_a_bad_line_is_an_answer_of_its_own():
    lines = [line("ok", prompt="ab", max_tokens=2), *(bad for bad, _ in BAD), line("late", prompt="", max_tokens=2)]
    counts, results = await answer([*lines, line("last", prompt="ab", max_tokens=2)], FakeEngine())
    for (_, message), result in zip(BAD, results[1:], strict=False):
        assert result["response"] is None
        assert message in result["error"]["message"]
    assert results[-2]["response"]["status_code"] == 400
    assert [results[i]["response"]["body"]["choices"][0]["text"] for i in (0, -1)] == ["ab", "ab"]
    assert counts.num_failed == len(BAD) + 1


async def test_keys_of_the_environment_do_not_lock_the_batch_out(monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "hidden")
    _, results = await answer([line("a", prompt="ab", max_tokens=2)], FakeEngine())
    assert results[0]["response"]["status_code"] == 200


async def test_a_dead_engine_ends_the_batch():
    fake = FakeEngine()
    fake.error = RuntimeError("device lost")
    with pytest.raises(EngineDeadError):
        await answer([line(f"c{i}", prompt="ab") for i in range(3)], fake)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "input_file is missing"),
        ({"input_file": "in"}, "output_file is missing"),
        ({"input_file": "nothing", "output_file": "out"}, "nothing: No such file"),
        ({"input_file": "in", "output_file": "in"}, "in: File exists"),
    ],
)
def test_files_that_cannot_be_used_are_found_before_anything_loads(tmp_path, monkeypatch, files, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in").write_text("")
    with pytest.raises(ConfigError, match=message):
        run_batch(EngineConfig(model="nowhere"), BatchConfig(**files))
