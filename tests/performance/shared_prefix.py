"""Blocks and times of requests with a common prefix: `python -m tests.performance.shared_prefix`.

Prints how many blocks 50 requests with a common prefix of 500 tokens use, against what the prefix takes once beside
the requests' own, and the time to the first token of a hit against that of a miss.
"""

import argparse
import statistics
import time

from pagedjax import LLM, SamplingParams


def first_token_seconds(llm: LLM, prompt: list[int]) -> float:
    """Return the time to the first token of one request that has everything to itself."""
    began = time.perf_counter()
    llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=1), use_tqdm=False)
    return time.perf_counter() - began


def main() -> None:
    """Print both comparisons."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--requests", type=int, default=50)
    parser.add_argument("--prefix-len", type=int, default=500)
    args = parser.parse_args()
    with LLM(model=args.model, max_model_len=1024, max_num_seqs=args.requests, show_progress=False) as llm:
        prefix = [10 + i % 400 for i in range(args.prefix_len)]
        misses = [first_token_seconds(llm, [500 + i, *prefix]) for i in range(5)]
        llm.generate([prefix], SamplingParams(max_tokens=1), use_tqdm=False)
        hits = [first_token_seconds(llm, [*prefix, 500 + i]) for i in range(5)]
        ratio = statistics.median(hits) / statistics.median(misses)
        print(f"first token after {1000 * statistics.median(hits):.1f} ms with a hit, {ratio:.2f} of a miss")
        print(shared_blocks(llm, prefix, args.requests))


def shared_blocks(llm: LLM, prefix: list[int], num_requests: int) -> str:
    """Run requests side by side and say what they use at most."""
    engine, params = llm.engine, SamplingParams(max_tokens=8, ignore_eos=True)
    for i in range(num_requests):
        engine.add_request(f"shared{i}", [*prefix, 600 + i], params)
    num_used, num_own = 0, 0
    while engine.has_unfinished_requests():
        tables = [one.block_table for one in engine.step().scheduled]
        num_full = len(prefix) // engine.config.block_size
        used = engine.stats()["num_blocks_used"]
        if used > num_used:
            num_used, num_own = used, sum(len(table) - num_full for table in tables)
    once = num_full + num_own
    return f"{num_used:.0f} blocks in use at most; the prefix once and what each has alone are {once}"


if __name__ == "__main__":
    main()
