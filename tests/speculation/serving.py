"""A simulated engine with prompts: a real scheduler and a real plan of speculation over made-up times and tokens."""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from pagedjax.scheduling.scheduler import Scheduler
from pagedjax.speculation.config import SpeculativeConfig
from pagedjax.speculation.plan import Speculation
from pagedjax.speculation.speculator import VerifiedDrafts
from tests.scheduling.fake_device import make_request

NUM_DRAFTS = 3  # a draft model makes as many, however few are verified
NOISE = 0.03  # of a step's time


@dataclass(frozen=True)
class Costs:
    """Milliseconds: of the target by tokens of a step, of one token of so many requests from a draft model, of reading.

    The last is that of a draft model for so many tokens at once.
    """

    step: Callable[[int], float]
    draft: Callable[[int], float]
    read: Callable[[int], float]


class Draft:
    """What a draft model has read of each request; of one that had drafts in the latest step it has all."""

    def __init__(self):
        self.num_read: dict[str, int] = {}
        self.followed: set[str] = set()

    def num_missing(self, request):
        if request.request_id in self.followed:
            return 0
        return request.num_tokens - self.num_read.get(request.request_id, 0)

    def read(self, scheduled) -> int:
        """Carry out what a step reads; return how many tokens."""
        total = 0
        for item in scheduled:
            name = item.request.request_id
            missing = self.num_missing(item.request)
            if not item.num_draft_tokens:
                self.followed.discard(name)
                missing = min(missing, item.request.num_draft_reads)
            total += missing
            if missing or item.num_draft_tokens:
                self.num_read[name] = item.request.num_tokens - self.num_missing(item.request) + missing
            if item.num_draft_tokens:
                self.followed.add(name)
        return total


@dataclass
class Served:
    """What a run came to."""

    milliseconds: float = 0.0
    num_tokens: int = 0
    delays: list[float] = field(default_factory=list)  # milliseconds to the first token, request by request
    num_drafts: list[int] = field(default_factory=list)  # step by step
    has_prompts: list[bool] = field(default_factory=list)
    num_reads: list[int] = field(default_factory=list)  # tokens that the draft model read

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.milliseconds * 1000


class Server:
    """Keeps what speculation has learnt from run to run."""

    def __init__(self, costs: Costs, rate: float | None, *, max_num_seqs=64, max_num_batched_tokens=256):
        self.costs, self.rate = costs, rate  # rate: chance of each draft; None is without speculation
        self.limits = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_batched_tokens}
        self.draft = Draft()
        self.speculation = None
        if rate is not None:
            config = SpeculativeConfig(method="draft_model", model="draft", num_speculative_tokens=NUM_DRAFTS)
            self.speculation = Speculation(config, self.draft.num_missing, max_num_read=max_num_batched_tokens)
        self.rng = np.random.default_rng(0)
        self.num_runs = 0

    def serve(self, arrivals: Iterable[float], *, prompt_len=32, output_len=200) -> Served:
        """Serve requests, each of which arrives after the milliseconds beside it."""
        self.num_runs += 1
        scheduler = Scheduler(
            num_blocks=20_000, block_size=16, max_model_len=8192, enable_prefix_caching=False, **self.limits
        )
        waiting, in_flight, run, arrived = deque(sorted(arrivals)), deque(), Served(), {}
        while waiting or scheduler.has_work() or in_flight:
            if not (scheduler.has_work() or in_flight):
                run.milliseconds = max(run.milliseconds, waiting[0])
            while waiting and waiting[0] <= run.milliseconds:
                name = f"{self.num_runs}-{len(arrived)}"
                arrived[name] = waiting.popleft()
                scheduler.add_request(make_request(name, [1] * prompt_len, output_len, ignore_eos=True))
            if self.speculation is not None:
                self.speculation.plan(scheduler.running, has_prompts=scheduler.expects_prompts)
            output = scheduler.schedule()
            if output.scheduled:
                in_flight.append((output, *self._execute(output, run)))
            while len(in_flight) > bool(output.scheduled):
                self._read(*in_flight.popleft(), scheduler, run, arrived)
        return run

    def _execute(self, output, run):
        num_rows = sum(item.num_draft_tokens > 0 for item in output.scheduled)
        num_read = self.draft.read(output.scheduled)
        milliseconds = self.costs.step(output.num_tokens)
        milliseconds += self.costs.read(num_read) if num_read else 0.0
        milliseconds += NUM_DRAFTS * self.costs.draft(num_rows) if num_rows else 0.0
        accepted = {item.request.request_id: self._num_accepted(item) for item in output.scheduled}
        if self.speculation is not None:
            self.speculation.note_dispatch(output)
        run.num_drafts.append(output.num_draft_tokens)
        run.num_reads.append(num_read)
        run.has_prompts.append(any(item.num_scheduled_tokens > 1 + item.num_draft_tokens for item in output.scheduled))
        return accepted, milliseconds

    def _num_accepted(self, item):
        if not item.num_draft_tokens:
            return 0
        return int(np.cumprod(self.rng.random(item.num_draft_tokens) < self.rate).sum())

    def _read(self, output, accepted, milliseconds, scheduler, run, arrived):
        run.milliseconds += milliseconds
        verified = [
            VerifiedDrafts(item.request.request_id, (1,) * item.num_draft_tokens, accepted[item.request.request_id])
            for item in output.scheduled
            if item.num_draft_tokens
        ]
        if self.speculation is not None:
            seconds = milliseconds * self.rng.lognormal(0, NOISE) / 1000
            self.speculation.note_result(output, verified, seconds)
        sampled = {name: [1] * (1 + num) for name, num in accepted.items()}
        for request, token_ids in scheduler.confirm(output, sampled):
            run.num_tokens += len(token_ids)
            if len(request.output_token_ids) == 1:
                run.delays.append(run.milliseconds - arrived[request.request_id])
            if request.is_finished and self.speculation is not None:
                self.speculation.forget(request)
