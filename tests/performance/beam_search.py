"""Tokens a second of a beam search against as many sampled completions, in one process: `python -m
tests.performance.beam_search [--model ...] [--width 4]`.

Beams are not computed before their last tokens were read, and fork; completions do neither. The ratio is theirs, the
tokens of a second are the machine's. A hypothesis' token counts once for each of `width` hypotheses in each iteration.
"""

import argparse
import statistics
import time

from pagedjax import LLM, SamplingParams


def seconds_of(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> float:
    """Return how long it takes to complete all prompts, cold."""
    llm.reset_prefix_cache()
    began = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - began


def main() -> None:
    """Print both rates and their ratio, the median of several rounds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--width", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=1)
    parser.add_argument("--prompt-len", type=int, default=128)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="auto")
    args = parser.parse_args()
    prompts = [[3 + (7 * i + j) % 500 for j in range(args.prompt_len)] for i in range(args.prompts)]
    shared = {"n": args.width, "max_tokens": args.max_tokens, "ignore_eos": True}
    kinds = {
        "n": SamplingParams(temperature=1.0, seed=1, **shared),
        "beams": SamplingParams(use_beam_search=True, **shared),
    }
    num_seqs = args.width * args.prompts
    with LLM(
        model=args.model, dtype=args.dtype, max_model_len=1024, max_num_seqs=num_seqs, max_num_batched_tokens=512,
        show_progress=False,
    ) as llm:  # fmt: skip
        for params in kinds.values():
            seconds_of(llm, prompts, params)
        times = {kind: [] for kind in kinds}
        for _ in range(args.rounds):
            for kind, params in kinds.items():
                times[kind].append(seconds_of(llm, prompts, params))
        rates = {kind: num_seqs * args.max_tokens / statistics.median(seconds) for kind, seconds in times.items()}
        copies = llm.engine.stats()["num_block_copies"]
    print(f"{args.model}, {args.prompts} prompts, width {args.width}, {copies:.0f} blocks copied")
    plain, beams = rates["n"], rates["beams"]
    print(f"n={args.width}: {plain:.1f} tokens/s, beams: {beams:.1f}, ratio {beams / plain:.2f}")


if __name__ == "__main__":
    main()
