"""What requests feel on a simulated clock: tokens keep coming beside prompts, and short requests beside long ones.

A step takes 4 ms and 10 us for each token of the bucket that it is padded to, about what an 8B model takes on an H200.
"""

import itertools

import numpy as np
import pytest

from pagedjax.scheduling.pacing import Pacing
from tests.scheduling.fake_device import Driver, confirm, make_request

BUCKETS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


class Clock:
    """Runs a scheduler, one step after another, and notes when each request got which token."""

    def __init__(self, *, target_seconds=None, delay_factor=0.0, **options):
        pacing = Pacing(delay_factor=delay_factor, target_seconds=target_seconds, token_buckets=BUCKETS)
        defaults = {"num_blocks": 6000, "block_size": 16, "max_num_seqs": 64, "max_num_batched_tokens": 8192}
        defaults["max_model_len"] = 8192
        self.driver = Driver(**(defaults | options), pacing=pacing)
        self.scheduler = self.driver.scheduler
        self.now, self.in_flight = 0.0, None
        self.times: dict[str, list[float]] = {}
        self.num_admitted: list[int] = []  # by step with a prompt

    def add(self, request_id, num_prompt_tokens, max_tokens, **options):
        number = len(self.times)
        prompt = [number * 7919 % 100_003 + i for i in range(num_prompt_tokens)]
        request = make_request(request_id, prompt, max_tokens, **options)
        request.arrival_time = self.now
        self.scheduler.add_request(request)
        self.times[request_id] = []
        return request

    def step(self):
        """Tokens are not computed: what a request says makes no difference here."""
        output = self.scheduler.schedule(self.now, self.driver.progress())
        self.driver.start(output.copies)
        if not output.scheduled:
            self.now += 0.0001
            return
        seconds = 0.004 + 1e-5 * next(bucket for bucket in BUCKETS if bucket >= output.num_tokens)
        self.now += seconds
        sampling = [share.request for share in output.scheduled if share.samples]
        confirm(self.scheduler, output, {request.request_id: [1] for request in sampling})
        for request in sampling:
            self.times[request.request_id].append(self.now)
        num_requests = len(output.scheduled)
        self.scheduler.note_step(num_requests=num_requests, num_tokens=output.num_tokens, seconds=seconds)
        num_admitted = sum(share.is_new_row for share in output.scheduled)
        self.num_admitted += [num_admitted] if num_admitted else []

    def run(self, until=None):
        while self.scheduler.has_work() and (until is None or not until.is_finished):
            self.step()

    def between_tokens(self, request_ids):
        return [b - a for name in request_ids for a, b in itertools.pairwise(self.times[name])]


def p99_beside_prompts(target_seconds, num_prompts):
    clock = Clock(target_seconds=target_seconds)
    names = [f"d{i}" for i in range(16)]
    for name in names:
        clock.add(name, 100, 400)
    while not all(clock.times[name] for name in names):
        clock.step()
    for i in range(num_prompts):
        clock.add(f"p{i}", 4000, 4)
    clock.run()
    return np.quantile(clock.between_tokens(names), 0.99)


def test_eight_prompts_of_4000_tokens_at_most_double_the_time_between_tokens():
    quiet = p99_beside_prompts(None, 0)
    assert p99_beside_prompts(2 * quiet, 8) <= 2 * quiet
    assert p99_beside_prompts(None, 8) > 4 * quiet  # without a target


@pytest.mark.parametrize("num_host_chunks", [0, 4000])
def test_eight_long_generations_in_all_slots_at_most_double_the_time_of_short_requests(num_host_chunks):
    """Short ones are of a better priority and take the place of long ones, which is possible three times for each."""

    def p95(num_long):
        clock = Clock(policy="priority", max_num_seqs=8, num_host_chunks=num_host_chunks, chunk_size=8)
        for i in range(num_long):
            clock.add(f"long{i}", 50, 2000, priority=1)
        for _ in range(200):
            clock.step()
        seconds = []
        for i in range(20):
            request = clock.add(f"short{i}", 50, 20, priority=0)
            clock.run(until=request)
            seconds.append(clock.now - request.arrival_time)
            for _ in range(20):
                clock.step()
        assert sum(request.num_preemptions for request in clock.scheduler.requests.values()) == (20 if num_long else 0)
        return np.quantile(seconds, 0.95)

    assert p95(8) <= 2 * p95(0)


def test_a_delay_factor_of_a_half_computes_more_prompts_at_once():
    def prompts_a_step(factor):
        clock = Clock(delay_factor=factor)
        clock.add("first", 10, 2000)
        num_added = 0
        while num_added < 200:
            while num_added * 0.02 <= clock.now and num_added < 200:  # fifty a second
                clock.add(str(num_added), 1500, 2)
                num_added += 1
            clock.step()
        return np.mean(clock.num_admitted[20:])

    assert prompts_a_step(0.5) > 1.2 * prompts_a_step(0.0)
