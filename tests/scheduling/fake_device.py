"""A device that computes in Python what a step of a real one would, and checks every block table it is given.

Instead of K and V a slot holds a digest of all tokens up to its own, so reading a slot shows whether it holds the right
prefix. The next token is a function of the whole prefix. Steps execute in order when they are dispatched; the
driver reads their results later, as the engine does. Drafts are right or wrong by their position; a row alone knows
how many were right, and the scheduler's lengths are bounds until it is told.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from pagedjax.sampling_params import SamplingParams
from pagedjax.scheduling.request import Request
from pagedjax.scheduling.scheduler import ScheduledRequest, Scheduler, SchedulerOutput

VOCABULARY = 5
EOS = 4


def next_token(token_ids):
    """The token that follows a sequence; every token of it matters."""
    value = 1
    for token_id in token_ids:
        value = (value * 31 + token_id + 7) % 1_000_003
    return value % VOCABULARY


def make_request(
    request_id, prompt_token_ids, max_tokens=8, *, priority=0, client=("", ""), cache_salt=None, skip=False, **params
):
    params.setdefault("ignore_eos", True)
    return Request(
        request_id,
        list(prompt_token_ids),
        SamplingParams(max_tokens=max_tokens, **params),
        max_tokens=max_tokens,
        eos_token_ids=frozenset([EOS]),
        arrival_time=0.0,
        seed=0,
        priority=priority,
        client=client,
        cache_salt=cache_salt,
        skip_reading_prefix_cache=skip,
    )


def expected_output(request, max_model_len=10**9):
    """What the request yields when nothing else is in the world."""
    token_ids, params = list(request.prompt_token_ids), request.sampling_params
    output = []
    while len(output) < request.max_tokens and len(token_ids) < max_model_len:
        token_ids.append(next_token(token_ids))
        output.append(token_ids[-1])
        is_end = (token_ids[-1] == EOS and not params.ignore_eos) or token_ids[-1] in params.stop_token_ids
        if is_end and len(output) >= params.min_tokens:
            break
    return output


@dataclass
class Row:
    block_table: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    num_computed: int = 0
    draft_token_ids: list[int] = field(default_factory=list)


class FakeDevice:
    def __init__(self, block_size):
        self.block_size = block_size
        self.rows: dict[int, Row] = {}
        self.slots: dict[tuple[int, int], int] = {}

    def execute(self, output: SchedulerOutput) -> dict[str, list[int]]:
        """All writes of a step, then all reads, as in each layer of a model."""
        assert output.num_tokens == sum(share.num_scheduled_tokens for share in output.scheduled)
        assert len({share.row for share in output.scheduled}) == len(output.scheduled), "two requests in one row"
        written = [slot for share in output.scheduled for slot in self._write(share)]
        assert len(set(written)) == len(written), "two requests write one slot"
        for share in output.scheduled:
            self._read(share)
        return {share.request.request_id: self._sample(share) for share in output.scheduled if share.samples}

    def _write(self, share: ScheduledRequest):
        if share.is_new_row:
            assert share.first_new_block_index == 0
            self.rows[share.row] = Row(token_ids=list(share.request.all_token_ids), num_computed=share.context_len)
        row = self.rows[share.row]
        assert share.first_new_block_index == len(row.block_table), "the block table has a gap"
        row.block_table += share.new_block_ids
        assert 0 not in row.block_table, "the null block was handed out"
        assert row.num_computed <= share.context_len, "the scheduler's bound is below the truth"
        start, row.draft_token_ids = row.num_computed, self._guess(row.token_ids, share.num_draft_tokens)
        end = start + share.num_scheduled_tokens
        is_last = end == len(row.token_ids) + share.num_draft_tokens
        assert share.samples == is_last, "a row samples exactly when its last token is computed"
        assert share.samples or not share.num_draft_tokens, "drafts before the newest token"
        row.num_computed = end
        digests = self._digests(row, end)
        slots = [self._slot(row, position) for position in range(start, end)]
        self.slots.update(zip(slots, digests[start:], strict=True))
        return slots

    def _read(self, share: ScheduledRequest):
        row = self.rows[share.row]
        held = [self.slots[self._slot(row, position)] for position in range(row.num_computed)]
        expected = self._digests(row, row.num_computed)
        assert held == expected, f"{share.request.request_id} attends to somebody else's tokens"

    def _sample(self, share: ScheduledRequest):
        row = self.rows[share.row]
        row.num_computed -= share.num_draft_tokens
        sampled = [next_token(row.token_ids)]
        for draft in row.draft_token_ids:
            if draft != sampled[-1]:
                break
            sampled.append(next_token(row.token_ids + sampled))
        row.num_computed += len(sampled) - 1
        row.token_ids += sampled
        row.draft_token_ids = []
        return sampled

    def _guess(self, token_ids, num_drafts):
        """Right at most positions."""
        guessed = list(token_ids)
        for position in range(len(token_ids), len(token_ids) + num_drafts):
            guessed.append((next_token(guessed) + (position % 7 in (2, 5))) % VOCABULARY)
        return guessed[len(token_ids) :]

    def _slot(self, row: Row, position):
        return row.block_table[position // self.block_size], position % self.block_size

    def _digests(self, row: Row, end):
        digests, digest = [], 0
        for token_id in (row.token_ids + row.draft_token_ids)[:end]:
            digest = hash((digest, token_id))
            digests.append(digest)
        return digests


class Driver:
    """Runs a scheduler on the fake device, one iteration ahead unless told otherwise.

    Every request verifies `num_draft_tokens` in each step that has room for them.
    """

    def __init__(
        self, *, num_blocks=64, block_size=4, max_num_seqs=8, max_num_batched_tokens=64, num_draft_tokens=0, **options
    ):
        options.setdefault("max_model_len", 1000)
        self.scheduler = Scheduler(
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            **options,
        )
        self.device = FakeDevice(block_size)
        self.num_draft_tokens = num_draft_tokens
        self.num_accepted = 0
        self.in_flight: deque[tuple[SchedulerOutput, dict[str, list[int]]]] = deque()

    def add(self, *args, **kwargs) -> Request:
        request = make_request(*args, **kwargs)
        self.scheduler.add_request(request)
        return request

    def dispatch(self) -> SchedulerOutput:
        """Schedule and execute one step without reading it."""
        must_progress = bool(self.scheduler.requests) and not self.in_flight
        for request in self.scheduler.running:
            request.num_draft_tokens = self.num_draft_tokens
        output = self.scheduler.schedule()
        self.scheduler.check_integrity()
        assert output.num_tokens <= self.scheduler.max_num_batched_tokens
        assert output.scheduled or not must_progress, "nothing is in flight and nothing is scheduled: a hang"
        if output.scheduled:
            self.in_flight.append((output, self.device.execute(output)))
        return output

    def read(self, failed=()):
        """Read the oldest step in flight; in `failed` the last token that was sampled makes no sense."""
        output, sampled = self.in_flight.popleft()
        sampled |= {request_id: sampled[request_id][:-1] for request_id in failed if request_id in sampled}
        self.num_accepted += sum(len(token_ids) - 1 for token_ids in sampled.values())
        confirmed = self.scheduler.update(output, sampled, failed)
        self.scheduler.check_integrity()
        return {request.request_id: token_ids for request, token_ids in confirmed}

    def step(self, lookahead=1) -> SchedulerOutput:
        """One iteration of an engine."""
        output = self.dispatch()
        while len(self.in_flight) > (lookahead if output.scheduled else 0):
            self.read()
        return output

    def step_until_preemption(self) -> SchedulerOutput:
        """Iterate to the first plan with a victim; the step before it is in flight."""
        for _ in range(100):
            output = self.dispatch()
            if output.preempted:
                return output
            while len(self.in_flight) > 1:
                self.read()
        raise AssertionError("nothing was preempted in 100 iterations")

    def steps(self, max_iterations=10_000, lookahead=1) -> Iterator[SchedulerOutput]:
        """Iterate until everything is done and given back."""
        for _ in range(max_iterations):
            if not (self.scheduler.has_work() or self.in_flight):
                break
            yield self.step(lookahead)
        assert not self.scheduler.has_work(), f"not done after {max_iterations} iterations"
        assert self.scheduler.pool.num_used == self.scheduler.pinned.num_blocks, "blocks were not given back"

    def run(self, max_iterations=10_000, lookahead=1):
        for _ in self.steps(max_iterations, lookahead):
            pass
