"""Long random programs over pools of 3 to 200 blocks, 0 to 100 on the host: no operation leaves a contradiction.

A program is a string of bytes, three an operation, which hypothesis makes and shrinks faster than single draws.
"""

import itertools
import re
from collections import Counter
from typing import ClassVar

from hypothesis import given, settings
from hypothesis import strategies as st

from pagedjax.errors import InvalidRequestError
from pagedjax.scheduling.pacing import Pacing
from pagedjax.scheduling.preemption import CopySpeed, PreemptionCosts
from pagedjax.scheduling.request import Request, RequestStatus
from pagedjax.scheduling.scheduler import Scheduler
from tests.scheduling.fake_device import Driver, expected_beams, expected_output, make_request

NUM_PROGRAMS, NUM_OPERATIONS = 102, 200
MAX_AHEAD = 2


class Traced(Request):
    """A request that notes every change of its status."""

    __slots__ = ()
    changes: ClassVar[set[tuple[str, str]]] = set()

    def __setattr__(self, name, value):
        if name == "status":
            self.changes.add((self.status.name, re.sub("FINISHED_.*", "FINISHED", value.name)))
        super().__setattr__(name, value)


def documented_changes():
    """The lines `STATE -> STATE, STATE` of the scheduler's docstring."""
    lines = re.findall(r"^ +([A-Z_]+) -> ([A-Z_, ]+[A-Z_])", Scheduler.__doc__, re.MULTILINE)
    changes = {(before, after) for before, states in lines for after in states.split(", ")}
    return changes | {(before, "FINISHED") for before, _ in lines}


class Program:
    """Carries out operations on a scheduler; `happened` counts them and what came of them."""

    def __init__(self, code, happened):
        size, shape, host = code[:3], code[3:6], code[6:9]
        block_size = (1, 2, 4, 8)[shape[0] % 4]
        num_blocks = 3 + (size[0] % 16 if size[1] % 3 else size[0] % 198)
        self.driver = Driver(
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=1 + shape[1] % 8,
            max_num_batched_tokens=(4, 9, 33, 64)[shape[2] % 4],
            max_model_len=max(2, (num_blocks - 1) * block_size // (1, 1, 2, 3)[size[2] % 4]),
            policy=("fcfs", "priority")[size[2] % 2],
            max_preemptions=1 + shape[1] % 3,
            watermark=(0.0, 0.1)[shape[2] % 2],
            num_draft_tokens=(0, 0, 2, 5)[size[1] // 3 % 4],
            pacing=Pacing(
                delay_factor=size[1] % 2, target_seconds=(None, 0.01)[shape[0] // 4 % 2], token_buckets=(4, 16, 64)
            ),
            chunk_size=1 + host[0] % 4,
            num_host_chunks=host[1] % 101 // (1 + host[0] % 4),
            preemption_costs=PreemptionCosts(
                ("auto", "swap", "recompute", "swap")[host[0] // 4 % 4], CopySpeed(0.001, 0.001 * (host[1] % 5))
            ),
            max_copies=1 + host[2] % 6,
            copy_iterations=1 + host[2] % 3,
            enable_prefix_caching=host[2] % 8 > 0,
        )
        self.scheduler = self.driver.scheduler
        self.requests, self.expected, self.pins, self.happened = {}, {}, [], happened
        evict = self.scheduler.prefix_cache.evict

        def evict_checked(block_ids):
            held = [request.block_ids for request in self.scheduler.running]
            held += self.scheduler.pinned.block_tables()
            assert not {*block_ids} & {*itertools.chain(*held)}, "a block in use was evicted"
            evict(block_ids)

        self.scheduler.prefix_cache.evict = evict_checked

    def run(self, code):
        kinds = (
            [self.read] * 4 + [self.add] * 3 + [self.fork] * 3 + [self.add_group] * 3 + [self.add_beams]
            + [self.step] * 10 + [self.dispatch] * 4
            + [self.finish, self.abort, self.fail, self.reset, self.preempt, self.pin, self.unpin]
            + [self.evict, self.measure, self.swap_out, self.swap_in, self.evict_to_host, self.fail_copy] * 2
            + [self.end_away] * 2
        )  # fmt: skip
        for kind, first, second in itertools.batched(code, 3):
            operation = kinds[kind % len(kinds)]
            operation(first, second)
            self.happened[operation.__name__] += 1
            self.happened["operations"] += 1
            self.check()
        for name, count in self.scheduler.stats().items():
            self.happened[name] += count
        self.driver.run()
        self.check()
        assert all(request.is_finished for request in self.requests.values())
        self.happened["accepted"] += self.driver.num_accepted
        self.happened["searches"] += sum(request.hypothesis is not None for request in self.requests.values())
        self.happened["settled"] += sum(
            request.num_preemptions == self.scheduler.max_preemptions for request in self.requests.values()
        )

    def check(self):
        self.scheduler.check_integrity()
        for request_id, request in self.requests.items():
            num_tokens = len(request.output_token_ids)
            if request.is_beam:
                assert request.hypothesis is None or request.output_token_ids == self.expected[request_id]
                continue
            assert request.output_token_ids == self.expected[request_id][:num_tokens]
            if request.status == RequestStatus.FINISHED_LENGTH:
                assert num_tokens == len(self.expected[request_id])

    def add(self, first, second, prompt=None, count=1, **params):
        prompt = prompt or [first % 2] * (1 + second % 11)
        limit, serial = self.scheduler.max_model_len, len(self.requests)
        group = [
            make_request(
                str(serial + i), prompt[: limit - 1], 1 + second % 23, priority=first % 3,
                client=(str(first % 2), str(second % 3)), cache_salt="salt" if first % 8 == 7 else None,
                ignore_eos=bool(second % 2), seed=i, **params,
            )
            for i in range(count)
        ]  # fmt: skip
        for request in group:
            request.__class__ = Traced
        self.scheduler.add_request(group[0], group[1:])
        self.requests.update((request.request_id, request) for request in group)
        for request in group:
            if not request.is_beam:
                self.expected[request.request_id] = expected_output(request, limit)
        if group[0].is_beam:
            request_ids = [request.request_id for request in group]
            self.expected.update(zip(request_ids, expected_beams(group[0], limit), strict=True))

    def add_group(self, first, second):
        """Add requests that share a prompt, sometimes more than there are rows."""
        self.add(first, second, count=2 + first % 4)

    def add_beams(self, first, second):
        """Add a beam search, if it can run at all."""
        width = 1 + first % 3
        try:
            self.add(first, second, count=width, n=width, use_beam_search=True, length_penalty=float(second % 3))
        except InvalidRequestError:
            self.happened["refused beams"] += 1

    def fork(self, first, second):
        """Add a request that begins as another one does, output included, and goes on as it likes."""
        parent = self._choose(self.requests.values(), first)
        if parent is not None:
            num_shared = second % (parent.num_tokens + 1)
            self.add(first, second, [*parent.all_token_ids[:num_shared], *[second % 3] * (first % 4 + 1)])

    def step(self, first, _second):
        self.driver.step(lookahead=first % (MAX_AHEAD + 1))

    def dispatch(self, _first, _second):
        if len(self.driver.in_flight) < MAX_AHEAD:
            self.driver.dispatch()

    def read(self, _first, _second):
        if self.driver.in_flight:
            self.driver.read()

    def finish(self, first, _second):
        request = self._choose(self.scheduler.requests.values(), first)
        if request is not None:
            self.scheduler.finish(request, RequestStatus.FINISHED_STOPPED)

    def abort(self, first, _second):
        request = self._choose(self.scheduler.requests.values(), first)
        if request is not None:
            self.scheduler.abort(request.request_id)

    def fail(self, first, _second):
        if self.driver.in_flight:
            share = self._choose(self.driver.in_flight[0][0].scheduled, first)
            self.driver.read(failed=[share.request.request_id])

    def evict(self, first, _second):
        """Take free blocks for something else and give them back empty."""
        pool = self.scheduler.pool
        pool.release(pool.allocate(first % (pool.num_free + 1)))

    def swap_out(self, first, second):
        """Preempt one request as if there were no room, and mostly use up the room at once."""
        running = [r for r in self.scheduler.running if not r.is_finished and not self.scheduler._is_settled(r)]
        request = self._choose(running, first)
        if request is not None:
            self.scheduler._preempt(request)
            self.happened["swapped out"] += request.is_swapped
            if second % 4:
                self.driver.dispatch()
                self.evict(self.scheduler.pool.num_free, 0)

    def swap_in(self, _first, _second):
        """Iterate until somebody waits for blocks from the host, if anybody is there."""
        for _ in range(8):
            if any(request.status is RequestStatus.SWAPPING_IN for request in self.scheduler.running):
                self.happened["swapped in"] += 1
            elif any(request.is_swapped for request in self.scheduler.waiting):
                self.driver.step()

    def evict_to_host(self, first, _second):
        """Take free blocks for something else, after their prefixes went to the host, and give them back empty."""
        scheduler = self.scheduler
        copies = scheduler.swapping.begin(self.driver.progress())
        scheduler.pool.release(scheduler._allocate(first % (scheduler.pool.num_free + 1)))
        scheduler.swapping.end()
        self.driver.start(copies)
        self.driver.device.copy(copies)
        self.happened["written back"] += bool(copies.out)

    def fail_copy(self, _first, _second):
        """Have the next copy fail."""
        self.driver.fail_copies = 1

    def end_away(self, first, second):
        """End a request that is on its way to the host, there, or on its way back."""
        away = [r for r in self.scheduler.requests.values() if r.is_swapped or r.status is RequestStatus.SWAPPING_IN]
        request = self._choose(sorted(away, key=lambda r: r.status), -(first % 2))
        if request is not None:
            self.happened[f"ended {request.status.name}"] += 1
            self.scheduler.finish(request, (RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_TIMEOUT)[second % 2])

    def measure(self, first, second):
        """Have a step with tokens of prompts take long or not."""
        self.scheduler.note_step(num_requests=1, num_tokens=2 + second, seconds=0.001 + first / 1000)

    def pin(self, first, _second):
        request = self._choose(self.requests.values(), first)
        if request is None:
            return
        try:
            self.scheduler.pinned.pin(make_request("pin", request.all_token_ids))
        except InvalidRequestError:
            return
        self.pins.append(list(request.all_token_ids))
        self.happened["pinned"] += 1

    def unpin(self, first, _second):
        if self.pins:
            self.happened["unpinned"] += self.scheduler.pinned.unpin(
                make_request("unpin", self._choose(self.pins, first))
            )

    def preempt(self, _first, _second):
        """Everybody, with the prefix cache."""
        self.happened["reset"] += self.scheduler.reset_prefix_cache(reset_running_requests=True)

    def reset(self, _first, _second):
        is_idle = not (self.scheduler.num_running or self.scheduler.pinned.num_blocks)
        assert self.scheduler.reset_prefix_cache() == is_idle

    def _choose(self, items, number):
        items = list(items)
        return items[number % len(items)] if items else None


def test_no_operation_of_long_random_programs_leaves_a_contradiction():
    happened = Counter()

    @settings(max_examples=NUM_PROGRAMS, derandomize=True, database=None, deadline=None)
    @given(st.binary(min_size=3 * (NUM_OPERATIONS + 3), max_size=3 * (NUM_OPERATIONS + 3)))
    def run(code):
        Program(code[:9], happened).run(code[9:])

    Traced.changes.clear()
    run()
    assert Traced.changes == documented_changes()
    assert happened["operations"] >= 20_000
    for event in (
        "fork", "add_group", "add_beams", "searches", "num_block_copies", "preempt", "pinned", "unpinned", "reset",
        "fail", "num_preemptions", "settled", "accepted", "prefix_cache_evictions", "prefix_cache_hits",
        "prefix_cache_resumed_hits", "num_preemptions_swapped", "swapped out", "swapped in", "written back",
        "swap_in_blocks", "swap_failures", "external_prefix_cache_hits", "ended SWAPPING_OUT", "ended SWAPPED",
        "ended SWAPPING_IN",
    ):  # fmt: skip
        assert happened[event] > 5, event
