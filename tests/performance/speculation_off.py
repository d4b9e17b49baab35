"""What speculation costs where it does not pay: throughput with a useless draft model, as a share of that without.

    python -m tests.performance.speculation_off --batch-size 1 8 64 [--model demo --draft DIR]

Two engines in one process take turns at the same prompts, so that a machine that is busy slows both. By default the
target is a small random model and the draft another one, always wrong and a third of its size. The controller is on:
it tries now and then and gives up. Prints ratios for each batch size, of throughput (also by processor time, which
others on the machine disturb less) and of the mean time to the first token; wanted are 0.98 or more and 1.05 or less.
"""

import argparse
import gc
import time

import jax
import numpy as np
from flax import nnx

from pagedjax import EngineConfig, LLMEngine, SamplingParams
from pagedjax.bench.engine import random_token_ids
from pagedjax.loading.dummy import dummy_model
from pagedjax.models.config import ModelConfig, RopeConfig

SHAPE = {
    "architecture": "LlamaForCausalLM", "vocab_size": 4096, "hidden_size": 512, "intermediate_size": 1024,
    "num_heads": 8, "num_kv_heads": 4, "head_dim": 64, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5,
    "rope": RopeConfig(), "dtype": "float32",
}  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-size", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--input-len", type=int, default=32)
    parser.add_argument("--output-len", type=int, default=256)
    parser.add_argument("--num-rounds", type=int, default=6)
    parser.add_argument("--num-speculative-tokens", type=int, default=3)
    args = parser.parse_args()
    for size in args.batch_size:
        engines = {name: make_engine(size, args, name == "speculation") for name in ("plain", "speculation")}
        seconds = {name: [] for name in engines}
        for i in range(args.num_rounds + 1):
            for name in sorted(engines, reverse=bool(i % 2)):
                seconds[name].append(run(engines[name], size, args, seed=i))
        measured = np.array([seconds[name][1:] for name in ("plain", "speculation")])
        whole, first, processor = np.moveaxis(measured, 2, 0)
        ratios, delays, shares = whole[0] / whole[1], first[1] / first[0], processor[0] / processor[1]
        stats = engines["speculation"].stats()
        print(
            f"batch {size}: {np.median(ratios):.3f} of plain throughput, {ratios.min():.3f} to {ratios.max():.3f}, by "
            f"processor time {np.median(shares):.3f}, {shares.min():.3f} to {shares.max():.3f}, "
            f"{size * args.output_len / np.median(whole[0]):.0f} tok/s; first tokens after {np.median(delays):.3f} "
            f"of the plain time, {delays.min():.3f} to {delays.max():.3f}; accepted "
            f"{stats['spec_decode_num_accepted_tokens']:.0f} of {stats['spec_decode_num_draft_tokens']:.0f} drafts; "
            f"{engines['speculation']._speculation._controller.reason}",
            flush=True,
        )
        for engine in engines.values():
            engine.shutdown()
        del engines
        gc.collect()


def make_engine(size, args, has_speculation):
    draft = None
    options = {
        "model": "made up", "max_num_seqs": size, "max_num_batched_tokens": 256,
        "max_model_len": args.input_len + args.output_len,
        "generation_config": "vllm", "enable_prefix_caching": False,
    }  # fmt: skip
    if has_speculation:
        draft = model(num_layers=2, seed=1)
        options["speculative_config"] = {
            "method": "draft_model", "model": "made up", "num_speculative_tokens": args.num_speculative_tokens,
        }  # fmt: skip
    target = model(num_layers=6, seed=0)
    return LLMEngine(EngineConfig(**options), params=nnx.state(target.model), model_config=target.config, draft=draft)


def model(*, num_layers, seed):
    return dummy_model(ModelConfig(num_layers=num_layers, **SHAPE), dtype=jax.numpy.float32, seed=seed)


def run(engine, size, args, *, seed):
    """Return the seconds until all tokens have come, the mean of those until a request's first, and processor time."""
    random = np.random.default_rng(seed)
    params = SamplingParams(temperature=0.0, max_tokens=args.output_len, ignore_eos=True)
    for i in range(size):
        engine.add_request(f"{seed}-{i}", random_token_ids(engine, random, args.input_len), params)
    began, processor_began, first = time.perf_counter(), time.process_time(), {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            first.setdefault(output.request_id, time.perf_counter() - began)
    processor = time.process_time() - processor_began
    return time.perf_counter() - began, float(np.mean(list(first.values()))), processor


if __name__ == "__main__":
    main()
