"""`pagedjax bench latency`: one batch of fixed shapes, again and again.

Prompts are token ids, new ones each time. Latency runs from the first request added to the last output. TPOT is that
of the steps in which every request decodes (`decode_window`), so it holds no part of a prompt.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from pagedjax.bench.batch_run import BatchTiming, run_batch, traced_idle_share
from pagedjax.bench.engine import (
    BenchEngineConfig,
    BenchSampling,
    check_length,
    describe,
    header,
    random_token_ids,
    start_engine,
)
from pagedjax.bench.result_file import check_writable, write_json
from pagedjax.bench.speculation import speculation_figures
from pagedjax.config import check_range, option
from pagedjax.engine import LLMEngine
from pagedjax.errors import ConfigError

PERCENTAGES = (10, 25, 50, 75, 90, 99)
COLUMNS = (
    "batch", "latency s", "p50", "p99", "prefill tok/s", "TPOT ms", "p50 step", "p99 step", "output tok/s", "host ms",
    "dispatch ms", "GPU idle %",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class LatencyFlags:
    """What to run, how often, and where the figures go."""

    input_len: int = option(32, "Tokens of each prompt.")
    output_len: int = option(128, "Tokens generated for each prompt.")
    batch_size: tuple[int, ...] = option((8,), "Requests in the batch; several sizes run one by one.", several=True)
    num_iters_warmup: int = option(10, "Runs of each batch before measuring.")
    num_iters: int = option(30, "Runs of each batch that are measured.")
    trace: str | None = option(None, "Directory for profiler traces of ten decoding steps, run apart from the others.")
    output_json: str | None = option(None, "File for the figures, as JSON.")

    def __post_init__(self) -> None:
        for name, low in (("input_len", 1), ("output_len", 1), ("num_iters_warmup", 0), ("num_iters", 1)):
            check_range(self, name, low)
        if min(self.batch_size) < 1:
            raise ConfigError(f"batch_size is {min(self.batch_size)}; it must be at least 1")


CONFIGS = (BenchEngineConfig, LatencyFlags, BenchSampling)


def run(config: BenchEngineConfig, flags: LatencyFlags, sampling: BenchSampling) -> int:
    """Measure every batch size on one engine."""
    check_writable(flags.output_json)
    if max(flags.batch_size) > config.max_num_seqs:
        raise ConfigError(
            f"batch_size is {max(flags.batch_size)}, max_num_seqs is {config.max_num_seqs}, so it would not run as "
            "one batch; raise --max-num-seqs"
        )
    engine = start_engine(config)
    check_length(engine, flags.input_len + flags.output_len)
    print(f"{header(engine)}; input {flags.input_len}, output {flags.output_len}, {flags.num_iters} iterations")
    print(_line(COLUMNS))
    results = []
    for batch_size in flags.batch_size:
        results.append(measure(engine, flags, sampling, batch_size))
        print("\n".join([_line(_row(results[-1])), *_notes(results[-1])]), flush=True)
    if len(results) == 1:
        print("\n".join(report_lines(results[0])))
    shown = results[0] if len(results) == 1 else {"results": results}
    write_json(flags.output_json, describe(engine) | shown)
    engine.shutdown()
    return 0


def measure(engine: LLMEngine, flags: LatencyFlags, sampling: BenchSampling, batch_size: int) -> dict[str, Any]:
    """Return the figures of one batch size: vLLM's keys for the whole batch, then prefill, decoding and host time."""
    params = sampling.params(flags.output_len)
    rng = np.random.default_rng(engine.config.seed)

    def prompts() -> list[list[int]]:
        return [random_token_ids(engine, rng, flags.input_len) for _ in range(batch_size)]

    before = engine.stats()
    for _ in tqdm(range(flags.num_iters_warmup), desc=f"Warming up, batch {batch_size}", disable=None, leave=False):
        run_batch(engine, prompts(), params)
    progress = tqdm(range(flags.num_iters), desc=f"Measuring, batch {batch_size}", disable=None, leave=False)
    timings = [run_batch(engine, prompts(), params) for _ in progress]
    result = _figures(timings, batch_size, flags)
    result |= {
        name: engine.stats()[name] - before[name] for name in ("num_preemptions", "num_compilations_after_ready")
    }
    result |= speculation_figures(before, engine.stats())
    if flags.trace is not None:
        result["device_idle_share"] = traced_idle_share(
            engine, prompts(), params, Path(flags.trace) / f"batch-{batch_size}"
        )
    return result


def _figures(timings: Sequence[BatchTiming], batch_size: int, flags: LatencyFlags) -> dict[str, Any]:
    latencies = np.array([timing.latency for timing in timings])
    result: dict[str, Any] = {
        "batch_size": batch_size,
        "input_len": flags.input_len,
        "output_len": flags.output_len,
        "avg_latency": float(latencies.mean()),
        "std_latency": float(latencies.std()),
        "latencies": latencies.tolist(),
        "percentiles": dict(zip(map(str, PERCENTAGES), np.percentile(latencies, PERCENTAGES).tolist(), strict=True)),
    }
    windows = [timing.decoding for timing in timings if timing.decoding is not None]
    num_input = batch_size * flags.input_len
    if flags.output_len == 1:
        result["prefill_tokens_per_second"] = num_input / float(np.median(latencies))
    if len(windows) < len(timings):
        return result
    prefills = [timing.decoding.opened - timing.began for timing in timings if timing.decoding is not None]
    steps = np.concatenate([one.steps for one in windows]) * 1e3
    tpots = np.array([one.tpot for one in windows]) * 1e3
    return result | {
        "prefill_tokens_per_second": num_input / float(np.median(prefills)),
        "mean_tpot_ms": float(tpots.mean()),
        "median_tpot_ms": float(np.median(tpots)),
        "tpots_ms": tpots.tolist(),
        "median_step_ms": float(np.median(steps)),
        "p99_step_ms": float(np.percentile(steps, 99)),
        "num_steps": len(steps),
        "tokens_per_step": float(np.mean([one.tokens_per_step for one in windows])),
        "decode_tokens_per_second": batch_size / float(np.median(tpots)) * 1e3,
        "host_ms": float(np.mean([one.host for one in windows])) * 1e3,
        "dispatch_ms": float(np.mean([one.dispatch for one in windows])) * 1e3,
        "wait_ms": float(np.mean([one.wait for one in windows])) * 1e3,
    }


def report_lines(result: dict[str, Any]) -> list[str]:
    """Return vLLM's lines for one batch size."""
    return [
        f"Avg latency: {result['avg_latency']} seconds",
        f"Std latency: {result['std_latency']} seconds",
        *(f"{name}% percentile latency: {value} seconds" for name, value in result["percentiles"].items()),
    ]


def _row(result: dict[str, Any]) -> list[str]:
    idle = result.get("device_idle_share")
    figures = (
        (result["avg_latency"], 3), (result["percentiles"]["50"], 3), (result["percentiles"]["99"], 3),
        (result.get("prefill_tokens_per_second"), 0), (result.get("median_tpot_ms"), 3),
        (result.get("median_step_ms"), 3), (result.get("p99_step_ms"), 3), (result.get("decode_tokens_per_second"), 0),
        (result.get("host_ms"), 3), (result.get("dispatch_ms"), 3), (None if idle is None else 100 * idle, 1),
    )  # fmt: skip
    return [str(result["batch_size"]), *("-" if value is None else f"{value:,.{digits}f}" for value, digits in figures)]


def _notes(result: dict[str, Any]) -> list[str]:
    """Return what a reader must know about a row."""
    notes = []
    if result["output_len"] > 1 and "median_tpot_ms" not in result:
        notes.append(
            f"  no TPOT: there was no time in which all {result['batch_size']} requests decoded "
            f"({result['num_preemptions']:.0f} preemptions); ask for longer outputs, or give the KV cache more room"
        )
    if "acceptance_rate" in result:
        notes.append(
            f"  speculation: {result['tokens_per_step']:.2f} tokens a step of a request, acceptance "
            f"{result['acceptance_rate']:.3f} of {result['num_draft_tokens']:.0f} drafts"
        )
    if result["num_compilations_after_ready"]:
        notes.append(f"  {result['num_compilations_after_ready']:.0f} compilations while measuring, which is a bug")
    return notes


def _line(cells: Sequence[str]) -> str:
    return "  ".join(cell.rjust(max(len(column), 9)) for cell, column in zip(cells, COLUMNS, strict=True))
