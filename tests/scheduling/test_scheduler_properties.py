"""Whatever happens in whatever order, every request gets its own tokens, in the end, and every block comes back."""

import contextlib
import math

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pagedjax.errors import InvalidRequestError
from pagedjax.scheduling.preemption import PreemptionCosts
from pagedjax.scheduling.request import Request, RequestStatus
from tests.scheduling.fake_device import Driver, expected_beams, expected_output, make_request

REPRODUCIBLE = {"derandomize": True, "database": None, "deadline": None}  # no limit on time: machines differ

# Prompts that share prefixes of any length: the first tokens of one of two long texts, then a few of their own.
PROMPTS = st.builds(
    lambda text, length, tail: [*text[:length], *tail],
    st.sampled_from([[0] * 40, [1, 2, 3] * 14]),
    st.one_of(st.integers(0, 6), st.integers(0, 24)),
    st.lists(st.integers(0, 2), min_size=1, max_size=4),
)
REQUESTS = st.fixed_dictionaries(
    {
        "prompt_token_ids": PROMPTS,
        "max_tokens": st.one_of(st.integers(1, 3), st.integers(10, 30)),
        "priority": st.integers(0, 2),
        "client": st.sampled_from([("", ""), ("a", "x"), ("a", "y"), ("b", "")]),
        "cache_salt": st.sampled_from([None, None, "salt"]),
        "skip": st.sampled_from([False, False, False, True]),
        "ignore_eos": st.booleans(),
        "stop_token_ids": st.sampled_from([(), (), (0,)]),
        "min_tokens": st.integers(0, 1),
    }
)
GROUPS = st.tuples(REQUESTS, st.integers(2, 5), st.booleans())  # one prompt, how many, whether they are beams


@st.composite
def scheduler_options(draw):
    """Mostly small pools that one request may fill alone, so that requests run into each other."""
    block_size = draw(st.sampled_from([1, 2, 4, 8]))
    num_blocks = 1 + max(2, draw(st.integers(8, 59)) // block_size)
    capacity = block_size * (num_blocks - 1)
    return {
        "num_blocks": num_blocks,
        "block_size": block_size,
        "max_num_seqs": draw(st.sampled_from([1, 2, 4, 6])),
        "max_num_batched_tokens": draw(st.one_of(st.integers(1, 12), st.integers(20, 60))),
        "max_model_len": draw(st.one_of(st.just(max(capacity, 2)), st.integers(2, 60))),
        "max_preemptions": draw(st.integers(1, 3)),
        "watermark": draw(st.sampled_from([0.0, 0.2])),
        "policy": draw(st.sampled_from(["fcfs", "priority"])),
        "enable_prefix_caching": draw(st.sampled_from([True, True, False])),
        "num_draft_tokens": draw(st.sampled_from([0, 0, 1, 4])),
        "num_host_chunks": draw(st.sampled_from([0, 1, 3, 10, 40])),
        "chunk_size": draw(st.sampled_from([1, 2, 3])),
        "preemption_costs": PreemptionCosts(draw(st.sampled_from(["auto", "swap", "recompute"]))),
        "max_copies": draw(st.sampled_from([1, 2, 8])),
        "copy_iterations": draw(st.integers(1, 3)),
    }


def is_admissible(scheduler, request):
    num_tokens = min(request.num_prompt_tokens + request.max_tokens, scheduler.max_model_len)
    fits = math.ceil(num_tokens / scheduler.block_size) <= scheduler.pool.num_blocks - 1
    return request.num_prompt_tokens < scheduler.max_model_len and fits


def most_iterations(requests, driver):
    """The best running request advances in every third iteration at least, whatever the others suffer.

    Each time that it was preempted it may wait for its blocks to leave and to come back, one copy after another.
    """
    scheduler = driver.scheduler
    lengths, budget = [request.max_num_tokens for request in requests], scheduler.max_num_batched_tokens
    num_copies = 2 * sum(-(-length // scheduler.block_size) for length in lengths)
    waits = (scheduler.max_preemptions + 1) * num_copies * driver.copy_iterations
    alone = sum(length + math.ceil(length / budget) + 2 for length in lengths)
    return 3 * (alone + waits) * (len(requests) if scheduler.policy == "priority" else 1) + 2


@settings(max_examples=100, **REPRODUCIBLE)
@given(
    requests=st.lists(REQUESTS, min_size=1, max_size=10),
    options=scheduler_options(),
    lookahead=st.integers(0, 2),
)
def test_all_admissible_requests_finish_with_their_own_tokens(requests, options, lookahead):
    driver = Driver(**options)
    admitted = []
    for i, arguments in enumerate(requests):
        request = make_request(str(i), **arguments)
        if is_admissible(driver.scheduler, request):
            driver.scheduler.add_request(request)
            admitted.append(request)
    driver.run(most_iterations(admitted, driver), lookahead)
    for request in admitted:
        assert request.output_token_ids == expected_output(request, driver.scheduler.max_model_len)


class SchedulerMachine(RuleBasedStateMachine):
    """Requests come, stop, fail and are aborted at any moment, with up to two steps in flight."""

    @initialize(options=scheduler_options())
    def start(self, options):
        self.driver = Driver(**options)
        self.scheduler = self.driver.scheduler
        self.requests: list[Request] = []
        self.beams: list[list[Request]] = []
        self.pins: list[list[int]] = []

    @rule(batch=st.lists(REQUESTS, min_size=1, max_size=4))
    def add(self, batch):
        for arguments in batch:
            self.add_one(arguments)

    @rule(group=GROUPS)
    def add_group(self, group):
        """Requests with one prompt and seeds of their own, or beams: as wide as the vocabulary of five allows."""
        arguments, count, is_beam = group
        params = {"n": min(count, 3), "use_beam_search": True} if is_beam else {}
        serial = len(self.requests)
        count = params.get("n", count)
        requests = [make_request(str(serial + i), seed=i, **arguments, **params) for i in range(count)]
        try:
            self.scheduler.add_request(requests[0], requests[1:])
        except InvalidRequestError:
            assert is_beam or not is_admissible(self.scheduler, requests[0])
        else:
            self.requests += requests
            if is_beam:
                self.beams.append(requests)

    def add_one(self, arguments):
        request = make_request(str(len(self.requests)), **arguments)
        try:
            self.scheduler.add_request(request)
        except InvalidRequestError:
            assert not is_admissible(self.scheduler, request)
        else:
            assert is_admissible(self.scheduler, request)
            self.requests.append(request)

    @precondition(lambda self: len(self.driver.in_flight) < 2)
    @rule()
    def dispatch(self):
        self.driver.dispatch()

    @precondition(lambda self: self.driver.in_flight)
    @rule()
    def read(self):
        self.driver.read()

    @rule(num_steps=st.integers(1, 12))
    def step(self, num_steps):
        for _ in range(num_steps):
            self.driver.step()

    @precondition(lambda self: self.driver.in_flight)
    @rule(data=st.data())
    def fail(self, data):
        scheduled = self.driver.in_flight[0][0].scheduled
        self.driver.read(failed=[data.draw(st.sampled_from(scheduled)).request.request_id])

    @precondition(lambda self: self.scheduler.requests)
    @rule(data=st.data(), status=st.sampled_from([RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_ABORTED]))
    def end(self, data, status):
        request_id = data.draw(st.sampled_from(sorted(self.scheduler.requests)))
        self.scheduler.finish(self.scheduler.requests[request_id], status)

    @precondition(lambda self: self.driver.copies)
    @rule()
    def fail_copy(self):
        self.driver.fail_copies += 1

    @precondition(lambda self: self.scheduler.requests)
    @rule()
    def reset_prefix_cache(self):
        is_idle = not self.scheduler.num_running and not self.scheduler.pinned.num_blocks
        assert self.scheduler.reset_prefix_cache() == is_idle

    @rule()
    def reset_with_running_requests(self):
        is_free = not self.scheduler.pinned.num_blocks
        assert self.scheduler.reset_prefix_cache(reset_running_requests=True) == is_free

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def pin(self, data):
        """A prefix that was computed may be gone by now, or leave too little room."""
        prefix = data.draw(st.sampled_from(self.requests)).all_token_ids
        with contextlib.suppress(InvalidRequestError):
            self.scheduler.pinned.pin(make_request("pin", prefix))
            self.pins.append(prefix)

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data):
        self.scheduler.pinned.unpin(make_request("unpin", data.draw(st.sampled_from(self.pins))))

    @invariant()
    def nothing_contradicts(self):
        self.scheduler.check_integrity()

    @invariant()
    def everybody_has_the_beginning_of_their_own_output(self):
        for request in self.requests:
            if request.is_beam:
                continue  # what a hypothesis begins with may change until the end
            expected = expected_output(request, self.scheduler.max_model_len)
            num_tokens = len(request.output_token_ids)
            assert request.output_token_ids == expected[:num_tokens]
            if request.status == RequestStatus.FINISHED_LENGTH:
                assert num_tokens == len(expected)

    def teardown(self):
        if hasattr(self, "driver"):
            self.driver.run(most_iterations(self.requests, self.driver))
            assert all(request.is_finished for request in self.requests)
            for beams in self.beams:
                if beams[0].hypothesis is not None:
                    expected = expected_beams(beams[0], self.scheduler.max_model_len)
                    assert [request.output_token_ids for request in beams] == expected


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=50, stateful_step_count=40, suppress_health_check=[HealthCheck.too_slow], **REPRODUCIBLE
)
