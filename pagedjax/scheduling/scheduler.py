"""Decides, once an iteration, which requests compute how many tokens and in which blocks they store K and V.

One rule, no phases: `num_computed_tokens` chases `num_tokens_bound` under a token budget, running requests first,
then waiting ones. Prompts in chunks, prefix hits, resumed requests and decoding all follow from it. Owns the queues,
the rows and, through the pool, the blocks; knows nothing of text and arrays, and of time what the pacing is told.

The host may run ahead: schedule() for step N+1 comes before update() for step N. This is safe because the device
executes steps in order: a block or row that changes hands is written by its new owner in a later step than any that
still names the old one.
"""

import heapq
from bisect import bisect_left, insort
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from operator import attrgetter
from typing import Literal

from pagedjax.errors import InvalidRequestError
from pagedjax.scheduling.block_pool import BlockPool
from pagedjax.scheduling.deadlines import Deadlines
from pagedjax.scheduling.fair_share import FairShare
from pagedjax.scheduling.host_pool import HostPool
from pagedjax.scheduling.pacing import Pacing
from pagedjax.scheduling.pinned_prefixes import PinnedPrefixes
from pagedjax.scheduling.preemption import PreemptionCosts
from pagedjax.scheduling.prefix_cache import PrefixCache
from pagedjax.scheduling.request import LAST_UNFINISHED, Request, RequestStatus
from pagedjax.scheduling.swapping import BlockCopies, CopyProgress, Swapping

MAX_PREEMPTIONS = 3  # of one request; a lower limit reserves blocks early and costs throughput where the watermark is 0

_by_order = attrgetter("order")


@dataclass(slots=True)
class ScheduledRequest:
    """One request's share of a step: it computes tokens [context_len, context_len + num_scheduled_tokens)."""

    request: Request
    row: int
    num_scheduled_tokens: int
    context_len: int
    new_block_ids: Sequence[int]  # go into the block table from first_new_block_index on
    first_new_block_index: int
    is_new_row: bool  # the row still holds another request's state; new_block_ids is then the whole block table
    samples: bool  # the step reaches the last token there is, so it yields the next one


@dataclass(slots=True)
class SchedulerOutput:
    """What one step computes, and the copies between device and host that come before it."""

    scheduled: list[ScheduledRequest] = field(default_factory=list)
    num_tokens: int = 0
    copies: BlockCopies = field(default_factory=BlockCopies)
    preempted: list[Request] = field(default_factory=list)
    timed_out: list[Request] = field(default_factory=list)
    finished_requests: list[Request] = field(default_factory=list)  # their blocks and rows were freed just now


class Scheduler:
    """Queues of unfinished requests, each sorted by `Request.order`, over one pool of blocks.

    Under "fcfs" the order is that of arrival, between clients that of their fair shares; under "priority" the lowest
    priority value comes before both. The best request
    is served and admitted first and the worst is preempted first. Under "priority" a waiting request may also preempt
    running ones of a lower priority.

        WAITING -> RUNNING, SWAPPING_IN                admitted; the second if the host has blocks of it, which are
        PREEMPTED -> RUNNING, SWAPPING_IN              copied to the blocks and beside the row that it has by then
        SWAPPED -> RUNNING, SWAPPING_IN, PREEMPTED     the last: the prefix cache was reset
        SWAPPING_IN -> RUNNING, SWAPPED, PREEMPTED     all has landed or failed; preempted; and with a reset
        RUNNING -> PREEMPTED, SWAPPING_OUT, SWAPPED    preempted, to compute again or swapped out (`swapping`)
        SWAPPING_OUT -> SWAPPED                        its last block has left, or was given up for who needed it
        FINISHED_*                                     from every state

    A request waits in the queue with blocks while it is SWAPPING_OUT, and without any while it is WAITING, PREEMPTED or
    SWAPPED.

    An overloaded pool ends in a queue: admission leaves `watermark` of the blocks to those that run, and a request that
    was preempted `max_preemptions` times is admitted with all blocks it can ever need, and left alone.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        enable_prefix_caching: bool = True,
        policy: Literal["fcfs", "priority"] = "fcfs",
        max_query_len: int | None = None,
        max_preemptions: int = MAX_PREEMPTIONS,
        watermark: float = 0.0,
        pacing: Pacing | None = None,
        num_host_chunks: int = 0,
        chunk_size: int = 1,
        preemption_costs: PreemptionCosts | None = None,
    ) -> None:
        self.block_size = block_size
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.max_query_len = max_query_len or max_num_batched_tokens
        self.policy = policy
        self.max_preemptions = max_preemptions
        self.pacing = pacing or Pacing()
        self.prefix_cache = PrefixCache(block_size, enabled=enable_prefix_caching)
        self.pool = BlockPool(num_blocks, self.prefix_cache)
        host_pool = HostPool(num_host_chunks, chunk_size)
        self.swapping = Swapping(
            self.pool, host_pool, preemption_costs or PreemptionCosts(),
            num_ahead=max_num_batched_tokens // block_size + max_num_seqs,
        )  # fmt: skip
        self.pinned = PinnedPrefixes(self.pool, num_reserved=self._num_blocks(max_model_len))
        is_ample = self.pool.capacity >= max_num_seqs * self._num_blocks(max_model_len)  # nobody ever runs short
        self.num_watermark_blocks = 0 if is_ample else int(watermark * self.pool.capacity)
        self.requests: dict[str, Request] = {}  # unfinished
        self.running: list[Request] = []
        self.waiting: list[Request] = []  # new and preempted
        self.num_preemptions = 0
        self._prompt_budget = 0  # of the iteration under way: tokens in chunks of more than one
        self._finished: list[Request] = []  # not reaped yet
        self._fair_share = FairShare()
        self._deadlines = Deadlines()
        self._free_rows = list(range(max_num_seqs))  # a heap: the smallest first keeps the batch dense
        self._serial = count()

    def add_request(self, request: Request) -> None:
        """Queue a request.

        Raises:
          InvalidRequestError: it could never run, or an unfinished request has the same id.
        """
        self._check(request)
        request.max_num_tokens = min(request.max_num_tokens, self.max_model_len)
        if not self.requests:
            self._fair_share = FairShare()
        stamp = self._fair_share.stamp(request.client, request.max_num_tokens)
        rank = (request.priority,) if self.policy == "priority" else ()
        request.order = (*rank, stamp, next(self._serial))
        self.requests[request.request_id] = request
        self._deadlines.add(request)
        insort(self.waiting, request, key=_by_order)

    def schedule(self, now: float = 0.0, progress: CopyProgress | None = None) -> SchedulerOutput:
        """Plan the next step. An empty plan: everything waits for tokens or copies under way, or there is no work.

        Finished requests give back their blocks and row here and nowhere else. `now` is on the arrival times' clock,
        `progress` what became of the copies of earlier plans.
        """
        timed_out = self._deadlines.expired(now)
        for request in timed_out:
            self.finish(request, RequestStatus.FINISHED_TIMEOUT)
        output = SchedulerOutput(finished_requests=self._reap(), timed_out=timed_out)
        output.copies = self.swapping.begin(progress or CopyProgress())
        max_prompt_tokens = self.pacing.max_prompt_tokens(self.running)
        self._prompt_budget = self.max_num_batched_tokens if max_prompt_tokens is None else max_prompt_tokens
        is_open = self.pacing.admits(self.waiting, now, is_idle=not self.running)
        if self.policy == "priority" and is_open:
            self._make_room(output.preempted)
        self._serve(list(self.running), output, num_behind=len(self.running))
        if is_open and output.num_tokens < self.max_num_batched_tokens:
            self._serve(self._admissions(output), output)
        self.swapping.end()
        return output

    def update(
        self, output: SchedulerOutput, sampled: Mapping[str, list[int]], failed: Collection[str] = ()
    ) -> list[tuple[Request, list[int]]]:
        """Confirm what a step sampled, in order of dispatch; return the new tokens of each request that was alive.

        Tokens of requests that have finished meanwhile are dropped. A failed request ends in FINISHED_ERROR, without
        new tokens, and none of its blocks, save pinned ones, will be found by the prefix cache.
        """
        confirmed, last_unfinished = [], LAST_UNFINISHED  # a local name: this loop runs for every token
        for share in output.scheduled:
            request = share.request
            if request.status > last_unfinished:
                continue
            if failed and request.request_id in failed:
                suspects = request.block_ids + self.prefix_cache.blocks_of(request)  # preempted, it has none itself
                self.prefix_cache.forget(self.pinned.others(suspects))
                self.swapping.host_pool.forget(request.block_hashes)
                self.finish(request, RequestStatus.FINISHED_ERROR)
                confirmed.append((request, []))
            elif share.samples:
                token_ids, num_outputs = sampled[request.request_id], len(request.output_token_ids)
                for token_id in token_ids:
                    status = request.append(token_id)
                    if status is not None:
                        self.finish(request, status, request.stop_reason_of(status, token_id))
                        token_ids = request.output_token_ids[num_outputs:]
                        break
                confirmed.append((request, token_ids))
        return confirmed

    def finish(self, request: Request, status: RequestStatus, stop_reason: int | str | None = None) -> None:
        """End a request; the first status stays. Its blocks can be found from now on, and are freed by schedule()."""
        if request.is_finished:
            return
        if status != RequestStatus.FINISHED_ERROR:
            self.prefix_cache.register(request)
        request.status, request.stop_reason = status, stop_reason
        del self.requests[request.request_id]
        self._finished.append(request)
        self._fair_share.give_back(request.client, request.max_num_tokens - request.num_tokens)

    def note_step(self, *, num_requests: int, num_tokens: int, seconds: float) -> None:
        """Take note of a step that sampled: its requests, its tokens and how long the device took."""
        self.pacing.note_step(num_requests=num_requests, num_tokens=num_tokens, seconds=seconds)
        self.swapping.costs.note_step(num_requests=num_requests, num_tokens=num_tokens, seconds=seconds)

    def abort(self, request_id: str) -> Request | None:
        """End a request on its owner's behalf; return it, or None if there is no such unfinished request."""
        request = self.requests.get(request_id)
        if request is not None:
            self.finish(request, RequestStatus.FINISHED_ABORTED)
        return request

    def has_work(self) -> bool:
        """Return whether a request is unfinished, or finished and still holds blocks."""
        return bool(self.requests or self._finished)

    @property
    def num_running(self) -> int:
        return sum(not request.is_finished for request in self.running)

    @property
    def num_swapped(self) -> int:
        return sum(request.is_swapped and not request.is_finished for request in self.waiting)

    @property
    def num_waiting(self) -> int:
        return len(self.requests) - self.num_running - self.num_swapped

    def stats(self) -> dict[str, float]:
        """Return gauges and counters under their metric names; prefix cache counts are tokens, evictions blocks."""
        cache = self.prefix_cache.stats
        return {
            "num_requests_running": self.num_running,
            "num_requests_waiting": self.num_waiting,
            "num_requests_swapped": self.num_swapped,
            "kv_cache_usage_perc": self.pool.num_used / self.pool.capacity,
            "num_blocks_used": self.pool.num_used,
            "num_blocks_cached": len(self.prefix_cache),
            "num_blocks_pinned": self.pinned.num_blocks,
            "num_preemptions": self.num_preemptions,
            "prefix_cache_queries": cache.queries,
            "prefix_cache_hits": cache.hits,
            "prefix_cache_partial_block_misses": cache.partial_block_misses,
            "prefix_cache_resumed_queries": cache.resumed_queries,
            "prefix_cache_resumed_hits": cache.resumed_hits,
            "prefix_cache_evictions": cache.evictions,
            **self.swapping.stats(),
        }

    def reset_prefix_cache(self, *, reset_running_requests: bool = False) -> bool:
        """Forget all cached prefixes; refuse and return False while blocks that hold them are in use or pinned.

        Args:
          reset_running_requests: preempt what runs: it will compute all its tokens again.
        """
        if self.pinned.num_blocks or (self.num_running and not reset_running_requests):
            return False
        for request in [request for request in self.running if not request.is_finished]:
            self._preempt(request, may_swap=False)
        self.swapping.clear([request for request in self.waiting if request.is_swapped])
        self.prefix_cache.clear()
        return True

    def check_integrity(self) -> None:
        """Raise AssertionError, with a sentence, if queues, rows, blocks and hashes contradict each other."""
        everybody = [*self.running, *self.waiting]
        self.pool.check_integrity([*(request.block_ids for request in everybody), *self.pinned.block_tables()])
        self.swapping.check_integrity(everybody)
        self.pinned.check_integrity()
        rows = [request.row for request in self.running]
        assert len({*rows, *self._free_rows}) == len(rows) + len(self._free_rows), "a row has two owners"
        for request in self.waiting:
            is_leaving = request.is_swapping_out or request.is_finished
            assert request.row is None, "a waiting request holds a row"
            assert is_leaving or not request.block_ids, "a waiting request holds blocks"
        for queue in (self.running, self.waiting):
            assert queue == sorted(queue, key=_by_order), "a queue is out of order"
        for request in self.running:
            assert request.num_computed_tokens <= len(request.block_ids) * self.block_size, (
                "computed tokens without a block"
            )
            assert request.num_computed_tokens <= request.num_tokens_bound <= request.max_num_tokens, (
                "more tokens than there can be"
            )
        queued = {request.request_id: request for request in [*self.running, *self.waiting] if not request.is_finished}
        assert queued == self.requests, "unfinished requests and the queues differ"

    def _check(self, request: Request) -> None:
        num_prompt_tokens, request_id = request.num_prompt_tokens, request.request_id
        if request_id in self.requests:
            raise InvalidRequestError(
                f"request_id {request_id!r:.80} belongs to an unfinished request; choose another or abort it first",
                param="request_id",
            )
        if not 0 < num_prompt_tokens < self.max_model_len:
            raise InvalidRequestError(
                f"prompt has {num_prompt_tokens} tokens, max_model_len is {self.max_model_len} with at least one token "
                "of output; send 1 token or more, or raise --max-model-len",
                param="prompt",
            )
        num_tokens = min(request.max_num_tokens, self.max_model_len)
        if self._num_blocks(num_tokens) > self.pool.capacity:
            raise InvalidRequestError(
                f"prompt and output may reach {num_tokens} tokens, the KV cache holds "
                f"{self.pool.capacity * self.block_size}; shorten the prompt, lower max_tokens or enlarge the cache",
                param="max_tokens",
            )

    def _reap(self) -> list[Request]:
        finished, self._finished = self._finished, []
        for request in finished:
            queue = self.waiting if request.row is None else self.running
            del queue[bisect_left(queue, request.order, key=_by_order)]
            self._release(request)
        return finished

    def _serve(self, requests: Iterable[Request], output: SchedulerOutput, *, num_behind: int = 0) -> None:
        """Plan the next tokens of requests in their order until the budget is spent: the one scheduling rule.

        A chunk leaves a token of the budget to each of the `num_behind` requests that it might starve.
        """
        block_size = self.block_size
        scheduled, budget = output.scheduled, self.max_num_batched_tokens - output.num_tokens
        for request in requests:
            num_behind -= 1
            if request.row is None or request.status is RequestStatus.SWAPPING_IN:
                continue  # preempted just now for a better one, or without its content yet
            context_len, bound = request.num_computed_tokens, request.num_tokens_bound
            if bound >= request.max_num_tokens:
                continue  # what is in flight completes it
            num_new = bound - context_len
            if num_new > 1:
                num_new = min(num_new, self.max_query_len, self._prompt_budget, budget, max(budget - num_behind, 1))
                if not num_new:
                    continue
                self._prompt_budget -= num_new
            seq_len, num_blocks, new_block_ids = context_len + num_new, len(request.block_ids), ()
            if seq_len > num_blocks * block_size:
                new_block_ids = self._grow(request, seq_len, output.preempted)
            row = request.row
            if row is None:
                continue  # preempted itself: nobody worse can be
            request.num_computed_tokens = seq_len
            samples = seq_len == bound
            if samples:
                request.num_tokens_bound = bound + 1
            if num_new > 1:
                self.prefix_cache.register(request)  # requests admitted to this very step may share it
            is_new_row = request.is_new_row
            if is_new_row:
                request.is_new_row = False
                num_blocks, new_block_ids = 0, list(request.block_ids)
            scheduled.append(
                ScheduledRequest(request, row, num_new, context_len, new_block_ids, num_blocks, is_new_row, samples)
            )
            budget -= num_new
            if budget == 0:
                break
        output.num_tokens = self.max_num_batched_tokens - budget

    def _grow(self, request: Request, seq_len: int, preempted: list[Request]) -> Sequence[int]:
        """Allocate blocks for `seq_len` tokens, preempting the worst that can be, at last `request` itself."""
        self.prefix_cache.register(request)  # generated tokens have filled a block
        num_needed = self._num_blocks(seq_len) - len(request.block_ids)
        while num_needed > self.pool.num_free:
            if self.swapping.cut_short():
                continue
            victim = next(other for other in reversed(self.running) if not self._is_settled(other))
            self._preempt(victim)
            preempted.append(victim)
            if victim is request:
                return ()
        new_block_ids = self._allocate(num_needed)
        request.block_ids += new_block_ids
        return new_block_ids

    def _is_settled(self, request: Request) -> bool:
        """Whether a request was preempted often enough: it has all blocks it can ever need and is left alone."""
        return request.num_preemptions >= self.max_preemptions

    def _make_room(self, preempted: list[Request]) -> None:
        """Preempt requests of lower priority, the worst first, if that lets the head of the queue be admitted."""
        if not self.waiting or self.waiting[0].num_in_flight or self.waiting[0].is_swapping_out:
            return
        head = self.waiting[0]
        victims = [r for r in self.running if r.priority > head.priority and not self._is_settled(r)]
        if not victims or self._fits_without(head, []) or not self._fits_without(head, victims):
            return
        while not self._fits_without(head, []):
            victim = victims.pop()
            self._preempt(victim)
            preempted.append(victim)

    def _fits_without(self, request: Request, victims: Sequence[Request]) -> bool:
        """Return whether a waiting request could be admitted if these running ones were preempted."""
        if not (self._free_rows or victims):
            return False
        cached = self.prefix_cache.match(request)
        num_freed = len(self.pool.freed_by(victim.block_ids for victim in victims).difference(cached))
        others = [other for other in self.running if other not in victims]
        num_promised = sum(self._num_missing_blocks(r) for r in others if r.num_computed_tokens < r.num_tokens)
        num_leaving = len(self.pool.freed_by(self.swapping.leaving_blocks).difference(cached))
        num_available = self.pool.num_free + num_freed + num_leaving - num_promised - self._num_spare(others)
        return self._num_taken(request, cached) <= num_available

    def _preempt(self, victim: Request, *, may_swap: bool = True) -> None:
        """Send a request back to waiting: it goes to the host, or computes again what the prefix cache loses."""
        del self.running[bisect_left(self.running, victim.order, key=_by_order)]
        if may_swap and self.swapping.swap_out(victim):
            self._release_row(victim)
        else:
            self._release(victim)
            victim.status = RequestStatus.PREEMPTED
        victim.num_computed_tokens = 0
        victim.num_preemptions += 1
        self.num_preemptions += 1
        insort(self.waiting, victim, key=_by_order)

    def _admissions(self, output: SchedulerOutput) -> Iterator[Request]:
        """Admit waiting requests in order while rows and blocks last; nobody overtakes the head."""
        unfinished = [share.request for share in output.scheduled if not share.samples]
        unfinished += [request for request in self.running if request.status is RequestStatus.SWAPPING_IN]
        num_promised = sum(self._num_missing_blocks(request) for request in unfinished)
        while self.waiting and self._prompt_budget and self._admit(self.waiting[0], num_promised):
            request = self.waiting.pop(0)
            yield request
            num_promised += self._num_missing_blocks(request)

    def _admit(self, request: Request, num_promised: int) -> bool:
        """Give a request a row and what the prefix cache has of it; False if its tokens and one more do not fit.

        Only the blocks of its first chunk are taken soon. The others are promised: no later admission counts on them.
        """
        if not self._free_rows or request.num_in_flight or request.is_swapping_out:
            return False  # with its row a preempted request lost its token in flight: it goes on once that was read
        cached = self.prefix_cache.match(request)
        if self._num_taken(request, cached) > self.pool.num_free - num_promised - self._num_spare(self.running):
            return False
        if self.swapping.is_awaited(request, len(cached)):
            return False
        self.pool.retain(cached)  # before anything is allocated, which could evict them
        num_cached_tokens = len(cached) * self.block_size
        self.prefix_cache.record(request, num_cached_tokens)
        num_on_host = self.swapping.hold(request, len(cached))
        if request.num_preemptions == 0:
            request.num_cached_tokens = num_cached_tokens + num_on_host * self.block_size
        request.num_computed_tokens = request.num_registered_tokens = num_cached_tokens
        num_needed = num_on_host
        if self._is_settled(request):
            num_needed = self._num_blocks(request.max_num_tokens) - len(cached)
        request.block_ids = cached + self._allocate(num_needed)
        request.row, request.is_new_row = heapq.heappop(self._free_rows), True
        request.status = RequestStatus.SWAPPING_IN if num_on_host else RequestStatus.RUNNING
        self.swapping.swap_in(request)
        self._fair_share.note_started(request.order[-2])
        insort(self.running, request, key=_by_order)
        return True

    def _num_spare(self, running: Sequence[Request]) -> int:
        """Blocks that an admission leaves to those that run: they will grow, and would throw it out again."""
        return self.num_watermark_blocks if running else 0

    def _num_taken(self, request: Request, cached: Sequence[int]) -> int:
        """Free blocks that an admission takes or is promised, revived ones included."""
        num_tokens = request.max_num_tokens if self._is_settled(request) else request.num_tokens + 1
        return self._num_blocks(num_tokens) - len(cached) + self.pool.num_idle(cached)

    def _release(self, request: Request) -> None:
        self.swapping.drop(request)
        self.pool.release(request.block_ids)
        request.block_ids = []
        if request.row is not None:
            self._release_row(request)

    def _release_row(self, request: Request) -> None:
        assert request.row is not None, "only a running request has a row"
        heapq.heappush(self._free_rows, request.row)
        request.row = None

    def _allocate(self, num_blocks: int) -> list[int]:
        """Take free blocks; prefixes that they hold go to the host, if there is one."""
        self.swapping.write_back(num_blocks)
        return self.pool.allocate(num_blocks)

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _num_missing_blocks(self, request: Request) -> int:
        """Blocks that admission promised for known tokens and one more, not taken yet."""
        return max(0, self._num_blocks(request.num_tokens + 1) - len(request.block_ids))
