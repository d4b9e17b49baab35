"""`bench throughput` on a model whose tokens are known by hand."""

import json

import pytest

from pagedjax.bench import throughput
from pagedjax.bench.datasets import DatasetFlags, load_samples
from pagedjax.bench.throughput import ThroughputFlags, ThroughputSampling, measure, report_lines
from pagedjax.config import EngineConfig
from pagedjax.errors import ConfigError
from tests.fakes import VOCAB_SIZE

DATASET = DatasetFlags(num_prompts=10, input_len="5:20", output_len="3:9")
VLLM_KEYS = {"elapsed_time", "num_requests", "total_num_tokens", "requests_per_second", "tokens_per_second"}


def samples(dataset=DATASET):
    return load_samples(dataset, seed=0, vocab_size=VOCAB_SIZE, tokenizer=None)


def test_every_token_asked_for_is_generated_and_counted(engine):
    asked = samples()
    result = measure(engine, asked, ThroughputFlags(), ThroughputSampling())
    num_prompt = sum(len(one.token_ids) for one in asked)
    num_output = sum(one.output_len for one in asked)
    assert (result["total_num_prompt_tokens"], result["total_num_output_tokens"]) == (num_prompt, num_output)
    assert result["num_requests"] == 10
    assert result["tokens_per_second"] == pytest.approx((num_prompt + num_output) / result["elapsed_time"])
    assert result["output_tokens_per_second"] == pytest.approx(num_output / result["elapsed_time"])
    parts = result["host_ms"] + result["dispatch_ms"] + result["wait_ms"]
    assert parts * result["num_iterations"] == pytest.approx(1e3 * result["elapsed_time"])


def test_warm_up_requests_count_nowhere(engine):
    results = [measure(engine, samples(), ThroughputFlags(num_warmups=n), ThroughputSampling()) for n in (0, 5)]
    counts = [{name: r[name] for name in ("num_requests", "total_num_tokens", "num_cached_tokens")} for r in results]
    assert counts[0] == counts[1]


def test_each_prompt_may_have_several_completions(engine):
    result = measure(engine, samples(), ThroughputFlags(n=2), ThroughputSampling())
    assert result["total_num_output_tokens"] == 2 * sum(one.output_len for one in samples())


def test_hits_of_the_prefix_cache_are_reported(engine):
    dataset = DatasetFlags(num_prompts=8, random_prefix_len=24, input_len="4", output_len="2")
    result = measure(engine, samples(dataset), ThroughputFlags(), ThroughputSampling())
    assert result["num_cached_tokens"] >= 4 * 24  # all but the first batch of four find the prefix


def test_the_lines_are_those_of_vllm():
    result = {
        "requests_per_second": 1.5, "tokens_per_second": 300, "output_tokens_per_second": 100.126, "elapsed_time": 4,
        "total_num_prompt_tokens": 800, "total_num_output_tokens": 400, "num_iterations": 50, "host_ms": 0.5,
        "dispatch_ms": 0.25, "num_preemptions": 0.0, "num_cached_tokens": 16,
    }  # fmt: skip
    assert report_lines(result) == [
        "Throughput: 1.50 requests/s, 300.00 total tokens/s, 100.13 output tokens/s",
        "Total num prompt tokens:  800",
        "Total num output tokens:  400",
        "50 iterations in 4.00 s, host 0.500 ms and dispatch 0.250 ms each; 0 preemptions, "
        "16 prompt tokens from the prefix cache",
    ]


@pytest.fixture
def started(engine, monkeypatch):
    monkeypatch.setattr(throughput, "start_engine", lambda config: engine)
    monkeypatch.setattr(engine, "shutdown", lambda: None)  # it is shared
    return engine


def test_the_command_prints_the_report_and_writes_the_keys_of_vllm(started, capsys, tmp_path):
    path = tmp_path / "out.json"
    flags = ThroughputFlags(output_json=str(path))
    assert throughput.run(EngineConfig(), DATASET, flags, ThroughputSampling()) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("10 random prompts")
    assert lines[1].startswith("Throughput: ")
    assert json.loads(path.read_text()).keys() >= VLLM_KEYS


def test_a_prompt_that_does_not_fit_is_refused(started):
    with pytest.raises(ConfigError, match="tokens together, max_model_len is 128"):
        throughput.run(EngineConfig(), DatasetFlags(), ThroughputFlags(), ThroughputSampling())


def test_the_temperature_is_vllms():
    assert ThroughputSampling().params(5).temperature == 1.0
