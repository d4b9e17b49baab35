"""`pagedjax bench throughput`: a whole dataset, offline, as fast as it goes."""

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
from tqdm import tqdm

from pagedjax.bench.datasets import DatasetFlags, Sample, load_samples
from pagedjax.bench.engine import BenchSampling, check_length, describe, header, random_token_ids, start_engine
from pagedjax.bench.result_file import check_writable, write_json
from pagedjax.bench.speculation import speculation_figures
from pagedjax.config import EngineConfig, check_range, option
from pagedjax.engine import LLMEngine
from pagedjax.outputs import RequestOutput

WARMUP_LEN = 16  # tokens in and out of a warm-up request


@dataclass(frozen=True, kw_only=True)
class ThroughputFlags:
    """How the requests run, and where the figures go."""

    n: int = option(1, "Completions of each prompt.")
    ignore_eos: bool = option(True, "Generate each output to its full length.")
    num_warmups: int = option(8, "Short requests before measuring.")
    output_json: str | None = option(None, "File for the figures, as JSON.")

    def __post_init__(self) -> None:
        check_range(self, "n", 1)
        check_range(self, "num_warmups", 0)


@dataclass(frozen=True, kw_only=True)
class ThroughputSampling(BenchSampling):
    """BenchSampling with vLLM's temperature."""

    temperature: float = option(1.0, "Randomness; 0 is greedy.")


CONFIGS = (EngineConfig, DatasetFlags, ThroughputFlags, ThroughputSampling)


def run(config: EngineConfig, dataset: DatasetFlags, flags: ThroughputFlags, sampling: ThroughputSampling) -> int:
    """Measure the dataset once."""
    check_writable(flags.output_json)
    engine = start_engine(config)
    vocab_size, tokenizer = engine.model_config.vocab_size, engine.tokenizer
    samples = load_samples(dataset, seed=config.seed, vocab_size=vocab_size, tokenizer=tokenizer)
    check_length(engine, max(len(sample.token_ids) + sample.output_len for sample in samples))
    print(f"{header(engine)}; {len(samples)} {dataset.dataset_name} prompts", flush=True)
    result = measure(engine, samples, flags, sampling)
    print("\n".join(report_lines(result)))
    write_json(flags.output_json, describe(engine) | result)
    engine.shutdown()
    return 0


def measure(
    engine: LLMEngine, samples: Sequence[Sample], flags: ThroughputFlags, sampling: BenchSampling
) -> dict[str, Any]:
    """Run all samples and return vLLM's keys and our own: output tokens, host time of an iteration, cache hits."""
    _warm_up(engine, flags, sampling)
    before, times_before = engine.stats(), _host_seconds(engine)
    began = perf_counter()
    outputs = _run_all(engine, samples, flags, sampling)
    elapsed = perf_counter() - began
    after = engine.stats()
    stats = {name: value - before[name] for name, value in after.items()}
    num_steps, dispatch, wait = _host_seconds(engine) - times_before
    num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
    num_output = sum(len(one.token_ids) for output in outputs for one in output.outputs)
    assert num_output == stats["generation_tokens"], f"{num_output} tokens came, the engine counted {stats}"
    return {
        "elapsed_time": elapsed,
        "num_requests": len(outputs),
        "total_num_tokens": num_prompt + num_output,
        "requests_per_second": len(outputs) / elapsed,
        "tokens_per_second": (num_prompt + num_output) / elapsed,
        "output_tokens_per_second": num_output / elapsed,
        "total_num_prompt_tokens": num_prompt,
        "total_num_output_tokens": num_output,
        "num_cached_tokens": sum(output.num_cached_tokens for output in outputs),
        "num_preemptions": stats["num_preemptions"],
        "num_compilations_after_ready": stats["num_compilations_after_ready"],
        "num_iterations": int(num_steps),
        "host_ms": (elapsed - dispatch - wait) / num_steps * 1e3,
        "dispatch_ms": dispatch / num_steps * 1e3,
        "wait_ms": wait / num_steps * 1e3,
        **speculation_figures(before, after),
    }


def report_lines(result: dict[str, Any]) -> list[str]:
    """Return vLLM's three lines, one about the iterations, and one about speculation where there was some."""
    drafts = []
    if "acceptance_rate" in result:
        drafts.append(
            f"Speculation: {result['num_draft_tokens']:.0f} draft tokens, acceptance {result['acceptance_rate']:.3f}, "
            f"{result['acceptance_length']:.2f} tokens a verification"
        )
    return [
        f"Throughput: {result['requests_per_second']:.2f} requests/s, "
        f"{result['tokens_per_second']:.2f} total tokens/s, "
        f"{result['output_tokens_per_second']:.2f} output tokens/s",
        f"Total num prompt tokens:  {result['total_num_prompt_tokens']}",
        f"Total num output tokens:  {result['total_num_output_tokens']}",
        f"{result['num_iterations']} iterations in {result['elapsed_time']:.2f} s, host {result['host_ms']:.3f} ms and "
        f"dispatch {result['dispatch_ms']:.3f} ms each; {result['num_preemptions']:.0f} preemptions, "
        f"{result['num_cached_tokens']} prompt tokens from the prefix cache",
        *drafts,
    ]


def _run_all(
    engine: LLMEngine, samples: Sequence[Sample], flags: ThroughputFlags, sampling: BenchSampling
) -> list[RequestOutput]:
    for i, sample in enumerate(samples):
        params = sampling.params(sample.output_len, ignore_eos=flags.ignore_eos, n=flags.n)
        engine.add_request(f"throughput-{i}", sample.token_ids, params)
    outputs: list[RequestOutput] = []
    with tqdm(total=len(samples), desc="Measuring", unit="request", disable=None, leave=False) as progress:
        while engine.has_unfinished_requests():
            finished = [output for output in engine.step() if output.finished]
            outputs += finished
            progress.update(len(finished))
    return outputs


def _warm_up(engine: LLMEngine, flags: ThroughputFlags, sampling: BenchSampling) -> None:
    rng = np.random.default_rng(engine.config.seed + 1)
    prompts = [random_token_ids(engine, rng, WARMUP_LEN) for _ in range(flags.num_warmups)]
    _run_all(engine, [Sample(prompt, WARMUP_LEN) for prompt in prompts], flags, sampling)
    engine.reset_prefix_cache()


def _host_seconds(engine: LLMEngine) -> np.ndarray:
    times = engine.host_times
    return np.array([times.num_steps, times.dispatch, times.wait])
