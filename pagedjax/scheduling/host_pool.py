"""Which slot of host memory holds which block's content: reference counts, cached prefixes, the order of reuse.

    free -> held -> cached -> held again      a chunk is held while requests need a slot of it, and cached while
     ^       |        |                       nobody does but a prefix in it may be asked for
     +-------+--------+

Slots come in chunks of `chunk_size`, each an array of its own in pinned memory, which one copy fills and one copy
reads: chunk c has slots [c * chunk_size, (c + 1) * chunk_size). Knows nothing of arrays and of requests.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class HostPool:
    """Chunks 0 to num_chunks - 1; none at all where there is no swap space."""

    def __init__(self, num_chunks: int, chunk_size: int) -> None:
        self.num_chunks = num_chunks
        self.chunk_size = chunk_size
        self._num_refs = [0] * (num_chunks * chunk_size)
        self._num_chunk_refs = [0] * num_chunks
        self._free = list(range(num_chunks))
        self._cached: OrderedDict[int, None] = OrderedDict()  # the least recently used first
        self._lost: set[int] = set()  # chunks whose copy failed while somebody held them
        self._slot_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}

    @property
    def num_available(self) -> int:
        """Chunks that can be allocated: free ones, and cached ones that would be evicted."""
        return len(self._free) + len(self._cached)

    @property
    def num_held(self) -> int:
        """Chunks that requests need."""
        return self.num_chunks - self.num_available

    @property
    def num_cached_blocks(self) -> int:
        """Blocks that can be found by their digest."""
        return len(self._digest_of)

    def chunk_of(self, slot: int) -> int:
        """Return the chunk of a slot."""
        return slot // self.chunk_size

    def find(self, digest: bytes) -> int | None:
        """Return the slot that holds a block of this digest, if one does."""
        return self._slot_of.get(digest)

    def is_lost(self, slot: int) -> bool:
        """Whether the content of a held slot never arrived."""
        return slot // self.chunk_size in self._lost

    def allocate(self, num_slots: int) -> list[int]:
        """Hold the first slots of one chunk, at most all of it; the least recently used prefixes make room."""
        assert 0 < num_slots <= self.chunk_size, "a copy fills one chunk"
        assert self.num_available, "the caller checks first"
        if not self._free:
            chunk, _ = self._cached.popitem(last=False)
            self._forget_chunk(chunk)
        else:
            chunk = self._free.pop()
        slots = list(range(chunk * self.chunk_size, chunk * self.chunk_size + num_slots))
        for slot in slots:
            self._num_refs[slot] = 1
        self._num_chunk_refs[chunk] = num_slots
        return slots

    def retain(self, slots: Iterable[int]) -> None:
        """Hold these slots, with their content, once more."""
        for slot in slots:
            chunk = slot // self.chunk_size
            if not self._num_chunk_refs[chunk]:
                del self._cached[chunk]
            self._num_refs[slot] += 1
            self._num_chunk_refs[chunk] += 1

    def release(self, slots: Iterable[int]) -> None:
        """Let go of these slots; prefixes in them can be found until their chunk is needed."""
        for slot in slots:
            assert self._num_refs[slot] > 0, f"host slot {slot} is released more often than it was taken"
            chunk = slot // self.chunk_size
            self._num_refs[slot] -= 1
            self._num_chunk_refs[chunk] -= 1
            if not self._num_chunk_refs[chunk]:
                self._lost.discard(chunk)
                self._put_back(chunk)

    def register(self, slot: int, digest: bytes) -> None:
        """Make a held slot findable; of equal blocks the first one stays."""
        assert self._num_refs[slot], "only a held slot gets a digest"
        if digest not in self._slot_of and slot not in self._digest_of:
            self._slot_of[digest], self._digest_of[slot] = slot, digest

    def lose(self, chunk: int) -> None:
        """Take note that a copy of or to this chunk failed: nobody will find or use what is in it."""
        self._forget_chunk(chunk)
        if self._num_chunk_refs[chunk]:
            self._lost.add(chunk)
        else:
            self._reclaim(chunk)

    def forget(self, digests: Iterable[bytes]) -> None:
        """Make blocks unfindable: their content is suspect."""
        for digest in digests:
            slot = self._slot_of.pop(digest, None)
            if slot is not None:
                del self._digest_of[slot]
                self._reclaim(slot // self.chunk_size)

    def clear(self) -> None:
        """Forget every prefix."""
        self._slot_of.clear()
        self._digest_of.clear()
        self._free += self._cached
        self._cached.clear()

    def check_integrity(self, holders: Iterable[Sequence[int]]) -> None:
        """Raise AssertionError unless every chunk is free, cached or held by exactly the given slots."""
        num_refs = [0] * len(self._num_refs)
        for slots in holders:
            for slot in slots:
                num_refs[slot] += 1
        assert num_refs == self._num_refs, "reference counts of host slots differ from what requests hold"
        for chunk in range(self.num_chunks):
            assert self._num_chunk_refs[chunk] == sum(num_refs[slot] for slot in self._slots(chunk)), "chunk miscounted"
        free, cached = set(self._free), set(self._cached)
        held = {chunk for chunk in range(self.num_chunks) if self._num_chunk_refs[chunk]}
        assert len(free) == len(self._free), "a chunk is free twice"
        assert len(free) + len(cached) + len(held) == self.num_chunks == len(free | cached | held), (
            "host chunks are not exactly free, cached or held"
        )
        assert self._lost <= held, "a chunk that nobody holds is lost"
        assert {digest: slot for slot, digest in self._digest_of.items()} == self._slot_of, (
            "the host pool's maps from digest to slot and back disagree"
        )
        with_digest = {slot // self.chunk_size for slot in self._digest_of}
        assert cached <= with_digest <= cached | held, "a chunk is cached or held exactly if a prefix is in it"

    def _slots(self, chunk: int) -> range:
        return range(chunk * self.chunk_size, (chunk + 1) * self.chunk_size)

    def _forget_chunk(self, chunk: int) -> None:
        for slot in self._slots(chunk):
            digest = self._digest_of.pop(slot, None)
            if digest is not None:
                del self._slot_of[digest]

    def _put_back(self, chunk: int) -> None:
        if any(slot in self._digest_of for slot in self._slots(chunk)):
            self._cached[chunk] = None
        else:
            self._free.append(chunk)

    def _reclaim(self, chunk: int) -> None:
        """Free a cached chunk that has lost its last prefix."""
        if chunk in self._cached:
            del self._cached[chunk]
            self._put_back(chunk)
