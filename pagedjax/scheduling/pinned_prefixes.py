"""Prefixes whose blocks stay in the pool whatever else needs room: an operator's, not a request's.

Owns the list of them. A pin is a reference to each of the prefix's full blocks, as a request's block table is.
"""

from collections.abc import Callable

from pagedjax.errors import InvalidRequestError
from pagedjax.scheduling.block_pool import BlockPool
from pagedjax.scheduling.request import Request


class PinnedPrefixes:
    """Pinned prefixes of one pool, by the digest of their last full block. `num_reserved()` blocks are never pinned."""

    def __init__(self, pool: BlockPool, *, num_reserved: Callable[[], int]) -> None:
        self._pool = pool
        self._num_reserved = num_reserved
        self._block_ids: dict[bytes, list[int]] = {}

    @property
    def num_blocks(self) -> int:
        """Blocks that are pinned, those of several prefixes once."""
        return len(set().union(*self._block_ids.values()))

    def block_tables(self) -> list[list[int]]:
        """Return the blocks of each pinned prefix."""
        return list(self._block_ids.values())

    def others(self, block_ids: list[int]) -> set[int]:
        """Return those of some blocks that are not pinned."""
        return set(block_ids).difference(*self._block_ids.values())

    def pin(self, prefix: Request) -> int:
        """Keep the full blocks of a prompt that is in the prefix cache; return how many tokens they hold.

        Raises:
          InvalidRequestError: there is no full block, one is not cached, or requests would be left too little room.
        """
        num_wanted = self._num_full_blocks(prefix)
        if not num_wanted:
            raise InvalidRequestError(
                f"prefix has {prefix.num_tokens} tokens, a block holds {self._pool.prefix_cache.block_size} and only "
                "full blocks are kept; give a longer prefix",
                param="prompt",
            )
        block_ids = self._pool.prefix_cache.find(prefix, num_wanted)
        if len(block_ids) < num_wanted:
            raise InvalidRequestError(
                f"{len(block_ids)} of the prefix's {num_wanted} full blocks are cached; compute it first, with "
                "--enable-prefix-caching on",
                param="prompt",
            )
        if prefix.block_hashes[num_wanted - 1] not in self._block_ids:
            self._check_room(block_ids)
            self._pool.retain(block_ids)
            self._block_ids[prefix.block_hashes[num_wanted - 1]] = block_ids
        return num_wanted * self._pool.prefix_cache.block_size

    def unpin(self, prefix: Request) -> bool:
        """Let go of a prefix that was pinned; it stays cached until its blocks are needed. False if it was not."""
        num_blocks = self._num_full_blocks(prefix)
        self._pool.prefix_cache.find(prefix, num_blocks)
        block_ids = self._block_ids.pop(prefix.block_hashes[num_blocks - 1], None) if num_blocks else None
        if block_ids is not None:
            self._pool.release(block_ids)
        return block_ids is not None

    def check_integrity(self) -> None:
        """Raise AssertionError if a pinned block could not be found or too many blocks are pinned."""
        pinned = set().union(*self._block_ids.values())
        assert all(block_id in self._pool.prefix_cache for block_id in pinned), "a pinned block is not cached"
        assert not pinned or len(pinned) + self._num_reserved() <= self._pool.capacity, "pins leave requests no room"

    def _num_full_blocks(self, prefix: Request) -> int:
        return prefix.num_tokens // self._pool.prefix_cache.block_size

    def _check_room(self, block_ids: list[int]) -> None:
        num_pinned = len(set(block_ids).union(*self._block_ids.values()))
        if num_pinned + self._num_reserved() > self._pool.capacity:
            raise InvalidRequestError(
                f"with this prefix {num_pinned} of {self._pool.capacity} KV cache blocks would be pinned, a request of "
                f"max_model_len needs {self._num_reserved()}, or a beam search that is under way does; unpin another, "
                "shorten it or enlarge the KV cache (--num-gpu-blocks-override or --kv-cache-memory-bytes)",
                param="prompt",
            )
