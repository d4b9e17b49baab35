"""Decides, once an iteration, which requests compute how many tokens and in which blocks they store K and V.

One rule, no phases: `num_computed_tokens` chases `num_tokens_bound` under a token budget, running requests first,
then waiting ones. Prompts in chunks, prefix hits, resumed requests and decoding all follow from it. Owns the queues,
the rows and, through the pool, the blocks; knows nothing of text and arrays, and no clock but what it is told.

The host may run ahead: schedule() for step N+1 comes before confirm() for step N. This is safe because the device
executes steps in order: a block or row that changes hands is written by its new owner in a later step than any that
still names the old one.
"""

import heapq
from bisect import bisect_left, insort
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import count
from operator import attrgetter
from typing import Literal, NamedTuple

from pagedjax.scheduling.admissible import Limits, check_request
from pagedjax.scheduling.beam_group import BeamGroup, BeamGroups, new_search
from pagedjax.scheduling.beam_search import Candidates
from pagedjax.scheduling.block_demand import blocks_behind, blocks_for, num_missing_blocks, num_spare_blocks
from pagedjax.scheduling.block_pool import BlockPool
from pagedjax.scheduling.deadlines import Deadlines
from pagedjax.scheduling.fair_share import FairShare
from pagedjax.scheduling.fork import PromptForks
from pagedjax.scheduling.host_pool import HostPool
from pagedjax.scheduling.pacing import Pacing
from pagedjax.scheduling.pinned_prefixes import PinnedPrefixes
from pagedjax.scheduling.preemption import PreemptionCosts, log_preemption
from pagedjax.scheduling.prefix_cache import PrefixCache
from pagedjax.scheduling.request import LAST_UNFINISHED, Request, RequestStatus
from pagedjax.scheduling.step_plan import ScheduledRequest, SchedulerOutput
from pagedjax.scheduling.swapping import CopyProgress, Swapping

MAX_PREEMPTIONS = 3  # of one request; a lower limit reserves blocks early and costs throughput where the watermark is 0

_by_order = attrgetter("order")


class Start(NamedTuple):
    """What a request finds computed when it is admitted: tokens [0, num_tokens), in these blocks."""

    block_ids: list[int]
    num_tokens: int
    is_forked: bool  # from a request with the same prompt; otherwise found in the prefix cache


class Scheduler:
    """Queues of unfinished requests, each sorted by `Request.order`, over one pool of blocks.

    Under "fcfs" the order is that of arrival, between clients that of their fair shares; under "priority" the lowest
    priority value comes before both. The best request is served and admitted first and the worst is preempted first.
    Under "priority" a waiting request may also preempt running ones of a lower priority.

        WAITING -> RUNNING, SWAPPING_IN                admitted; the second if the host has blocks of it, which are
        PREEMPTED -> RUNNING, SWAPPING_IN, WAITING     copied to the blocks and beside the row that it has by then; the
                                                       last: a search begins again, its other beams wait for the first
        SWAPPED -> RUNNING, SWAPPING_IN, PREEMPTED     the last: the prefix cache was reset
        SWAPPING_IN -> RUNNING, SWAPPED, PREEMPTED     all has landed or failed; preempted; and with a reset
        RUNNING -> PREEMPTED, SWAPPING_OUT, SWAPPED    preempted, to compute again or swapped out (`swapping`)
        SWAPPING_OUT -> SWAPPED                        its last block has left, or was given up for who needed it
        FINISHED_*                                     from every state

    A request waits in the queue with blocks while it is SWAPPING_OUT, and without any while it is WAITING, PREEMPTED or
    SWAPPED.

    Requests that share a prompt are WAITING outside the queue until the first of them has computed it (`fork`). A block
    that several hold is never written: who is about to write it gets a copy of its own, which the plan names.

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
        max_preemptions: int = MAX_PREEMPTIONS,
        watermark: float = 0.0,
        pacing: Pacing | None = None,
        num_host_chunks: int = 0,
        chunk_size: int = 1,
        preemption_costs: PreemptionCosts | None = None,
    ) -> None:
        self.block_size = block_size
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
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
        is_ample = self.pool.capacity >= max_num_seqs * blocks_for(max_model_len, block_size)  # nobody ever runs short
        self.num_watermark_blocks = 0 if is_ample else int(watermark * self.pool.capacity)
        self.requests: dict[str, Request] = {}  # unfinished
        self.running: list[Request] = []
        self.waiting: list[Request] = []  # new and preempted
        self.num_preemptions = 0
        self.num_block_copies = 0
        self._is_head_refused = False  # it waits for blocks
        self._prompt_budget = 0  # of the iteration under way: tokens in chunks of more than one
        self._finished: list[Request] = []  # not reaped yet
        self._fair_share = FairShare()
        self._forks = PromptForks(self.pool, block_size)
        self._beams = BeamGroups(self.pool, block_size)
        self.pinned = PinnedPrefixes(
            self.pool, num_reserved=lambda: max(blocks_for(max_model_len, block_size), self._beams.most_blocks())
        )
        self._deadlines = Deadlines()
        self._free_rows = list(range(max_num_seqs))  # a heap: the smallest first keeps the batch dense
        self._serial = count()

    def add_request(self, request: Request, others: Sequence[Request] = ()) -> None:
        """Queue a request. `others` have its prompt, which is computed once, and follow when that is done.

        Of a beam search they are the other beams.

        Raises:
          InvalidRequestError: one could never run, or has the id of an unfinished request; then none is queued.
        """
        limits = Limits(
            max_model_len=self.max_model_len, block_size=self.block_size, num_blocks=self.pool.capacity,
            num_pinned=self.pinned.num_blocks, max_num_seqs=self.max_num_seqs,
        )  # fmt: skip
        for one in (request, *others):
            check_request(one, limits, self.requests)
        if not self.requests:
            self._fair_share = FairShare()
        self._register(request, num_charged=min(request.max_num_tokens, self.max_model_len))
        for other in others:
            num_tokens = min(other.max_num_tokens, self.max_model_len)
            self._register(other, num_charged=num_tokens - other.num_prompt_tokens)
        if request.is_beam:
            self._beams.add((request, *others))
        elif others:
            self._forks.add(request, others)
        insort(self.waiting, request, key=_by_order)

    def schedule(self, now: float = 0.0, progress: CopyProgress | None = None) -> SchedulerOutput:
        """Plan the next step. An empty plan: everything waits for tokens or copies under way, or there is no work.

        Finished requests give back their blocks and row here and nowhere else. `now` is on the arrival times' clock,
        `progress` what became of the copies of earlier plans.
        """
        for request in self._forks.release_held():
            insort(self.waiting, request, key=_by_order)
        timed_out = self._deadlines.expired(now)
        for request in timed_out:
            self.finish(request, RequestStatus.FINISHED_TIMEOUT)
        self._reap()
        output = SchedulerOutput(timed_out=timed_out)
        output.copies = self.swapping.begin(progress or CopyProgress())
        self._beams.begin()
        max_prompt_tokens = self.pacing.max_prompt_tokens(self.running)
        self._prompt_budget = self.max_num_batched_tokens if max_prompt_tokens is None else max_prompt_tokens
        is_open = self.pacing.admits(self.waiting, now, is_idle=not self.running)
        if self.policy == "priority" and is_open:
            self._make_room(output.preempted)
        self._serve(list(self.running), output, num_behind=len(self.running))
        self._is_head_refused = False
        if is_open and output.num_tokens < self.max_num_batched_tokens:
            self._serve(self._admissions(output), output)
        self.swapping.end()
        return output

    def confirm(
        self,
        output: SchedulerOutput,
        sampled: Mapping[str, list[int]],
        failed: Collection[str] = (),
        candidates: Mapping[str, Candidates] | None = None,
    ) -> Iterator[tuple[Request, list[int]]]:
        """Confirm what a step sampled, in order of dispatch, token by token: yield each with its request.

        The caller may `finish` a request between two of its tokens. Those of requests that are finished are dropped. A
        failed request ends in FINISHED_ERROR after its tokens, which is yielded as no token, and none of its blocks,
        save pinned ones, will be found by the prefix cache. Of beams `candidates` has what may follow; a beam search
        has all its tokens when it ends, its best hypothesis first.
        """
        last_unfinished = LAST_UNFINISHED  # a local name: this loop runs for every token
        for share in output.scheduled:
            request = share.request
            if request.status > last_unfinished:
                continue
            is_failed = bool(failed) and request.request_id in failed
            if request.is_beam and not is_failed:
                if share.samples and candidates is not None:
                    yield from self._follow_beam(request, candidates[request.request_id])
            elif share.samples and not request.is_beam:
                token_ids = sampled.get(request.request_id, ()) if is_failed else sampled[request.request_id]
                if share.num_draft_tokens:
                    self._take_back(share, 1 + share.num_draft_tokens - len(token_ids))
                for token_id in token_ids:
                    status = request.append(token_id)
                    if status is not None:
                        self.finish(request, status, request.stop_reason_of(status, token_id))
                    yield request, [token_id]
                    if request.status > last_unfinished:
                        break
            if is_failed and request.status <= last_unfinished:
                suspects = request.block_ids + self.prefix_cache.blocks_of(request)  # preempted, it has none itself
                self.prefix_cache.forget(self.pinned.others(suspects))
                self.swapping.host_pool.forget(request.block_hashes)
                self.finish(request, RequestStatus.FINISHED_ERROR)
                yield request, []

    def _take_back(self, share: ScheduledRequest, num_refused: int) -> None:
        """Lower the bounds of a request by the drafts that were refused; the device has done so with its row."""
        share.request.num_tokens_bound -= num_refused
        if share.request.row is not None:  # if it was preempted it computes everything again
            share.request.num_computed_tokens -= num_refused

    def finish(self, request: Request, status: RequestStatus, stop_reason: int | str | None = None) -> None:
        """End a request, and with a beam its whole search; the first status stays.

        Its blocks can be found from now on, and are freed by schedule().
        """
        if request.is_finished:
            return
        if request.is_beam:
            for member in self._beams.of(request).members:
                member.forget_output()
                self._end(member, status, stop_reason)
            return
        if status != RequestStatus.FINISHED_ERROR:
            self.prefix_cache.register(request)
        self._end(request, status, stop_reason)

    def note_step(self, *, num_requests: int, num_tokens: int, seconds: float) -> None:
        """Take note of a step: its requests, its tokens and how long the device took."""
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

    @property
    def expects_prompts(self) -> bool:
        """Whether the next step is likely to compute prompts: of who runs, or of who waits and may come in."""
        may_come_in = bool(self._finished) or (bool(self._free_rows) and not self._is_head_refused)
        return (bool(self.waiting) and may_come_in) or any(request.is_reading for request in self.running)

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
            "num_block_copies": self.num_block_copies,
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
            if request.row is not None:  # not given back with another beam of its search
                self._preempt(request, may_swap=False)
        while self._forks.drop():
            pass
        self.swapping.clear([request for request in self.waiting if request.is_swapped])
        self.prefix_cache.clear()
        return True

    def check_integrity(self) -> None:
        """Raise AssertionError, with a sentence, if queues, rows, blocks and hashes contradict each other."""
        everybody = [*self.running, *self.waiting]
        held = [*self.pinned.block_tables(), *self._forks.block_tables(), *self._beams.block_tables()]
        self.pool.check_integrity([*(request.block_ids for request in everybody), *held])
        self.swapping.check_integrity(everybody)
        self.pinned.check_integrity()
        rows = [request.row for request in self.running] + [row for group in self._beams for row in group.spare_rows]
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
            assert request.num_computed_tokens < request.num_tokens_bound <= request.max_num_tokens, (
                "more tokens than there can be, or none to compute"
            )
        everybody = [*self.running, *self.waiting, *self._forks.held, *self._beams.held]
        queued = {request.request_id: request for request in everybody if not request.is_finished}
        assert queued == self.requests, "unfinished requests and the queues differ"

    def _end(self, request: Request, status: RequestStatus, stop_reason: int | str | None) -> None:
        request.status, request.stop_reason = status, stop_reason
        del self.requests[request.request_id]
        self._finished.append(request)
        self._fair_share.give_back(request.client, request.place, request.max_num_tokens - request.num_tokens)

    def _follow_beam(self, request: Request, candidates: Candidates) -> list[tuple[Request, list[int]]]:
        """Go on with a search when candidates of all its beams have arrived; return the outputs if it is over."""
        group = self._beams.of(request)
        if not group.note_read() or not group.push(request, candidates):
            return []
        for member in group.advance(self.pool):
            member.row, member.status = group.spare_rows.pop(), RequestStatus.RUNNING
            insort(self.running, member, key=_by_order)
        return self._finish_search(group) if group.search.is_over else []

    def _finish_search(self, group: BeamGroup) -> list[tuple[Request, list[int]]]:
        for member, status in group.take_results():
            self._end(member, status, member.stop_reason_of(status, member.output_token_ids[-1]))
        return [(member, member.output_token_ids) for member in group.members[: group.first.sampling_params.n]]

    def _register(self, request: Request, *, num_charged: int) -> None:
        request.max_num_tokens = min(request.max_num_tokens, self.max_model_len)
        rank = (request.priority,) if self.policy == "priority" else ()
        request.place = self._fair_share.stamp(request.client, num_charged)
        request.order = (*rank, request.place.start, next(self._serial))
        self.requests[request.request_id] = request
        self._deadlines.add(request)

    def _reap(self) -> None:
        finished, self._finished = self._finished, []
        for request in finished:
            rows: list[int] = []
            if request.is_beam:
                was_held, rows = self._beams.note_ended(request)
            else:
                was_held, heir = self._forks.note_ended(request)
                if heir is not None:
                    insort(self.waiting, heir, key=_by_order)
            if not was_held:
                queue = self.waiting if request.row is None else self.running
                del queue[bisect_left(queue, request.order, key=_by_order)]
            self._release(request)
            self._give_back_rows(rows)

    def _serve(self, requests: Iterable[Request], output: SchedulerOutput, *, num_behind: int = 0) -> None:
        """Plan the next tokens of requests in their order until the budget is spent: the one scheduling rule.

        A chunk leaves a token of the budget to each of the `num_behind` requests that it might starve.
        """
        block_size, has_forks = self.block_size, bool(self._forks)
        scheduled, budget = output.scheduled, self.max_num_batched_tokens - output.num_tokens
        behind = blocks_behind(self.running, block_size) if num_behind else []
        num_kept = self._num_kept_for_prompts() if behind else 0
        for request in requests:
            num_behind -= 1
            if request.row is None or request.status is RequestStatus.SWAPPING_IN:
                continue  # preempted just now for a better one, or without its content yet
            if request.is_drafted_from_output and request.num_in_flight:
                continue
            context_len, bound = request.num_computed_tokens, request.num_tokens_bound
            if bound >= request.max_num_tokens or (request.is_beam and self._beams.must_wait(request)):
                continue  # what is in flight completes it, or says what it goes on with
            may_copy = (request.is_new_row or has_forks or request.is_beam) and self._writes_shared_block(request)
            num_new, num_drafts = bound - context_len, 0
            if num_new > 1:
                num_new = min(num_new, self._prompt_budget, budget, max(budget - num_behind, 1))
                if not num_new:
                    continue
                self._prompt_budget -= num_new
            elif request.num_draft_tokens and not (request.is_new_row or request.is_beam or may_copy):
                num_free = self.pool.num_free - behind[num_behind]
                num_drafts = self._num_drafts(request, budget - num_kept - 1 - num_behind, num_free)
                num_new += num_drafts
            seq_len, first_new, new_block_ids = context_len + num_new, len(request.block_ids), ()
            if may_copy or seq_len > first_new * block_size:
                first_new, new_block_ids = self._grow(request, seq_len, output)
            row = request.row
            if row is None:
                continue  # preempted itself: nobody worse can be
            request.num_computed_tokens = seq_len
            if has_forks and seq_len >= request.num_prompt_tokens:
                self._forks.note_computed(request)
            samples = seq_len == bound + num_drafts
            if samples:
                request.num_tokens_bound = bound + num_drafts + 1
                output.num_sampling += 1
            if num_new > 1 + num_drafts:
                self.prefix_cache.register(request)  # requests admitted to this very step may share it
            writes_row = request.is_new_row or request.is_beam  # a beam may have taken on another's tokens and blocks
            if request.is_beam:
                self._beams.of(request).num_unread += samples
            if writes_row:
                request.is_new_row = False
                first_new, new_block_ids = 0, list(request.block_ids)
            scheduled.append(
                ScheduledRequest(
                    request, row, num_new, context_len, new_block_ids, first_new, writes_row, samples, num_drafts
                )
            )
            output.num_draft_tokens += num_drafts
            budget -= num_new
            if budget == 0:
                break
        output.num_tokens = self.max_num_batched_tokens - budget

    def _num_kept_for_prompts(self) -> int:
        """Tokens of the budget that drafts leave to prompts, if there are any to compute: they would wait for ever."""
        has_prompts = (self.waiting and self._free_rows) or any(request.is_reading for request in self.running)
        return min(self._prompt_budget, self.max_num_batched_tokens // 2) if has_prompts else 0

    def _num_drafts(self, request: Request, budget: int, num_free: int) -> int:
        """Limit a request's drafts to a budget, to the tokens it may still generate, and to blocks that nobody misses.

        All of them may turn out right, and one token comes after the last.
        """
        num_drafts = min(request.num_draft_tokens, request.max_num_tokens - request.num_tokens_bound - 1, budget)
        num_slots = (len(request.block_ids) + max(num_free, 0)) * self.block_size
        return max(0, min(num_drafts, num_slots - request.num_computed_tokens - 1))

    def _grow(self, request: Request, seq_len: int, output: SchedulerOutput) -> tuple[int, Sequence[int]]:
        """Make `seq_len` tokens writable: a copy of a block that others read too, and blocks for what goes beyond.

        Takes blocks that refused drafts left with others, then those of prompts kept for who has not started, then
        preempts the worst that can be, at last `request` itself. Returns what is new in its block table, from which
        index on.
        """
        if not request.output_token_ids or not request.is_beam:  # what beams generate goes on being copied and dropped
            self.prefix_cache.register(request)  # generated tokens have filled a block
        num_grown = max(0, blocks_for(seq_len, self.block_size) - len(request.block_ids))
        while num_grown + (is_shared := self._writes_shared_block(request)) > self._num_takeable(request):
            if self._take_spare_blocks(request) or self.swapping.cut_short() or self._forks.drop():
                continue
            victim = next(other for other in reversed(self.running) if not self._is_settled(other))
            self._preempt(victim)
            output.preempted.append(victim)
            if victim is request:
                return 0, ()
        take = self._beams.of(request).take_blocks if request.is_beam else self._allocate
        new_block_ids, first_new = take(num_grown + is_shared), len(request.block_ids)
        request.block_ids += new_block_ids[is_shared:]
        if is_shared:
            first_new = request.num_computed_tokens // self.block_size
            self._copy_block(request, first_new, new_block_ids[0], output)
        return first_new, new_block_ids

    def _take_spare_blocks(self, taker: Request) -> bool:
        """Free the blocks that refused drafts have left with another request; False if nobody has any."""
        for other in self.running:
            if other is taker or self._is_settled(other):
                continue
            num_spare = num_spare_blocks(other, self.block_size)
            if num_spare:
                self.pool.release(other.block_ids[-num_spare:])
                # the device's table goes on naming them, past all that the model reads or writes; see draft_proposer
                del other.block_ids[-num_spare:]
                return True
        return False

    def _num_takeable(self, request: Request) -> int:
        return len(self._beams.of(request).spare_blocks) if request.is_beam else self.pool.num_free

    def _writes_shared_block(self, request: Request) -> bool:
        """Whether the next token goes into a block that others read too."""
        index = request.num_computed_tokens // self.block_size
        return index < len(request.block_ids) and self.pool.is_read_only(request.block_ids[index])

    def _copy_block(self, request: Request, index: int, block_id: int, output: SchedulerOutput) -> None:
        """Put a copy, which the step will make, in the place of a block that others read too."""
        shared = request.block_ids[index]
        output.forked_blocks.append((shared, block_id))
        request.block_ids[index] = block_id
        self.pool.release([shared])
        self.num_block_copies += 1

    def _is_settled(self, request: Request) -> bool:
        """Whether a request has all blocks it can need and is left alone: a beam, or one preempted often enough."""
        return request.is_beam or request.num_preemptions >= self.max_preemptions

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
        if self._num_rows(request) > len(self._free_rows) + len(victims):
            return False
        start = self._start(request)
        num_freed = len(self.pool.freed_by(victim.block_ids for victim in victims).difference(start.block_ids))
        others = [other for other in self.running if other not in victims]
        num_promised = self._num_promised(others)
        num_leaving = len(self.pool.freed_by(self.swapping.leaving_blocks).difference(start.block_ids))
        num_available = self.pool.num_free + num_freed + num_leaving - num_promised - self._num_spare(others)
        return self._num_taken(request, start) <= num_available

    def _preempt(self, victim: Request, *, may_swap: bool = True) -> None:
        """Send a request back to waiting: it goes to the host, or computes again what the prefix cache loses.

        A beam's whole search begins anew.
        """
        if victim.is_beam:
            victim = self._give_up_search(self._beams.of(victim))
        else:
            self._stop_running(victim, may_swap=may_swap)
        victim.num_computed_tokens = 0
        victim.num_preemptions += 1
        self.num_preemptions += 1
        insort(self.waiting, victim, key=_by_order)

    def _give_up_search(self, group: BeamGroup) -> Request:
        for member in group.members:
            if member.row is not None:
                self._stop_running(member, may_swap=False)
                if member is not group.members[0]:
                    member.status = RequestStatus.WAITING
        self._give_back_rows(self._beams.give_back(group))
        group.restart(new_search(group.first))
        return group.first

    def _stop_running(self, victim: Request, *, may_swap: bool) -> None:
        del self.running[bisect_left(self.running, victim.order, key=_by_order)]
        if may_swap and self.swapping.swap_out(victim):
            self._release_row(victim)
        else:
            if not may_swap:
                log_preemption(victim, "recompute", victim.num_computed_tokens, "the prefix cache is reset")
            self._release(victim)
            victim.status = RequestStatus.PREEMPTED

    def _admissions(self, output: SchedulerOutput) -> Iterator[Request]:
        """Admit waiting requests in order while rows and blocks last; nobody overtakes the head."""
        unfinished = [share.request for share in output.scheduled if not share.samples]
        unfinished += [request for request in self.running if request.status is RequestStatus.SWAPPING_IN]
        num_promised = self._num_promised(unfinished)
        while self.waiting and self._prompt_budget:
            if not self._admit(self.waiting[0], num_promised):
                if not self.running and self._forks.drop():
                    continue  # nobody else will give back what the head needs
                self._is_head_refused = True
                return
            request = self.waiting.pop(0)
            yield request
            num_promised += self._num_promised([request])

    def _admit(self, request: Request, num_promised: int) -> bool:
        """Give a request a row and what the prefix cache has of it; False if its tokens and one more do not fit.

        Only the blocks of its first chunk are taken soon. The others are promised: no later admission counts on them.
        """
        if self._num_rows(request) > len(self._free_rows) or request.num_in_flight or request.is_swapping_out:
            return False  # with its row a preempted request lost its token in flight: it goes on once that was read
        start = self._start(request)
        if self._num_taken(request, start) > self.pool.num_free - num_promised - self._num_spare(self.running):
            return False
        if not start.is_forked and self.swapping.is_awaited(request, len(start.block_ids)):
            return False
        self.pool.retain(start.block_ids)  # before anything is allocated, which could evict them
        num_on_host = 0 if start.is_forked else self._note_found(request, start)
        self._forks.note_started(request)
        request.num_computed_tokens = start.num_tokens
        request.num_registered_tokens = start.num_tokens // self.block_size * self.block_size
        num_needed = num_on_host
        if self._is_settled(request) and not request.is_beam:
            num_needed = blocks_for(request.max_num_tokens, self.block_size) - len(start.block_ids)
        request.block_ids = start.block_ids + self._allocate(num_needed)
        if request.is_beam:
            self._open_search(request)
        request.row, request.is_new_row = heapq.heappop(self._free_rows), True
        request.status = RequestStatus.SWAPPING_IN if num_on_host else RequestStatus.RUNNING
        self.swapping.swap_in(request)
        self._fair_share.note_started(request.place.start)
        insort(self.running, request, key=_by_order)
        return True

    def _note_found(self, request: Request, start: Start) -> int:
        """Take note of what the prefix cache has of an admitted request; return how many more blocks the host has."""
        num_on_host = self.swapping.hold(request, len(start.block_ids))
        self.prefix_cache.record(request, start.num_tokens, num_on_host=num_on_host * self.block_size)
        if request.num_preemptions == 0:
            request.num_cached_tokens = start.num_tokens + num_on_host * self.block_size
        return num_on_host

    def _open_search(self, request: Request) -> None:
        """Give a beam search all rows and blocks that it can need."""
        group = self._beams.of(request)
        group.spare_blocks = self._allocate(group.num_blocks(self.block_size) - len(request.block_ids))
        group.spare_rows = [heapq.heappop(self._free_rows) for _ in range(group.width - 1)]

    def _num_spare(self, running: Sequence[Request]) -> int:
        """Blocks that an admission leaves to those that run: they will grow, and would throw it out again."""
        return self.num_watermark_blocks if running else 0

    def _start(self, request: Request) -> Start:
        """Find what is computed of a request already."""
        forked, num_forked = self._forks.prefix_of(request) if not request.host_slots else ([], 0)
        if forked and num_forked == request.num_tokens - 1:
            return Start(list(forked), num_forked, True)
        cached = self.prefix_cache.match(request)
        num_cached = len(cached) * self.block_size
        return Start(list(forked), num_forked, True) if num_forked > num_cached else Start(cached, num_cached, False)

    def _num_taken(self, request: Request, start: Start) -> int:
        """Free blocks that an admission takes or is promised, revived ones included."""
        if request.is_beam:
            num_new = self._beams.of(request).num_blocks(self.block_size) - len(start.block_ids)
            return num_new + self.pool.num_idle(start.block_ids)
        num_tokens = request.max_num_tokens if self._is_settled(request) else request.num_tokens + 1
        has_copy = start.num_tokens % self.block_size > 0  # of the block that the first new token goes into
        num_new = blocks_for(num_tokens, self.block_size) - len(start.block_ids) + has_copy
        return num_new + self.pool.num_idle(start.block_ids)

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

    def _give_back_rows(self, rows: Iterable[int]) -> None:
        for row in rows:
            heapq.heappush(self._free_rows, row)

    def _num_rows(self, request: Request) -> int:
        return self._beams.of(request).width if request.is_beam else 1

    def _num_promised(self, requests: Iterable[Request]) -> int:
        """Blocks that admissions promised for known tokens and one more, not taken yet."""
        return sum([num_missing_blocks(request, request.num_tokens + 1, self.block_size) for request in requests])
