"""Who holds which KV cache block: reference counts and the order in which free blocks are reused.

    free, empty -> in use -> free, cached -> in use again
         ^            |           |
         +------------+-----------+      released without a prefix, or evicted for other content

A block in use that is held several times, or holds a cached prefix, is only read: who would write it copies it first.
Where there is host memory, a prefix that is about to be evicted, or whose request is swapped out, is copied there first
(`host_pool`); on the device the block's states are the same.

A free block may still hold a cached prefix and be revived until somebody else needs it. Owns the counts and the free
list. The prefix cache knows what a block contains, the scheduler whose it is.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence

from pagedjax.scheduling.prefix_cache import PrefixCache


class BlockPool:
    """Blocks 1 to num_blocks - 1; block 0 is the null block and never handed out."""

    def __init__(self, num_blocks: int, prefix_cache: PrefixCache) -> None:
        self.num_blocks = num_blocks
        self.prefix_cache = prefix_cache
        self._num_refs = [0] * num_blocks
        # Next to be reused first: blocks without content, then cached ones, least recently used first.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))

    @property
    def capacity(self) -> int:
        """Blocks that can be in use at once."""
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.capacity - len(self._free)

    def num_refs(self) -> list[int]:
        """Return how many block tables each block is in, the null block first."""
        return list(self._num_refs)

    def is_shared(self, block_id: int) -> bool:
        """Return whether a block is in several block tables."""
        return self._num_refs[block_id] > 1

    def is_read_only(self, block_id: int) -> bool:
        """Return whether others hold a block too, or will look for what it holds now."""
        return self._num_refs[block_id] > 1 or block_id in self.prefix_cache

    def num_idle(self, block_ids: Iterable[int]) -> int:
        """Return how many of these blocks are free, so that retaining them uses up free blocks."""
        return sum(not self._num_refs[block_id] for block_id in block_ids)

    def is_shared_prefix(self, block_id: int) -> bool:
        """Whether several block tables have a block that can be found by its content too."""
        return self._num_refs[block_id] > 1 and block_id in self.prefix_cache

    def next_free(self) -> Iterator[int]:
        """Yield free blocks in the order of their reuse."""
        return iter(self._free)

    def freed_by(self, holders: Iterable[Sequence[int]]) -> set[int]:
        """Return the blocks that releasing these block tables would free: nobody else holds them."""
        num_held = Counter(block_id for block_ids in holders for block_id in block_ids)
        return {block_id for block_id, num in num_held.items() if num == self._num_refs[block_id]}

    def allocate(self, n: int) -> list[int]:
        """Take n free blocks for new content, evicting the least recently used prefixes if need be."""
        assert n <= self.num_free, f"{n} blocks wanted, {self.num_free} free: the caller checks first"
        block_ids = [self._free.popitem(last=False)[0] for _ in range(n)]
        for block_id in block_ids:
            self._num_refs[block_id] = 1
        self.prefix_cache.evict(block_ids)
        return block_ids

    def retain(self, block_ids: Iterable[int]) -> None:
        """Hold these blocks, with their content, once more; free ones are revived."""
        for block_id in block_ids:
            if not self._num_refs[block_id]:
                del self._free[block_id]
            self._num_refs[block_id] += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """Let go of a block table; of cached blocks its tail is evicted first, so that prefixes live longest."""
        for block_id in reversed(block_ids):
            assert self._num_refs[block_id] > 0, f"block {block_id} is released more often than it was taken"
            self._num_refs[block_id] -= 1
            if not self._num_refs[block_id]:
                self._free[block_id] = None
                if block_id not in self.prefix_cache:
                    self._free.move_to_end(block_id, last=False)

    def check_integrity(self, holders: Iterable[Sequence[int]]) -> None:
        """Raise AssertionError unless every block is either free or held by exactly the given block tables."""
        num_refs = [0] * self.num_blocks
        for block_ids in holders:
            for block_id in block_ids:
                num_refs[block_id] += 1
        assert num_refs == self._num_refs, "reference counts differ from the block tables"
        assert num_refs[0] == 0, "the null block is in a block table"
        assert 0 not in self._free, "the null block is in the free list"
        idle = {block_id for block_id in range(1, self.num_blocks) if not num_refs[block_id]}
        assert idle == self._free.keys(), "free blocks are not exactly those without a reference"
        assert self.num_free + self.num_used == self.capacity, "free and used blocks do not add up"
        assert 0 not in self.prefix_cache, "the null block is cached"
        self.prefix_cache.check_integrity()
