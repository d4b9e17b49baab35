"""`bench serve` and `bench sweep` against our own server over the fake engine."""

import asyncio
import json
import threading

import numpy as np
import pytest
from aiohttp.test_utils import TestServer

from pagedjax.async_engine import AsyncEngine
from pagedjax.async_engine.mailboxes import Mailbox
from pagedjax.bench import serve, sweep
from pagedjax.bench.datasets import DatasetFlags, load_samples
from pagedjax.bench.serve import benchmark
from pagedjax.bench.serve_flags import LoadFlags, ResultFlags, ServerFlags
from pagedjax.bench.sweep import SweepFlags
from pagedjax.errors import ConfigError
from pagedjax.sampling_params import RequestOutputKind
from servers import ServerConfig, create_app
from tests.servers.fakes import FakeEngine

DATASET = DatasetFlags(num_prompts=12, input_len="3:9", output_len="2:6")


@pytest.fixture
def fake():
    return FakeEngine(step_seconds=0.001)


@pytest.fixture
async def address(fake):
    engine = AsyncEngine(fake)
    async with TestServer(create_app(engine, ServerConfig())) as server:
        yield str(server.make_url(""))
    await engine.shutdown()


def server_flags(address, **options):
    return ServerFlags(**{"base_url": address, "vocab_size": 250, "ignore_eos": True, **options})


async def test_every_token_is_counted_as_the_server_counts_it(address, fake):
    result = await benchmark(server_flags(address), DATASET, LoadFlags())
    assert (result["completed"], result["failed"]) == (12, 0)
    samples = load_samples(DATASET, seed=0, vocab_size=250, tokenizer=None)
    assert result["input_lens"] == [len(sample.token_ids) for sample in samples]
    assert result["output_lens"] == [sample.output_len for sample in samples]
    assert sorted(prompt for _, prompt, *_ in fake.added) == sorted(sample.token_ids for sample in samples)
    # an event may bring several tokens: the server joins what a slow reader has not taken yet
    assert all(len(itls) < length for itls, length in zip(result["itls"], result["output_lens"], strict=True))
    assert (result["num_short_outputs"], result["num_other_prompt_lens"], result["num_without_usage"]) == (0, 0, 0)
    assert result["model_id"] == "fake"
    assert 0 < result["mean_ttft_ms"] <= result["mean_e2el_ms"] < 1e3 * result["duration"]


async def test_what_the_flags_say_reaches_the_server(address, fake):
    flags = server_flags(address, temperature=0.5, top_k=7, extra_body={"seed": 4})
    await benchmark(flags, DatasetFlags(num_prompts=1, input_len="3", output_len="2"), LoadFlags())
    params = fake.added[0][2]
    assert (params.temperature, params.top_k, params.seed, params.ignore_eos) == (0.5, 7, 4, True)
    assert params.output_kind is RequestOutputKind.DELTA


async def test_no_more_requests_run_than_are_allowed_and_the_others_wait(address):
    result = await benchmark(server_flags(address), DATASET, LoadFlags(max_concurrency=2))
    assert result["completed"] == 12
    assert result["max_concurrent_requests"] <= 2
    assert result["max_concurrency"] == 2
    assert max(result["queue_times"]) > min(result["latencies"])


async def test_requests_arrive_at_their_rate(address):
    result = await benchmark(server_flags(address), DATASET, LoadFlags(request_rate=200.0, burstiness=float("inf")))
    arrivals = np.subtract(result["start_times"], result["queue_times"])
    assert np.diff(arrivals) == pytest.approx([1 / 200] * 11)
    assert min(result["queue_times"]) > -1e-6  # none is sent before its time
    assert result["duration"] >= 12 / 200
    assert (result["request_rate"], result["burstiness"]) == (200.0, "inf")


async def test_warm_up_requests_count_nowhere_and_have_prompts_of_their_own(address, fake):
    result = await benchmark(server_flags(address, num_warmups=4), DATASET, LoadFlags())
    assert len(fake.added) == 16
    assert result["completed"] == len(result["input_lens"]) == 12
    prompts = [tuple(prompt) for _, prompt, *_ in fake.added]
    assert not set(prompts[:4]) & set(prompts[4:])


async def test_a_chat_endpoint_gets_texts(address, fake, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "hi", "output_tokens": 3}\n')
    dataset = DatasetFlags(dataset_name="custom", dataset_path=str(path), num_prompts=2)
    result = await benchmark(server_flags(address, backend="openai-chat"), dataset, LoadFlags())
    assert (result["completed"], result["output_lens"]) == (2, [3, 3])
    assert bytes(fake.added[0][1]) == b"user:hi\nassistant:"
    assert result["generated_texts"] == ["use", "use"]
    with pytest.raises(ConfigError, match=r"a chat needs texts .* name a tokenizer"):
        await benchmark(server_flags(address, backend="openai-chat"), DATASET, LoadFlags())


async def test_texts_without_a_tokenizer_go_out_as_texts(address, fake, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "hello", "output_tokens": 3}\n')
    dataset = DatasetFlags(dataset_name="custom", dataset_path=str(path), num_prompts=1)
    result = await benchmark(server_flags(address), dataset, LoadFlags())
    assert (result["input_lens"], result["generated_texts"]) == ([5], ["hel"])


async def test_refused_requests_fail_and_are_named(address):
    dataset = DatasetFlags(num_prompts=2, input_len="100", output_len="5")
    result = await benchmark(server_flags(address), dataset, LoadFlags())
    assert (result["completed"], result["failed"], result["mean_ttft_ms"]) == (0, 2, None)
    assert "max_model_len is 64" in result["errors"][0]


async def test_an_output_that_ends_early_is_reported(address, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": [65, 66, 67], "output_tokens": 5}\n')
    dataset = DatasetFlags(dataset_name="custom", dataset_path=str(path), num_prompts=3)
    flags, load = server_flags(address, ignore_eos=False, extra_body={"stop_token_ids": [66]}), LoadFlags()
    result = await benchmark(flags, dataset, load)
    assert result["output_lens"] == [2, 2, 2]
    assert "3 outputs are shorter than asked for; --ignore-eos forbids that" in serve.lines_of(result, flags, load)


def step_when_read(fake, monkeypatch):
    """Hold each step of one request back until the server has taken what the one before gave."""
    is_read, step, take = threading.Semaphore(1), fake.step, Mailbox.take

    def step_held_back():
        is_read.acquire()
        return step()

    async def take_and_let_go(mailbox):
        output = await take(mailbox)
        is_read.release()
        return output

    monkeypatch.setattr(fake, "step", step_held_back)
    monkeypatch.setattr(Mailbox, "take", take_and_let_go)


async def test_answers_that_come_whole_have_no_time_a_token_and_the_report_says_what_helps(address, fake, monkeypatch):
    """Against a server without a tokenizer it printed a TPOT of 0: only the last event had anything to tell."""
    monkeypatch.setattr(fake.tokenizer, "decode", lambda *args, **options: "")
    dataset, load = DatasetFlags(num_prompts=3, input_len="5", output_len="4"), LoadFlags()
    result = await benchmark(server_flags(address), dataset, load)
    assert (result["completed"], result["total_output_tokens"], result["num_at_once"]) == (3, 12, 3)
    assert (result["mean_tpot_ms"], result["mean_itl_ms"]) == (None, None)
    (line,) = [one for one in serve.lines_of(result, server_flags(address), load) if "came in one event" in one]
    assert line.startswith("3 answers came in one event: their TTFT is that of the whole, TPOT and ITL cannot be")
    flags = server_flags(address, extra_body={"return_token_ids": True})
    assert "return_token_ids" in line
    step_when_read(fake, monkeypatch)
    result = await benchmark(flags, DatasetFlags(num_prompts=1, input_len="5", output_len="4"), load)
    assert (result["total_output_tokens"], result["num_at_once"]) == (4, 0)
    assert result["mean_tpot_ms"] > 0
    assert not any("came in one event" in one for one in serve.lines_of(result, flags, load))


async def test_the_command_prints_the_report_and_saves_it(address, capsys, tmp_path):
    results = ResultFlags(save_result=True, result_dir=str(tmp_path / "new"), metadata=("gpu=H200",))
    flags = server_flags(address, goodput=("ttft:10000",))
    assert await asyncio.to_thread(serve.run, flags, DATASET, LoadFlags(max_concurrency=3), results) == 0
    shown = capsys.readouterr().out
    assert "Successful requests:                     12" in shown
    assert "Request goodput (req/s):" in shown
    assert all(f"P99 {name} (ms):" in shown for name in ("TTFT", "TPOT", "ITL", "E2EL"))
    (path,) = (tmp_path / "new").iterdir()
    assert path.name.startswith("openai-infqps-concurrency3-fake-")
    saved = json.loads(path.read_text())
    assert (saved["gpu"], saved["label"], saved["completed"], saved["request_rate"]) == ("H200", "openai", 12, "inf")
    assert "ttfts" not in saved


async def test_details_are_saved_when_asked_for(address, tmp_path):
    results = ResultFlags(save_detailed=True, result_dir=str(tmp_path), result_filename="out.json")
    await asyncio.to_thread(serve.run, server_flags(address), DATASET, LoadFlags(), results)
    assert len(json.loads((tmp_path / "out.json").read_text())["ttfts"]) == 12


async def test_if_every_request_fails_the_command_does_too(address, capsys):
    dataset = DatasetFlags(num_prompts=2, input_len="100", output_len="5")
    assert await asyncio.to_thread(serve.run, server_flags(address), dataset, LoadFlags(), ResultFlags()) == 1
    assert "Failed: 400: " in capsys.readouterr().out


async def test_a_server_that_is_not_there_is_a_clear_error(unused_tcp_port):
    with pytest.raises(ConfigError, match=r"gives no model: .*; start the server, correct --host and --port"):
        await benchmark(ServerFlags(port=unused_tcp_port), DATASET, LoadFlags())


async def test_a_sweep_measures_each_rate_with_each_concurrency(address, fake, capsys, tmp_path):
    path = tmp_path / "sweep.json"
    flags = SweepFlags(
        request_rate=(500.0, float("inf")), max_concurrency=(1, 4), prompts_per_concurrency=3, output_json=str(path)
    )
    assert await asyncio.to_thread(sweep.run, server_flags(address), DATASET, flags) == 0
    columns, *rows = capsys.readouterr().out.splitlines()
    assert [row.split()[:3] for row in rows] == [["500.00", "1", "0"], ["500.00", "4", "0"], ["inf", "1", "0"],
                                                 ["inf", "4", "0"]]  # fmt: skip
    assert {len(row) for row in rows} == {len(columns)}
    results = json.loads(path.read_text())["results"]
    assert [result["completed"] for result in results] == [3, 12, 3, 12]
    prompts = [tuple(prompt) for _, prompt, *_ in fake.added]
    assert len(set(prompts)) == len(prompts) == 30


async def test_shares_of_the_saturation_follow_its_measurement(address, capsys, tmp_path):
    path = tmp_path / "sweep.json"
    flags = SweepFlags(saturation_share=(0.5, 0.8), output_json=str(path))
    await asyncio.to_thread(sweep.run, server_flags(address), DATASET, flags)
    full, half, most = json.loads(path.read_text())["results"]
    assert full["request_rate"] == "inf"
    assert half["request_rate"] == pytest.approx(0.5 * full["request_throughput"])
    assert most["request_rate"] == pytest.approx(0.8 * full["request_throughput"])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LoadFlags(request_rate=0.0), "request_rate is 0.0; it must be above 0"),
        (lambda: LoadFlags(max_concurrency=0), "max_concurrency is 0; it must be at least 1"),
        (lambda: ServerFlags(goodput=("itl:5",)), "goodput has 'itl:5'"),
        (lambda: ServerFlags(header=("x",)), "header has 'x'; write KEY=VALUE"),
        (lambda: SweepFlags(request_rate=(1.0, -1.0)), "request_rate is -1.0; it must be above 0"),
        (lambda: SweepFlags(prompts_per_concurrency=2), "prompts_per_concurrency is given without max_concurrency"),
        (lambda: SweepFlags(saturation_share=(0.0,)), "saturation_share is 0.0; it must be above 0"),
    ],
)
def test_flags_that_make_no_sense_are_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_the_address_of_a_server_is_read_from_its_flags(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    flags = ServerFlags(host="h", port=9, backend="openai-chat", header=("a=b=c",))
    assert flags.url == "http://h:9/v1/chat/completions"
    assert flags.headers == {"Authorization": "Bearer secret", "a": "b=c"}
    assert ServerFlags(base_url="https://h/").url == "https://h/v1/completions"
    assert ServerFlags(endpoint="/x/chat/completions").is_chat
