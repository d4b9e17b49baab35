"""Measure the scheduler's host time per iteration while a full batch decodes, one iteration ahead.

    python -m tests.scheduling.benchmark --batch 256 --prompt-len 512

Prints the fastest and the median iteration; the fastest is the one to compare on a machine that does other things.
"""

import argparse
import gc
import statistics
import time

from pagedjax.scheduling.scheduler import Scheduler
from tests.scheduling.fake_device import confirm, make_request


def measure(batch: int, prompt_len: int, iterations: int) -> dict[str, list[float]]:
    scheduler = Scheduler(
        num_blocks=batch * ((prompt_len + iterations) // 16 + 3) + 1,
        block_size=16,
        max_num_seqs=batch,
        max_num_batched_tokens=batch * (prompt_len + 16),
        max_model_len=prompt_len + iterations + 32,
    )
    for i in range(batch):  # lengths differ, so that each iteration needs a sixteenth of the blocks
        scheduler.add_request(make_request(str(i), [i] * (prompt_len + i % 16), max_tokens=iterations + 5))
    in_flight = scheduler.schedule()
    times: dict[str, list[float]] = {"schedule": [], "update": [], "both": []}
    for _ in range(iterations):
        sampled = {share.request.request_id: [7] for share in in_flight.scheduled}
        start = time.perf_counter()
        output = scheduler.schedule()
        middle = time.perf_counter()
        confirm(scheduler, in_flight, sampled)
        end = time.perf_counter()
        assert output.num_tokens == batch
        for name, seconds in (("schedule", middle - start), ("update", end - middle), ("both", end - start)):
            times[name].append(seconds)
        in_flight = output
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--prompt-len", type=int, default=512)
    parser.add_argument("--iterations", type=int, default=1000)
    arguments = parser.parse_args()
    gc.freeze()
    for name, seconds in measure(arguments.batch, arguments.prompt_len, arguments.iterations).items():
        print(f"{name:>8}: fastest {min(seconds) * 1e6:.0f} us, median {statistics.median(seconds) * 1e6:.0f} us")  # noqa: T201


if __name__ == "__main__":
    main()
