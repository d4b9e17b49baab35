"""How close speculative decoding comes to what its parts allow, with drafts that are accepted at a forced rate.

    python -m tests.performance.speculation_bound --model dummy:llama-8b --draft dummy:llama-0.5b \
        --num-speculative-tokens 4 --acceptance 0.8 --batch-size 1 8 --input-len 512 --output-len 256

For each batch size: the device's time for a proposal and for a verification, each run many times back to back; the
tokens a second that they allow at this acceptance; those that the engine reaches; and those of plain decoding. Without
--draft the proposer is the n-gram look-up; at acceptance 1 all drafts are accepted in each step.
"""

import argparse
import time

import jax
import numpy as np

from pagedjax import EngineConfig, LLMEngine, SamplingParams
from pagedjax.bench.batch_run import run_batch
from pagedjax.bench.engine import random_token_ids

NUM_REPEATS = 16


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="dummy:llama-8b")
    parser.add_argument("--draft")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--num-speculative-tokens", type=int, default=4)
    parser.add_argument("--acceptance", type=float, default=0.8)
    parser.add_argument("--batch-size", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--input-len", type=int, default=512)
    parser.add_argument("--output-len", type=int, default=256)
    parser.add_argument("--num-iters", type=int, default=3)
    args = parser.parse_args()
    options = {
        "model": args.model, "load_format": args.load_format, "max_num_seqs": max(args.batch_size),
        "max_model_len": args.input_len + args.output_len + 16, "enable_prefix_caching": False,
    }  # fmt: skip
    speculative = {"num_speculative_tokens": args.num_speculative_tokens, "is_adaptive": False}
    speculative |= {"method": "draft_model", "model": args.draft} if args.draft else {"method": "ngram"}
    plain = tokens_per_second(LLMEngine(EngineConfig(**options)), args)
    config = EngineConfig(**options, speculative_config=speculative, forced_acceptance=args.acceptance)
    engine = LLMEngine(config)
    reached = tokens_per_second(engine, args)
    per_step = expected_tokens(args.acceptance, args.num_speculative_tokens)
    print(f"{args.acceptance:g} accepted, {per_step:.3f} tokens a step expected")
    print("batch  draft ms  verify ms  bound tok/s  reached tok/s  of bound  plain tok/s  speed-up  compilations")
    for size in args.batch_size:
        draft, verify = part_times(engine, args, size)
        bound = size * per_step / (draft + verify)
        print(
            f"{size:5d}  {draft * 1e3:8.3f}  {verify * 1e3:9.3f}  {bound:11.1f}  {reached[size]:13.1f}  "
            f"{reached[size] / bound:8.3f}  {plain[size]:11.1f}  {reached[size] / plain[size]:8.2f}  "
            f"{engine.stats()['num_compilations_after_ready']:12.0f}"
        )


def expected_tokens(acceptance, num_drafts):
    """Tokens of one verification."""
    return sum(acceptance**i for i in range(num_drafts + 1))


def tokens_per_second(engine, args):
    """While all requests decode, by batch size; the median of several runs."""
    random = np.random.default_rng(0)
    params = SamplingParams(temperature=0.0, max_tokens=args.output_len, ignore_eos=True, detokenize=False)
    rates = {}
    for size in args.batch_size:
        runs = []
        for _ in range(args.num_iters + 1):
            prompts = [random_token_ids(engine, random, args.input_len) for _ in range(size)]
            decoding = run_batch(engine, prompts, params).decoding
            runs.append(size / decoding.tpot)
        rates[size] = float(np.median(runs[1:]))
    if engine._speculation is None:
        engine.shutdown()
    return rates


def part_times(engine, args, size):
    """Seconds of a proposal and of a verification on the device."""
    random = np.random.default_rng(1)
    params = SamplingParams(temperature=0.0, max_tokens=args.output_len, ignore_eos=True, detokenize=False)
    for i in range(size):
        engine.add_request(f"part-{i}", random_token_ids(engine, random, args.input_len), params)
    plan = engine.step().plan
    while plan.num_draft_tokens != size * args.num_speculative_tokens or any(
        one.new_block_ids for one in plan.scheduled
    ):
        plan = engine.step().plan
    runner, speculator = engine._runner, engine._runner._speculator
    propose = speculator.propose

    def propose_once():
        runner._rows, drafts = propose(runner._rows, plan.scheduled)
        return drafts

    draft = seconds_each(propose_once)
    speculator.propose = lambda rows, scheduled: (rows, None)
    verify = seconds_each(lambda: runner.dispatch(plan).result)
    speculator.propose = propose
    engine.abort([f"part-{i}" for i in range(size)])
    while engine.has_unfinished_requests():
        engine.step()
    return draft, verify


def seconds_each(run):
    jax.block_until_ready(run())
    times = []
    for _ in range(3):
        began = time.perf_counter()
        results = [run() for _ in range(NUM_REPEATS)]
        jax.block_until_ready(results)
        times.append((time.perf_counter() - began) / NUM_REPEATS)
    return min(times)


if __name__ == "__main__":
    main()
