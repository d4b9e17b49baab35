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
from pagedjax.scheduling.beam_group import new_search
from pagedjax.scheduling.beam_search import Candidates
from pagedjax.scheduling.request import Request
from pagedjax.scheduling.scheduler import Scheduler
from pagedjax.scheduling.step_plan import ScheduledRequest, SchedulerOutput
from pagedjax.scheduling.swapping import BlockCopies, CopyIn, CopyOut, CopyProgress

VOCABULARY = 5
EOS = 4


def next_token(token_ids, seed=0):
    """The token that follows a sequence; every token of it matters, and the seed does."""
    value = 1 + seed
    for token_id in token_ids:
        value = (value * 31 + token_id + 7) % 1_000_003
    return value % VOCABULARY


def candidates_after(token_ids):
    """What a beam may go on with, best first; no two have one probability."""
    logprobs = {v: -0.1 - (next_token([*token_ids, v], 11) * 3 + v) / 7 for v in range(VOCABULARY)}
    ranked = sorted(logprobs, key=lambda v: -logprobs[v])
    return Candidates(ranked, [logprobs[v] for v in ranked])


def make_request(
    request_id,
    prompt_token_ids,
    max_tokens=8,
    *,
    priority=0,
    client=("", ""),
    cache_salt=None,
    skip=False,
    seed=0,
    **params,
):
    params.setdefault("ignore_eos", True)
    return Request(
        request_id,
        list(prompt_token_ids),
        SamplingParams(max_tokens=max_tokens, **params),
        max_tokens=max_tokens,
        eos_token_ids=frozenset([EOS]),
        arrival_time=0.0,
        seed=seed,
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
        token_ids.append(next_token(token_ids, request.seed))
        output.append(token_ids[-1])
        is_end = (token_ids[-1] == EOS and not params.ignore_eos) or token_ids[-1] in params.stop_token_ids
        if is_end and len(output) >= params.min_tokens:
            break
    return output


def expected_beams(request, max_model_len=10**9):
    """What a beam search yields when nothing else is in the world, the best hypothesis first."""
    prompt = list(request.prompt_token_ids)
    request.max_num_tokens = min(request.max_num_tokens, max_model_len)
    search = new_search(request)
    while not search.is_over:
        search.advance([candidates_after(prompt + tokens_of(one)) for one in search.running])
    return [tokens_of(one.hypothesis) for one in search.finished]


def tokens_of(hypothesis):
    return [one.token_id for one in hypothesis.tokens()]


@dataclass
class Row:
    block_table: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    num_computed: int = 0
    draft_token_ids: list[int] = field(default_factory=list)


@dataclass
class Chunk:
    """Of host memory: what a copy wrote to it, the digests of each block."""

    copy: CopyOut
    blocks: list[list[int]]
    is_spoilt: bool = False


class FakeDevice:
    def __init__(self, block_size):
        self.block_size = block_size
        self.rows: dict[int, Row] = {}
        self.slots: dict[tuple[int, int], int] = {}
        self.chunks: dict[int, Chunk] = {}
        self.arriving: dict[CopyIn, Chunk] = {}  # what a chunk held when its copy was started

    def copy(self, copies: BlockCopies) -> None:
        """What an iteration copies before its step; a copy in reaches the pool when the scheduler says so."""
        for copy in copies.landed:
            for block_id, digests in zip(copy.block_ids, self.arriving.pop(copy).blocks, strict=False):
                if block_id is not None:
                    self.slots.update({(block_id, offset): digest for offset, digest in enumerate(digests)})
        for copy in copies.out:
            blocks = [[self.slots[block_id, i] for i in range(self.block_size)] for block_id in copy.block_ids]
            self.chunks[copy.chunk] = Chunk(copy, blocks)
        for copy in copies.started:
            self.arriving[copy] = self.chunks[copy.chunk]

    def spoil(self, copy: CopyIn | CopyOut) -> None:
        """Have a copy fail: what it should have written is garbage."""
        if isinstance(copy, CopyIn):
            self.arriving.pop(copy)
        for chunk in [*self.chunks.values(), *self.arriving.values()]:
            if chunk.copy is copy:
                chunk.blocks, chunk.is_spoilt = [[-1] * self.block_size for _ in copy.block_ids], True

    def is_spoilt(self, copy: CopyIn | CopyOut) -> bool:
        """Whether a copy reads what an earlier one failed to write."""
        return copy in self.arriving and self.arriving[copy].is_spoilt

    def execute(self, output: SchedulerOutput) -> dict[str, list[int] | Candidates]:
        """All copies, then all writes of a step, then all reads, as in each layer of a model."""
        self.copy(output.copies)
        self._copy(output.forked_blocks)
        assert output.num_tokens == sum(share.num_scheduled_tokens for share in output.scheduled)
        assert len({share.row for share in output.scheduled}) == len(output.scheduled), "two requests in one row"
        written = [slot for share in output.scheduled for slot in self._write(share)]
        assert len(set(written)) == len(written), "two requests write one slot"
        for share in output.scheduled:
            self._read(share)
        return {share.request.request_id: self._sample(share) for share in output.scheduled if share.samples}

    def _copy(self, pairs):
        """All of them at once."""
        assert len({target for _, target in pairs}) == len(pairs), "two copies into one block"
        offsets = range(self.block_size)
        held = {(t, i): self.slots[s, i] for s, t in pairs for i in offsets if (s, i) in self.slots}
        self.slots.update(held)

    def _write(self, share: ScheduledRequest):
        if share.is_new_row:
            assert share.first_new_block_index == 0
            self.rows[share.row] = Row(token_ids=list(share.request.all_token_ids), num_computed=share.context_len)
        row, first = self.rows[share.row], share.first_new_block_index
        assert first <= len(row.block_table), "the block table has a gap"
        row.block_table[first : first + len(share.new_block_ids)] = share.new_block_ids
        held = len(share.request.block_ids)  # what comes behind was given to others
        assert row.block_table[:held] == share.request.block_ids, "the device's block table is not the request's"
        assert 0 not in row.block_table, "the null block was handed out"
        assert row.num_computed <= share.context_len, "the scheduler's bound is below the truth"
        start, row.draft_token_ids = (
            row.num_computed,
            self._guess(row.token_ids, share.num_draft_tokens, share.request.seed),
        )
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
        if share.request.is_beam:
            return candidates_after(row.token_ids)
        seed = share.request.seed
        sampled = [next_token(row.token_ids, seed)]
        for draft in row.draft_token_ids:
            if draft != sampled[-1]:
                break
            sampled.append(next_token(row.token_ids + sampled, seed))
        row.num_computed += len(sampled) - 1
        row.token_ids += sampled
        row.draft_token_ids = []
        return sampled

    def _guess(self, token_ids, num_drafts, seed):
        """Right at most positions."""
        guessed = list(token_ids)
        for position in range(len(token_ids), len(token_ids) + num_drafts):
            guessed.append((next_token(guessed, seed) + (position % 7 in (2, 5))) % VOCABULARY)
        return guessed[len(token_ids) :]

    def _slot(self, row: Row, position):
        return row.block_table[position // self.block_size], position % self.block_size

    def _digests(self, row: Row, end):
        digests, digest = [], 0
        for token_id in (row.token_ids + row.draft_token_ids)[:end]:
            digest = hash((digest, token_id))
            digests.append(digest)
        return digests


def confirm(scheduler, output, sampled, failed=(), candidates=None):
    """Confirm a step at once, and return the new tokens of each request that was alive."""
    confirmed = {}
    for request, token_ids in scheduler.confirm(output, sampled, failed, candidates):
        confirmed.setdefault(request.request_id, (request, []))[1].extend(token_ids)
    return list(confirmed.values())


class Driver:
    """Runs a scheduler on the fake device, one iteration ahead unless told otherwise.

    Every request verifies `num_draft_tokens` in each step that has room for them. Copies take `copy_iterations` steps;
    at most `max_copies` are under way. `fail_copies` makes the next ones fail.
    """

    def __init__(
        self, *, num_blocks=64, block_size=4, max_num_seqs=8, max_num_batched_tokens=64, num_draft_tokens=0,
        max_copies=4, copy_iterations=1, **options,
    ):  # fmt: skip
        self.max_copies, self.copy_iterations, self.fail_copies = max_copies, copy_iterations, 0
        self.copies: deque[tuple[int, CopyIn | CopyOut]] = deque()  # under way, with the iteration that ends them
        self.iteration = 0
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
        self.evicted: set[int] = set()  # by the last plan
        evict = self.scheduler.prefix_cache.evict

        def evict_noted(block_ids):
            self.evicted.update(block_ids)
            evict(block_ids)

        self.scheduler.prefix_cache.evict = evict_noted
        self.in_flight: deque[tuple[SchedulerOutput, dict[str, list[int] | Candidates]]] = deque()

    def add(self, *args, **kwargs) -> Request:
        request = make_request(*args, **kwargs)
        self.scheduler.add_request(request)
        return request

    def add_group(self, request_id, prompt_token_ids, max_tokens=8, *, n, **kwargs) -> list[Request]:
        """Add n requests with one prompt and seeds of their own."""
        group = [make_request(f"{request_id}-{i}", prompt_token_ids, max_tokens, seed=i, **kwargs) for i in range(n)]
        self.scheduler.add_request(group[0], group[1:])
        return group

    def add_beams(self, request_id, prompt_token_ids, max_tokens=8, *, width, **kwargs) -> list[Request]:
        """Add a beam search, all of whose hypotheses are returned."""
        group = [
            make_request(f"{request_id}-{i}", prompt_token_ids, max_tokens, n=width, use_beam_search=True, **kwargs)
            for i in range(width)
        ]
        self.scheduler.add_request(group[0], group[1:])
        return group

    def dispatch(self) -> SchedulerOutput:
        """Schedule and execute one step without reading it."""
        must_progress = bool(self.scheduler.requests) and not self.in_flight
        for request in self.scheduler.running:
            request.num_draft_tokens = self.num_draft_tokens
        cached = set(self.scheduler.prefix_cache.block_ids())
        self.evicted.clear()
        output = self.scheduler.schedule(float(self.iteration), self.progress())
        self.scheduler.check_integrity()
        assert output.num_tokens <= self.scheduler.max_num_batched_tokens
        self.start(output.copies)
        is_active = output.scheduled or self.copies or output.timed_out
        assert is_active or not must_progress, "nothing is in flight and nothing is scheduled: a hang"
        self._check_nobody_else_reads_what_is_written(output, cached - self.evicted)
        if output.scheduled:
            self.in_flight.append((output, self.device.execute(output)))
        else:
            self.device.copy(output.copies)
        return output

    def _check_nobody_else_reads_what_is_written(self, output, cached):
        """Neither another request nor, later, who finds the block in the prefix cache.

        Full blocks that this very plan offered are another matter: those who share them read after they are written.
        """
        block_size, num_refs = self.device.block_size, self.scheduler.pool.num_refs()
        for share in output.scheduled:
            end = share.context_len + share.num_scheduled_tokens
            for index in range(share.context_len // block_size, -(-end // block_size)):
                block_id = share.request.block_ids[index]
                is_new = block_id in self.scheduler.prefix_cache and block_id not in cached
                assert num_refs[block_id] == 1 or is_new, "a shared block is written"
                assert block_id not in cached, "a cached block is written"

    def start(self, copies: BlockCopies) -> None:
        """Take note of the copies that an iteration starts; the device carries them out."""
        end = self.iteration + self.copy_iterations
        self.copies += [(end, copy) for copy in [*copies.out, *copies.started]]
        assert len(self.copies) <= self.max_copies, "more copies than may be started"

    def progress(self) -> CopyProgress:
        """What became of the copies under way."""
        self.iteration += 1
        progress = CopyProgress()
        while self.copies and self.copies[0][0] <= self.iteration:
            copy = self.copies.popleft()[1]
            if self.fail_copies or self.device.is_spoilt(copy):
                self.fail_copies = max(0, self.fail_copies - 1)
                self.device.spoil(copy)
                progress.failed.append(copy)
            elif isinstance(copy, CopyIn):
                progress.landed.append(copy)
        progress.num_startable = self.max_copies - len(self.copies)
        return progress

    def read(self, failed=()):
        """Read the oldest step in flight; in `failed` the last token that was sampled makes no sense."""
        output, sampled = self.in_flight.popleft()
        sampled |= {one: sampled[one][:-1] for one in failed if isinstance(sampled.get(one), list)}
        self.num_accepted += sum(len(token_ids) - 1 for token_ids in sampled.values() if isinstance(token_ids, list))
        confirmed = confirm(self.scheduler, output, sampled, failed, candidates=sampled)
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
        assert self.scheduler.swapping.host_pool.num_held == 0, "host memory was not given back"

    def run(self, max_iterations=10_000, lookahead=1):
        for _ in self.steps(max_iterations, lookahead):
            pass
