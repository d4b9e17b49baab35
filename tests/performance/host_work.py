"""What the host does in an iteration, with each proposer and without any, over a model that costs nothing.

Run: python -m tests.performance.host_work --num-requests 64 256

Every request decodes in every step. Drafts are always made, as many as there can be: the draft model is the target, so
that all of its drafts are accepted; n-grams are found and refused, for the fake model does not repeat itself, and so
the suffix tree has nothing to propose.
"""

import argparse
import time

import numpy as np

from pagedjax import LLMEngine, SamplingParams
from tests.fakes import fake_engine
from tests.kept_executables import few_buckets

NUM_DRAFTS, NUM_TOKENS, PROMPT = 4, 100, [1, 2, 3, 4, 5, 6] * 3
METHODS = {
    "none": None,
    "ngram": {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3},
    "suffix": {"method": "suffix"},
    "draft_model": {"method": "draft_model", "model": "fake"},
}


def make_engine(method: str, num_requests: int) -> LLMEngine:
    config = METHODS[method]
    if config is not None:
        config = config | {"num_speculative_tokens": NUM_DRAFTS, "is_adaptive": False}
    with few_buckets():
        return fake_engine(
            max_num_seqs=num_requests, max_num_batched_tokens=max(64, (1 + NUM_DRAFTS) * num_requests),
            num_gpu_blocks_override=16 * num_requests + 1, speculative_config=config,
        )  # fmt: skip


def host_seconds(engine: LLMEngine, num_requests: int) -> np.ndarray:
    """Seconds of each step, without dispatch and waiting, while all requests decode."""
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    for i in range(num_requests):
        engine.add_request(str(i), [i % 256, *PROMPT], params)
    times, seconds = engine.host_times, []
    while engine.has_unfinished_requests():
        began, apart = time.perf_counter(), times.dispatch + times.wait
        output = engine.step()
        seconds.append(time.perf_counter() - began - (times.dispatch + times.wait - apart))
        if any(one.finished for one in output):
            break
    return np.array(seconds[5:-1])  # without the prompts and the ends


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-requests", type=int, nargs="+", default=[64, 256])
    flags = parser.parse_args()
    for num_requests in flags.num_requests:
        for method in METHODS:
            engine = make_engine(method, num_requests)
            milliseconds = 1e3 * host_seconds(engine, num_requests)
            stats = engine.stats()
            tokens = stats["generation_tokens"] / num_requests / engine.host_times.num_steps
            print(
                f"{num_requests} requests, {method}: {milliseconds.min():.2f} ms a step at best, median "
                f"{np.median(milliseconds):.2f}; {tokens:.1f} tokens a request and step"
            )
            engine.shutdown()


if __name__ == "__main__":
    main()
