"""`bench latency` on a model whose tokens are known by hand: what runs, what is counted, what is printed."""

import json

import pytest

from pagedjax.bench import latency
from pagedjax.bench.batch_run import run_batch
from pagedjax.bench.engine import BenchEngineConfig, BenchSampling
from pagedjax.bench.latency import LatencyFlags, measure, report_lines
from pagedjax.errors import ConfigError

SAMPLING = BenchSampling()


def flags(**options):
    return LatencyFlags(**{"input_len": 8, "output_len": 6, "num_iters": 3, "num_iters_warmup": 1, **options})


def test_every_iteration_after_the_warm_up_is_timed(engine):
    before = engine.stats()
    result = measure(engine, flags(), SAMPLING, 2)
    assert len(result["latencies"]) == len(result["tpots_ms"]) == 3
    assert result["avg_latency"] == pytest.approx(sum(result["latencies"]) / 3)
    assert list(result["percentiles"]) == ["10", "25", "50", "75", "90", "99"]
    after = engine.stats()
    assert after["generation_tokens"] - before["generation_tokens"] == (3 + 1) * 2 * 6
    assert after["prompt_tokens"] - before["prompt_tokens"] == (3 + 1) * 2 * 8


def test_tpot_counts_the_steps_after_the_first_token(engine):
    result = measure(engine, flags(), SAMPLING, 2)
    assert result["num_steps"] == 3 * (6 - 1)
    assert 0 < result["median_tpot_ms"] < 1e3 * max(result["latencies"]) / 5
    assert result["decode_tokens_per_second"] == pytest.approx(2e3 / result["median_tpot_ms"])
    parts = [result[name] for name in ("host_ms", "dispatch_ms", "wait_ms")]
    assert min(parts) > 0
    assert sum(parts) <= result["mean_tpot_ms"]  # the rest is the measurement's own loop


def test_prompts_that_are_split_over_steps_do_not_count_as_decoding(engine):
    """Four prompts of 24 tokens take three steps of 32: the first request decodes in two of them."""
    prompts = [[i] * 24 for i in range(4)]
    timing = run_batch(engine, prompts, SAMPLING.params(10))
    assert 0 < len(timing.decoding.steps) < 9
    assert timing.began < timing.decoding.opened < timing.began + timing.latency


def test_one_output_token_is_all_prefill(engine):
    result = measure(engine, flags(output_len=1), SAMPLING, 2)
    assert "median_tpot_ms" not in result
    assert result["prefill_tokens_per_second"] == pytest.approx(16 / sorted(result["latencies"])[1])


def test_prompts_differ_between_iterations_and_runs_repeat_them(engine, monkeypatch):
    seen = []
    real = latency.run_batch
    monkeypatch.setattr(latency, "run_batch", lambda e, prompts, *rest: seen.append(prompts) or real(e, prompts, *rest))
    for _ in range(2):
        measure(engine, flags(num_iters=2, num_iters_warmup=0), SAMPLING, 1)
    assert seen[:2] == seen[2:]
    assert seen[0] != seen[1]


def test_the_lines_are_those_of_vllm():
    result = {"avg_latency": 0.25, "std_latency": 0.5, "percentiles": {"10": 0.125, "99": 2.0}}
    assert report_lines(result) == [
        "Avg latency: 0.25 seconds",
        "Std latency: 0.5 seconds",
        "10% percentile latency: 0.125 seconds",
        "99% percentile latency: 2.0 seconds",
    ]


@pytest.fixture
def started(engine, monkeypatch):
    monkeypatch.setattr(latency, "start_engine", lambda config: engine)
    monkeypatch.setattr(engine, "shutdown", lambda: None)  # it is shared
    return engine


def test_several_batch_sizes_print_a_line_each_and_share_a_file(started, capsys, tmp_path):
    path = tmp_path / "out.json"
    assert latency.run(BenchEngineConfig(), flags(batch_size=(1, 4), output_json=str(path)), SAMPLING) == 0
    header, columns, *rows = capsys.readouterr().out.splitlines()
    assert header.startswith("fake in float32 on cpu, jax ")
    assert columns.split()[0] == "batch"
    assert [row.split()[0] for row in rows] == ["1", "4"]
    assert len(rows[0]) == len(rows[1]) == len(columns)
    saved = json.loads(path.read_text())
    assert [one["batch_size"] for one in saved["results"]] == [1, 4]
    assert saved["start_up_seconds"]["compiling"] >= 0


def test_a_batch_that_never_decodes_together_says_why_there_is_no_tpot(started, capsys):
    """Four prompts of 30 tokens in steps of 32: the first request is over before the last one begins."""
    latency.run(BenchEngineConfig(), flags(batch_size=(4,), input_len=30, output_len=3), SAMPLING)
    assert (
        "  no TPOT: there was no time in which all 4 requests decoded (0 preemptions); ask" in capsys.readouterr().out
    )


def test_one_batch_size_writes_the_keys_of_vllm_at_the_top(started, capsys, tmp_path):
    path = tmp_path / "out.json"
    latency.run(BenchEngineConfig(), flags(batch_size=(2,), output_json=str(path)), SAMPLING)
    assert "Avg latency: " in capsys.readouterr().out
    assert {"avg_latency", "latencies", "percentiles", "model", "device"} <= json.loads(path.read_text()).keys()


def test_a_batch_that_would_not_run_as_one_is_refused():
    with pytest.raises(ConfigError, match=r"batch_size is 512, max_num_seqs is 256, .* raise --max-num-seqs"):
        latency.run(BenchEngineConfig(), flags(batch_size=(512,)), SAMPLING)


def test_lengths_that_do_not_fit_are_refused(started):
    with pytest.raises(ConfigError, match="input and output are 200 tokens together, max_model_len is 128"):
        latency.run(BenchEngineConfig(), flags(input_len=100, output_len=100), SAMPLING)


@pytest.mark.parametrize("options", [{"num_iters": 0}, {"input_len": 0}, {"output_len": 0}, {"batch_size": (0,)}])
def test_values_out_of_range_are_refused(options):
    with pytest.raises(ConfigError, match="it must be at least 1"):
        flags(**options)


def test_a_result_that_cannot_be_written_is_refused_before_anything_runs(tmp_path):
    with pytest.raises(ConfigError, match="is no directory; make it"):
        latency.run(BenchEngineConfig(), flags(output_json=str(tmp_path / "no" / "out.json")), SAMPLING)


def test_prefix_caching_is_off_unless_asked_for():
    assert not BenchEngineConfig().enable_prefix_caching
