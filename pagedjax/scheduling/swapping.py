"""Moves blocks between the device and the host: those of preempted requests, and prefixes that are about to be evicted.

A preempted request's full blocks are copied to the host and then released like any others: while nobody needs the
room, they can still be found on the device. What is not a full block of known tokens is computed again, and prefixes
that others use stay where they are. To resume is to be admitted with a long prefix: what the device still has, then
what the host has, and then what has to be computed.

Decides on ids only: an iteration's `BlockCopies` are carried out before its step, landed ones first, then out, then in.
Owns the host pool and what requests hold in it. Never starts more copies than it was told may be started.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import batched, islice

from pagedjax.scheduling.block_pool import BlockPool
from pagedjax.scheduling.host_pool import HostPool
from pagedjax.scheduling.preemption import PreemptionCosts, log_preemption
from pagedjax.scheduling.request import NOT_ON_HOST, Request, RequestStatus

MAX_STARTED_IN = 1  # an iteration: when it has landed, the host takes half a millisecond to dispatch its jitted half
MAX_AHEAD = 512  # blocks that are looked at before they are evicted


@dataclass(slots=True, eq=False)
class CopyOut:
    """Copy blocks to a chunk of host memory: `block_ids[i]` to its slot i."""

    chunk: int
    block_ids: list[int]


@dataclass(slots=True, eq=False)
class CopyIn:
    """Copy slots of a chunk of host memory to blocks: slot i to `block_ids[i]`, and those that are None nowhere."""

    request: Request
    chunk: int
    block_ids: list[int | None]
    is_cancelled: bool = False

    @property
    def is_wanted(self) -> bool:
        """Whether its request still waits for it."""
        return not (self.is_cancelled or self.request.is_finished)


@dataclass(slots=True)
class BlockCopies:
    """What one iteration copies before its step, in this order."""

    landed: list[CopyIn] = field(default_factory=list)  # started earlier, on the device by now: into the pool with them
    out: list[CopyOut] = field(default_factory=list)
    started: list[CopyIn] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.landed or self.out or self.started)


@dataclass(slots=True)
class CopyProgress:
    """What became of copies since the last iteration, and how many may be started in this one."""

    num_startable: int = 0
    landed: list[CopyIn] = field(default_factory=list)
    failed: list[CopyIn | CopyOut] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Leaving:
    """A copy out that has not started; its blocks are blocks `indices` of the request, which keeps them until then."""

    request: Request
    indices: list[int]
    copy: CopyOut


class Swapping:
    """The host side of one scheduler, which allocates about `num_ahead` blocks an iteration at most.

    Without host memory it copies nothing and finds nothing. A request whose copy fails computes what was to be copied.
    """

    def __init__(self, pool: BlockPool, host_pool: HostPool, costs: PreemptionCosts, *, num_ahead: int) -> None:
        self.host_pool = host_pool
        self.costs = costs
        self.num_ahead = min(num_ahead, MAX_AHEAD)
        self.num_swaps = self.num_blocks_out = self.num_blocks_in = self.num_failed = 0
        self.num_queries = self.num_hits = 0  # of new requests, in tokens
        self._pool = pool
        self._cache = pool.prefix_cache
        self._copies = BlockCopies()
        self._num_startable = self._num_reserved = 0
        self._num_clean = 0  # about so many of the blocks that are evicted next hold nothing that the host lacks
        self._leaving: deque[_Leaving] = deque()
        self._arriving: dict[Request, list[CopyIn]] = {}  # copies that have not landed
        self._to_start: deque[CopyIn] = deque()

    @property
    def leaving_blocks(self) -> list[list[int]]:
        """Blocks that requests keep until their copy out has started."""
        return [leaving.copy.block_ids for leaving in self._leaving]

    def begin(self, progress: CopyProgress) -> BlockCopies:
        """Begin an iteration: learn what became of earlier copies and go on with what is under way.

        Returns:
          The iteration's copies; more are added while it is planned.
        """
        self._copies = BlockCopies()
        self._num_startable = progress.num_startable
        self._num_reserved = progress.num_startable // 2  # for requests: evicted prefixes do not get these
        for copy in progress.failed:
            self._fail(copy)
        for copy in progress.landed:
            self._land(copy)
        self._start()
        if self.host_pool.num_chunks:
            self._save_ahead()
        return self._copies

    def end(self) -> None:
        """End an iteration: what would start a copy from now on waits for the next one."""
        self._num_startable = self._num_reserved = 0

    def swap_out(self, victim: Request) -> bool:
        """Begin to move a preempted request to the host and set its status; False if it shall compute its tokens again.

        It keeps the blocks whose copies cannot start in this iteration.
        """
        if victim.status is RequestStatus.SWAPPING_IN:
            num_tokens = len(victim.host_slots) * self._cache.block_size
            log_preemption(victim, "swap", num_tokens, "the host still has them, it was on its way back")
            self._cancel(victim)
            self._release_blocks(victim, victim.block_ids)
        else:
            self._cache.register(victim)
            num_full = min(victim.num_computed_tokens, victim.num_tokens) // self._cache.block_size
            if not self._leave(victim, num_full):
                return False
        self.num_swaps += 1
        victim.status = RequestStatus.SWAPPING_OUT if victim.block_ids else RequestStatus.SWAPPED
        self._start()
        return True

    def cut_short(self) -> bool:
        """Give up the last copy out that has not started, so that its blocks are free now; False if there is none."""
        if not self._leaving:
            return False
        leaving = self._leaving.pop()
        request = leaving.request
        self.host_pool.release(request.host_slots[i] for i in leaving.indices)
        for i in leaving.indices:
            request.host_slots[i] = NOT_ON_HOST
        self._release_blocks(request, leaving.copy.block_ids)
        return True

    def is_awaited(self, request: Request, num_found: int) -> bool:
        """Whether what continues a request's first blocks is on its way for another: then it can be shared, soon."""
        num_wanted = (request.num_tokens - 1) // self._cache.block_size
        slot = next(self._chain(request, range(num_found, num_wanted)), None) if self._arriving else None
        return any(slot in other.host_slots for other in self._arriving)

    def hold(self, request: Request, num_found: int) -> int:
        """Have an admitted request hold the slots that continue its first `num_found` blocks, and no others.

        Returns:
          How many: 0 if to compute them takes less time than to copy them.
        """
        num_wanted = (request.num_tokens - 1) // self._cache.block_size  # one token at least is computed
        slots = list(self._chain(request, range(num_found, num_wanted)))
        num_chunks, num_tokens = self._num_chunks(slots), len(slots) * self._cache.block_size
        if slots and not self.costs.is_worth_copying(num_chunks=num_chunks, num_tokens=num_tokens):
            slots = []
        may_find = self._cache.enabled and not request.skip_reading_prefix_cache
        if self.host_pool.num_chunks and may_find and not request.num_preemptions:
            self.num_queries += request.num_tokens - num_found * self._cache.block_size
            self.num_hits += len(slots) * self._cache.block_size
        self.host_pool.retain(slots)
        self._release_slots(request)
        request.host_slots = [NOT_ON_HOST] * num_found + slots if slots else []
        return len(slots)

    def swap_in(self, request: Request) -> None:
        """Begin to copy what an admitted request holds on the host to its blocks; it waits until all has landed."""
        block_ids: dict[int, list[int | None]] = {}
        for slot, block_id in zip(request.host_slots, request.block_ids, strict=False):
            if slot != NOT_ON_HOST:
                chunk = self.host_pool.chunk_of(slot)
                targets = block_ids.setdefault(chunk, [None] * self.host_pool.chunk_size)
                targets[slot % self.host_pool.chunk_size] = block_id
        if block_ids:
            self._arriving[request] = [CopyIn(request, chunk, targets) for chunk, targets in block_ids.items()]
            self._to_start += self._arriving[request]
            self._start()

    def write_back(self, num_blocks: int) -> None:
        """Copy prefixes that the next `num_blocks` allocations evict to the host; of too many those evicted last."""
        if not self.host_pool.num_chunks:
            return
        self._num_clean -= num_blocks
        evicted = list(filter(self._is_only_here, islice(self._pool.next_free(), num_blocks)))
        if evicted and (num_savable := self._num_savable()):
            self._save(evicted[-num_savable:])

    def drop(self, request: Request) -> None:
        """Give up everything that a request has or waits for on the host."""
        self._cancel(request)
        self._leaving = deque(leaving for leaving in self._leaving if leaving.request is not request)
        self._release_slots(request)

    def clear(self, swapped: list[Request]) -> None:
        """Forget everything on the host; these swapped requests compute their tokens again."""
        for request in swapped:
            self.drop(request)
            self._release_blocks(request, request.block_ids)
            request.status = RequestStatus.PREEMPTED
        self.host_pool.clear()

    def stats(self) -> dict[str, float]:
        """Return gauges and counters under their metric names: blocks, and tokens for the prefix cache."""
        pool = self.host_pool
        return {
            "cpu_cache_usage_perc": pool.num_held / pool.num_chunks if pool.num_chunks else 0.0,
            "num_blocks_cached_on_host": pool.num_cached_blocks,
            "num_preemptions_swapped": self.num_swaps,
            "swap_out_blocks": self.num_blocks_out,
            "swap_in_blocks": self.num_blocks_in,
            "swap_failures": self.num_failed,
            "external_prefix_cache_queries": self.num_queries,
            "external_prefix_cache_hits": self.num_hits,
        }

    def check_integrity(self, requests: list[Request]) -> None:
        """Raise AssertionError if the host pool, statuses and copies under way contradict each other."""
        self.host_pool.check_integrity(
            [[slot for slot in request.host_slots if slot != NOT_ON_HOST] for request in requests]
        )
        leaving = {item.request for item in self._leaving}
        for request in requests:
            if request.is_finished:
                continue
            is_leaving, is_arriving = request in leaving, bool(self._arriving.get(request))
            assert is_leaving == (request.status is RequestStatus.SWAPPING_OUT), "only who is swapped out leaves"
            assert is_arriving == (request.status is RequestStatus.SWAPPING_IN), "only who is swapped in arrives"
            is_away = request.row is None or is_arriving
            assert is_away or not request.host_slots, "a request that computes holds host slots"
        assert all(copies for copies in self._arriving.values()), "a request waits for no copy"

    def _leave(self, victim: Request, num_full: int) -> bool:
        """Hold what the host has of a victim's full blocks and line up copies of the rest, unless that costs more."""
        slots, size = [self._cached_slot(victim, i) for i in range(num_full)], self.host_pool.chunk_size
        known = [slot for slot in slots if slot != NOT_ON_HOST]
        is_shared = [self._pool.is_shared_prefix(block_id) for block_id in victim.block_ids[:num_full]]
        to_copy = [i for i in range(num_full) if slots[i] == NOT_ON_HOST and not is_shared[i]]
        num_out = -(-len(to_copy) // size)
        num_tokens = victim.num_computed_tokens - sum(is_shared) * self._cache.block_size
        self.host_pool.retain(known)  # first: room is made by evicting others
        num_in = num_out + self._num_chunks(known)
        has_room = num_out <= self.host_pool.num_available and bool(known or to_copy)
        if not self.costs.prefers_swap(
            victim, num_tokens=num_tokens, num_out=num_out, num_in=num_in, has_room=has_room
        ):
            self.host_pool.release(known)
            return False
        victim.host_slots = slots
        for indices in batched(to_copy, size):
            taken = self.host_pool.allocate(len(indices))
            for i, slot in zip(indices, taken, strict=True):
                slots[i] = slot
            copy = CopyOut(self.host_pool.chunk_of(taken[0]), [victim.block_ids[i] for i in indices])
            self._leaving.append(_Leaving(victim, list(indices), copy))
        keeps = set(to_copy)
        self._release_blocks(victim, [block_id for i, block_id in enumerate(victim.block_ids) if i not in keeps])
        return True

    def _start(self) -> None:
        """Start copies that wait, while any may be started; a request's blocks are free once their copy has started."""
        while self._leaving and self._num_startable:
            leaving = self._leaving.popleft()
            for i in leaving.indices:
                self._register(leaving.request.host_slots[i], leaving.request, i)
            self._copy_out(leaving.copy)
            self._release_blocks(leaving.request, leaving.copy.block_ids)
        while self._to_start and self._num_startable and len(self._copies.started) < MAX_STARTED_IN:
            copy = self._to_start.popleft()
            if copy.is_wanted:
                self._num_startable -= 1
                self._copies.started.append(copy)

    def _copy_out(self, copy: CopyOut) -> None:
        self._num_startable -= 1
        self.num_blocks_out += len(copy.block_ids)
        self._copies.out.append(copy)

    def _release_blocks(self, request: Request, block_ids: list[int]) -> None:
        self._pool.release(block_ids)
        gone = set(block_ids)
        request.block_ids = [block_id for block_id in request.block_ids if block_id not in gone]
        if not request.block_ids and request.status is RequestStatus.SWAPPING_OUT:
            request.status = RequestStatus.SWAPPED

    def _num_savable(self) -> int:
        """How many blocks of prefixes may go to the host in this iteration."""
        size = self.host_pool.chunk_size
        if not self.costs.is_worth_copying(num_chunks=1, num_tokens=size * self._cache.block_size):
            return 0
        return size * max(0, min(self._num_startable - self._num_reserved, self.host_pool.num_available))

    def _save_ahead(self) -> None:
        """Copy prefixes that an iteration may evict before one does, for it may evict more than it may copy."""
        if self._num_clean >= self.num_ahead or not (num_savable := self._num_savable()):
            return
        dirty, self._num_clean = [], 0
        for block_id in islice(self._pool.next_free(), 2 * self.num_ahead):
            if self._is_only_here(block_id):
                if len(dirty) == num_savable:
                    break
                dirty.append(block_id)
            self._num_clean += 1
        self._save(dirty)

    def _save(self, block_ids: list[int]) -> None:
        """Copy free blocks that hold prefixes to chunks that keep them as prefixes too."""
        for part in batched(block_ids, self.host_pool.chunk_size):
            slots = self.host_pool.allocate(len(part))
            for slot, block_id in zip(slots, part, strict=True):
                digest = self._cache.digest(block_id)
                assert digest is not None, "only prefixes are worth saving"
                self.host_pool.register(slot, digest)
            self.host_pool.release(slots)
            self._copy_out(CopyOut(self.host_pool.chunk_of(slots[0]), list(part)))

    def _land(self, copy: CopyIn) -> None:
        if not copy.is_wanted:
            return
        request, copies = copy.request, self._arriving[copy.request]
        copies.remove(copy)
        self._copies.landed.append(copy)
        self.num_blocks_in += sum(block_id is not None for block_id in copy.block_ids)
        if not copies:
            request.num_computed_tokens = len(request.host_slots) * self._cache.block_size
            self._go_on(request)

    def _fail(self, copy: CopyIn | CopyOut) -> None:
        self.num_failed += 1
        self.host_pool.lose(copy.chunk)
        if isinstance(copy, CopyIn) and copy.is_wanted:
            self._go_on(copy.request)  # it has its blocks, and computes their content

    def _go_on(self, request: Request) -> None:
        self._cancel(request)
        self._release_slots(request)
        request.status = RequestStatus.RUNNING

    def _cancel(self, request: Request) -> None:
        """Have copies in that have not landed go nowhere."""
        for copy in self._arriving.pop(request, ()):
            copy.is_cancelled = True

    def _release_slots(self, request: Request) -> None:
        self.host_pool.release(slot for slot in request.host_slots if slot != NOT_ON_HOST)
        request.host_slots = []

    def _chain(self, request: Request, indices: range) -> Iterator[int]:
        for i in indices:
            slot = request.host_slots[i] if i < len(request.host_slots) else NOT_ON_HOST
            if slot == NOT_ON_HOST or self.host_pool.is_lost(slot):
                slot = NOT_ON_HOST if request.skip_reading_prefix_cache else self._cached_slot(request, i)
            if slot == NOT_ON_HOST:
                return
            yield slot

    def _cached_slot(self, request: Request, index: int) -> int:
        if not self._cache.enabled or index >= len(request.block_hashes):
            return NOT_ON_HOST
        slot = self.host_pool.find(request.block_hashes[index])
        return NOT_ON_HOST if slot is None else slot

    def _register(self, slot: int, request: Request, index: int) -> None:
        if self._cache.enabled:
            self.host_pool.register(slot, request.block_hashes[index])

    def _num_chunks(self, slots: list[int]) -> int:
        return len({slot // self.host_pool.chunk_size for slot in slots})

    def _is_only_here(self, block_id: int) -> bool:
        """Whether a block holds a prefix that the host has no copy of."""
        digest = self._cache.digest(block_id)
        return digest is not None and self.host_pool.find(digest) is None
