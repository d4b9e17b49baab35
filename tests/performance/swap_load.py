"""A KV cache of a quarter of what its requests want at once: swapping, computing again, and a large cache.

The large one takes as many requests at once as swapping could sustain. The engines take turns, since a machine's speed
changes; a share is the median of the rounds.

    PYTHONPATH=. python -m tests.performance.swap_load [--model demo] [--requests 300] [--rounds 2]

One JSON line a run: generated tokens a second, the share of the large cache's, the highest usage, preemptions, blocks
copied and tokens computed twice. All runs must give the same tokens. The model is the tiny one of the tests, or `demo`.
"""

import argparse
import json
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pagedjax import LLM, SamplingParams
from pagedjax.loading.hf_config import model_config_from_hf
from tests.oracles import tiny_models

BLOCK_SIZE = 8
PROMPT_TOKENS, OUTPUT_TOKENS = (8, 48), (16, 80)


@dataclass
class Load:
    """Prompts and the lengths of their outputs."""

    prompts: list[list[int]]
    lengths: list[int]

    @classmethod
    def make(cls, count: int, vocab_size: int) -> "Load":
        rng = np.random.default_rng(0)
        prompts = [rng.integers(3, vocab_size, rng.integers(*PROMPT_TOKENS)).tolist() for _ in range(count)]
        return cls(prompts, rng.integers(*OUTPUT_TOKENS, count).tolist())

    @property
    def num_blocks(self) -> int:
        lengths = zip(self.prompts, self.lengths, strict=True)
        return sum(-(-(len(prompt) + length) // BLOCK_SIZE) for prompt, length in lengths)


@dataclass
class Run:
    seconds: float = 0.0
    num_tokens: int = 0
    peak_usage: float = 0.0
    running: list[float] = field(default_factory=list)
    token_ids: dict[str, list[int]] = field(default_factory=dict)
    stats: dict[str, float] = field(default_factory=dict)
    num_computed: int = 0

    @property
    def concurrency(self) -> int:
        return round(float(np.mean(self.running)))

    @property
    def rate(self) -> float:
        return self.num_tokens / self.seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", choices=["tiny", "demo"])
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--max-num-seqs", type=int, default=64)
    arguments = parser.parse_args()
    load = Load.make(arguments.requests, 128)
    num_wanted_at_once = load.num_blocks * arguments.max_num_seqs // arguments.requests
    small = {"num_gpu_blocks_override": num_wanted_at_once // 4 + 1, "max_num_seqs": arguments.max_num_seqs}
    with ExitStack() as stack:
        llms = {"swap": stack.enter_context(start(arguments.model, **small, swap_space=1.0))}
        concurrency = run_once(llms["swap"].engine, load).concurrency
        llms["recompute"] = stack.enter_context(start(arguments.model, **small))
        llms["large"] = stack.enter_context(start(arguments.model, max_num_seqs=concurrency))
        rounds = [{name: run_once(llm.engine, load) for name, llm in llms.items()} for _ in range(arguments.rounds)]
    for name in llms:
        runs = [one[name] for one in rounds]
        assert all(run.token_ids == rounds[0]["large"].token_ids for run in runs), f"{name} generates something else"
        report(name, runs[-1], [one[name].rate / one["large"].rate for one in rounds])


def start(model: str, **options: Any) -> LLM:
    """Build an engine; each of its runs begins with a cold prefix cache."""
    shared = {"block_size": BLOCK_SIZE, "max_model_len": 128, "max_num_batched_tokens": 256, "show_progress": False}
    if model == "demo":
        return LLM("demo", **shared, **options)
    config = model_config_from_hf(tiny_models.CASES["mistral"])
    return LLM(params=tiny_models.weights("mistral"), model_config=config, **shared, **options)


def run_once(engine: Any, load: Load) -> Run:
    """Run all requests, which arrive at once."""
    assert engine.reset_prefix_cache()
    run, before = Run(), engine.stats()
    for i, (prompt, length) in enumerate(zip(load.prompts, load.lengths, strict=True)):
        params = SamplingParams(max_tokens=length, seed=i, ignore_eos=True)
        engine.add_request(str(i), prompt, params)
    began = time.perf_counter()
    while engine.has_unfinished_requests():
        output = engine.step()
        run.num_computed += output.plan.num_tokens
        run.running.append(len(output.plan.scheduled))
        run.peak_usage = max(run.peak_usage, engine.stats()["kv_cache_usage_perc"])
        run.token_ids |= {one.request_id: one.outputs[0].token_ids for one in output if one.finished}
    run.seconds = time.perf_counter() - began
    engine.step()
    engine.check_integrity()
    run.num_tokens = sum(map(len, run.token_ids.values()))
    run.stats = {name: value - before[name] for name, value in engine.stats().items() if name in before}
    assert len(run.token_ids) == len(load.prompts)
    assert engine.stats()["num_blocks_used"] == engine.stats()["cpu_cache_usage_perc"] == 0
    return run


def report(name: str, run: Run, shares: list[float]) -> None:
    """Print the last run, and the shares of the large cache's rate in all rounds."""
    num_wanted = sum(map(len, run.token_ids.values())) - len(run.token_ids)
    values = {
        "run": name,
        "tokens_per_second": round(run.rate, 1),
        "share_of_large": round(float(np.median(shares)), 3),
        "shares": [round(share, 3) for share in shares],
        "concurrency": run.concurrency,
        "peak_usage": round(run.peak_usage, 3),
        "computed_tokens": run.num_computed,
        "generated_tokens": num_wanted + len(run.token_ids),
    }
    names = ("num_preemptions", "num_preemptions_swapped", "swap_out_blocks", "swap_in_blocks", "swap_failures")
    print(json.dumps(values | {name: run.stats[name] for name in names}), flush=True)


if __name__ == "__main__":
    main()
