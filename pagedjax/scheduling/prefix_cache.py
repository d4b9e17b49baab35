"""Which block holds which prefix: a map from chained SHA-256 digests of full blocks to block ids.

The digest of a block covers its tokens and, through its parent's digest, everything before it, so equal
digests mean equal K and V. Owns the map and its statistics; whether a block is in use or waits to be
reused is the pool's business.
"""

import hashlib
import struct
from collections.abc import Iterable
from dataclasses import dataclass

from pagedjax.scheduling.request import Request


@dataclass(slots=True)
class PrefixCacheStats:
    """Tokens looked up and found at admission; those of resumed requests apart, as they mostly find themselves."""

    queries: int = 0
    hits: int = 0
    resumed_queries: int = 0
    resumed_hits: int = 0


class PrefixCache:
    """Full blocks by content. A block has at most one digest and a digest at most one block."""

    def __init__(self, block_size: int, *, enabled: bool = True) -> None:
        self.block_size = block_size
        self.enabled = enabled
        self.stats = PrefixCacheStats()
        self._block_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}
        self._tokens_format = struct.Struct(f"<{block_size}i")

    def __len__(self) -> int:
        return len(self._digest_of)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._digest_of

    def block_ids(self) -> list[int]:
        """Return the blocks that hold a prefix."""
        return list(self._digest_of)

    def match(self, request: Request) -> list[int]:
        """Return the longest cached chain of full blocks that leaves at least one known token to compute."""
        if not self.enabled or request.skip_reading_prefix_cache:
            return []
        max_blocks = (request.num_tokens - 1) // self.block_size
        self._extend_hashes(request, max_blocks)
        block_ids = []
        for digest in request.block_hashes[:max_blocks]:
            block_id = self._block_of.get(digest)
            if block_id is None:
                break
            block_ids.append(block_id)
        return block_ids

    def register(self, request: Request) -> None:
        """Make the request's full blocks of known, computed tokens findable; of equal blocks the first one stays."""
        first = request.num_registered_tokens // self.block_size
        last = min(request.num_computed_tokens, request.num_tokens) // self.block_size
        request.num_registered_tokens = last * self.block_size
        if not self.enabled:
            return
        self._extend_hashes(request, last)
        for i in range(first, last):
            digest, block_id = request.block_hashes[i], request.block_ids[i]
            if self._block_of.setdefault(digest, block_id) == block_id:
                self._digest_of[block_id] = digest

    def forget(self, block_ids: Iterable[int]) -> None:
        """Drop what is known of these blocks: their content is about to change, or suspect."""
        for block_id in block_ids:
            digest = self._digest_of.pop(block_id, None)
            if digest is not None:
                del self._block_of[digest]

    def clear(self) -> None:
        """Forget every block."""
        self._block_of.clear()
        self._digest_of.clear()

    def record(self, request: Request, num_hit_tokens: int) -> None:
        """Count one admission's lookup."""
        if not self.enabled or request.skip_reading_prefix_cache:
            return
        if request.num_preemptions:
            self.stats.resumed_queries += request.num_tokens
            self.stats.resumed_hits += num_hit_tokens
        else:
            self.stats.queries += request.num_tokens
            self.stats.hits += num_hit_tokens

    def check_integrity(self) -> None:
        """Raise AssertionError unless the two maps are inverses."""
        inverse = {digest: block_id for block_id, digest in self._digest_of.items()}
        assert inverse == self._block_of, "the prefix cache's maps from digest to block and back disagree"

    def _extend_hashes(self, request: Request, num_blocks: int) -> None:
        """Hash the request's blocks up to `num_blocks`, each once in its life: known tokens never change."""
        hashes, size = request.block_hashes, self.block_size
        for i in range(len(hashes), num_blocks):
            parent = hashes[-1] if hashes else _root(request.cache_salt)
            tokens = self._tokens_format.pack(*request.all_token_ids[i * size : (i + 1) * size])
            hashes.append(hashlib.sha256(parent + tokens).digest())


def _root(cache_salt: str | None) -> bytes:
    """Parent digest of first blocks: a salt separates everything that follows from requests without it."""
    return hashlib.sha256((cache_salt or "").encode("utf-8", "surrogatepass")).digest()
