"""A pool of a quarter of what its requests want does the work of a large one that runs as many at once.

The device is a cost model: a step takes as long as 500 tokens, and as its tokens. Outputs end where the scheduler does
not expect it, halfway to max_tokens on average.
"""

import random
from dataclasses import dataclass

import pytest

from pagedjax.scheduling.preemption import CopySpeed, PreemptionCosts
from pagedjax.scheduling.scheduler import MAX_PREEMPTIONS, Scheduler
from pagedjax.scheduling.swapping import BlockCopies, CopyProgress
from tests.scheduling.fake_device import confirm, make_request

NUM_REQUESTS, MAX_TOKENS, STOP, STEP_COST = 150, 300, 7777, 500
BLOCK_SIZE = 16
MAX_COPIES = 8
SWAPPING = {"num_host_chunks": 100, "chunk_size": 8}


@dataclass
class Work:
    cost: int = 0
    num_tokens: int = 0
    num_useful: int = 0
    peak_usage: float = 0.0
    concurrency: float = 0.0
    num_preemptions: int = 0
    num_swaps: int = 0
    most_preemptions: int = 0


def run(*, num_blocks, max_num_seqs=64, **options):
    generator = random.Random(0)
    scheduler = Scheduler(
        num_blocks=num_blocks, block_size=BLOCK_SIZE, max_num_seqs=max_num_seqs, max_num_batched_tokens=2048,
        max_model_len=1024, **options,
    )  # fmt: skip
    requests, lengths, copies = [], {}, BlockCopies()
    for i in range(NUM_REQUESTS):
        prompt = [generator.randrange(1000) for _ in range(generator.randint(20, 200))]
        requests.append(make_request(str(i), prompt, MAX_TOKENS, stop_token_ids=[STOP]))
        lengths[str(i)] = generator.randint(20, MAX_TOKENS - 20)
        scheduler.add_request(requests[-1])
    work, num_steps, in_flight = Work(), 0, None
    while scheduler.has_work():
        progress = CopyProgress(MAX_COPIES, landed=copies.started)  # all that was started in the last iteration
        output = scheduler.schedule(0.0, progress)
        copies = output.copies
        sampled = {}
        for share in output.scheduled:
            request = share.request
            is_end = request.num_tokens_bound - request.num_prompt_tokens >= lengths[request.request_id]
            sampled[request.request_id] = [STOP if is_end else 5]
        if output.num_tokens:
            scheduler.note_step(
                num_requests=len(output.scheduled), num_tokens=output.num_tokens,
                seconds=STEP_COST + output.num_tokens,
            )  # fmt: skip
        if in_flight is not None:
            confirm(scheduler, *in_flight)
        in_flight = (output, sampled) if output.scheduled else None
        num_steps += 1
        work.cost += STEP_COST + output.num_tokens
        work.num_tokens += output.num_tokens
        work.concurrency += len(output.scheduled)
        work.peak_usage = max(work.peak_usage, scheduler.pool.num_used / scheduler.pool.capacity)
    scheduler.check_integrity()
    assert all(len(request.output_token_ids) == lengths[request.request_id] for request in requests)
    work.concurrency /= num_steps
    work.num_useful = sum(request.num_tokens for request in requests)
    work.num_preemptions = scheduler.num_preemptions
    work.num_swaps = scheduler.swapping.num_swaps
    work.most_preemptions = max(request.num_preemptions for request in requests)
    return work


@pytest.fixture(scope="module")
def small():
    return run(num_blocks=300, watermark=0.05)


def test_all_finish_in_a_full_pool_with_little_computed_twice(small):
    thrashing = run(num_blocks=300, watermark=0.0, max_preemptions=1000)
    assert small.num_preemptions > 0
    assert small.peak_usage >= 0.9
    assert small.most_preemptions <= MAX_PREEMPTIONS
    num_wasted, num_wasted_without = (work.num_tokens - work.num_useful for work in (small, thrashing))
    assert num_wasted < 0.15 * small.num_useful
    assert num_wasted < 0.5 * num_wasted_without
    assert small.cost < 1.03 * thrashing.cost


def test_it_does_the_work_of_a_large_pool_that_runs_as_many_at_once(small):
    large = run(num_blocks=1200, max_num_seqs=round(small.concurrency))
    assert large.num_preemptions == 0
    assert large.cost / small.cost >= 0.9


def test_with_host_memory_next_to_nothing_is_computed_twice(small):
    swapping = run(num_blocks=300, watermark=0.05, **SWAPPING)
    assert swapping.num_swaps == swapping.num_preemptions > 0
    assert swapping.peak_usage >= 0.9
    assert swapping.most_preemptions <= MAX_PREEMPTIONS
    num_wasted, num_wasted_without = (work.num_tokens - work.num_useful for work in (swapping, small))
    assert num_wasted < 0.2 * num_wasted_without
    assert swapping.cost <= 1.02 * small.cost


def test_swapping_does_the_work_of_a_large_pool_that_runs_as_many_at_once():
    swapping = run(num_blocks=300, watermark=0.05, **SWAPPING)
    large = run(num_blocks=1200, max_num_seqs=round(swapping.concurrency))
    assert large.cost / swapping.cost >= 0.9


def test_where_copies_are_slower_than_prompts_blocks_are_computed_again():
    costs = PreemptionCosts("auto", CopySpeed(seconds_out=10_000, seconds_in=10_000))
    slow = run(num_blocks=300, watermark=0.05, **SWAPPING, preemption_costs=costs)
    assert slow.num_preemptions > 0
    assert slow.num_swaps == 0
