"""Which block holds which prefix: a map from chained SHA-256 digests of full blocks to block ids.

The digest of a block covers its tokens and, through its parent's digest, everything before it, so equal
digests mean equal K and V. Owns the map and its statistics; whether a block is in use or waits to be
reused is the pool's business.
"""

import hashlib
import struct
from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass

from pagedjax.scheduling.request import Request

TOKEN_BYTES = 4  # of a packed token id


@dataclass(slots=True)
class PrefixCacheStats:
    """Tokens looked up and found at admission; those of resumed requests apart, as they mostly find themselves.

    Partial block misses are tokens that a cached block holds and that are computed again all the same, because a hit is
    whole blocks: smaller blocks would save them. Evictions are cached blocks that were reused for other content.
    """

    queries: int = 0
    hits: int = 0
    partial_block_misses: int = 0
    resumed_queries: int = 0
    resumed_hits: int = 0
    evictions: int = 0


class PrefixCache:
    """Full blocks by content. A block has at most one digest and a digest at most one block."""

    def __init__(self, block_size: int, *, enabled: bool = True) -> None:
        self.block_size = block_size
        self.enabled = enabled
        self.stats = PrefixCacheStats()
        self._block_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}
        self._block_format = struct.Struct(f"<{block_size}i")
        self._place_of: dict[int, tuple[bytes, bytes]] = {}  # the parent's digest and the block's own tokens, packed
        self._siblings: dict[bytes, list[bytes]] = {}  # by the parent's digest: packed tokens, sorted

    def __len__(self) -> int:
        return len(self._digest_of)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._digest_of

    def block_ids(self) -> list[int]:
        """Return the blocks that hold a prefix."""
        return list(self._digest_of)

    def digest(self, block_id: int) -> bytes | None:
        """Return the digest of the prefix that a block holds, None if it holds none."""
        return self._digest_of.get(block_id)

    def match(self, request: Request) -> list[int]:
        """Return the longest cached chain of full blocks that leaves at least one known token to compute."""
        if not self.enabled or request.skip_reading_prefix_cache:
            return []
        return self.find(request, (request.num_tokens - 1) // self.block_size)

    def find(self, request: Request, max_blocks: int) -> list[int]:
        """Return the longest cached chain of the request's first `max_blocks` full blocks."""
        self._extend_hashes(request, max_blocks)
        block_ids = []
        for digest in request.block_hashes[:max_blocks]:
            block_id = self._block_of.get(digest)
            if block_id is None:
                break
            block_ids.append(block_id)
        return block_ids

    def blocks_of(self, request: Request) -> list[int]:
        """Return all blocks that hold a prefix of this request, whether they can be reached from its start or not."""
        return [self._block_of[digest] for digest in request.block_hashes if digest in self._block_of]

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
            if digest not in self._block_of:
                self._block_of[digest], self._digest_of[block_id] = block_id, digest
                place = (self._parent(request, i), self._packed(request, i))
                self._place_of[block_id] = place
                insort(self._siblings.setdefault(place[0], []), place[1])

    def evict(self, block_ids: Iterable[int]) -> None:
        """Forget blocks that are about to get other content, and count those that held a prefix."""
        num_cached = len(self)
        self.forget(block_ids)
        self.stats.evictions += num_cached - len(self)

    def forget(self, block_ids: Iterable[int]) -> None:
        """Drop what is known of these blocks: their content is suspect."""
        for block_id in block_ids:
            digest = self._digest_of.pop(block_id, None)
            if digest is None:
                continue
            del self._block_of[digest]
            parent, tokens = self._place_of.pop(block_id)
            siblings = self._siblings[parent]
            del siblings[bisect_left(siblings, tokens)]
            if not siblings:
                del self._siblings[parent]

    def clear(self) -> None:
        """Forget every block."""
        for known in (self._block_of, self._digest_of, self._place_of, self._siblings):
            known.clear()

    def record(self, request: Request, num_hit_tokens: int, *, num_on_host: int = 0) -> None:
        """Count one admission's lookup; the host has `num_on_host` tokens after those that were found here."""
        if not self.enabled or request.skip_reading_prefix_cache:
            return
        if request.num_preemptions:
            self.stats.resumed_queries += request.num_tokens
            self.stats.resumed_hits += num_hit_tokens
        else:
            self.stats.queries += request.num_tokens
            self.stats.hits += num_hit_tokens
            self.stats.partial_block_misses += self._num_partial(request, num_hit_tokens + num_on_host)

    def check_integrity(self) -> None:
        """Raise AssertionError unless the two maps are inverses."""
        inverse = {digest: block_id for block_id, digest in self._digest_of.items()}
        assert inverse == self._block_of, "the prefix cache's maps from digest to block and back disagree"
        assert self._place_of.keys() == self._digest_of.keys(), "a cached block has no place in its chain, or two"
        places = [(parent, tokens) for parent, siblings in self._siblings.items() for tokens in siblings]
        assert sorted(places) == sorted(self._place_of.values()), "siblings differ from the places of cached blocks"

    def _extend_hashes(self, request: Request, num_blocks: int) -> None:
        """Hash the request's blocks up to `num_blocks`, each once in its life: known tokens never change."""
        hashes = request.block_hashes
        for i in range(len(hashes), num_blocks):
            hashes.append(hashlib.sha256(self._parent(request, i) + self._packed(request, i)).digest())

    def _parent(self, request: Request, index: int) -> bytes:
        return request.block_hashes[index - 1] if index else _root(request.cache_salt)

    def _packed(self, request: Request, index: int) -> bytes:
        return self._block_format.pack(*request.all_token_ids[index * self.block_size : (index + 1) * self.block_size])

    def _num_partial(self, request: Request, num_found: int) -> int:
        """Count the tokens after what was found, save the last, with which a cached block goes on."""
        siblings = self._siblings.get(self._parent(request, num_found // self.block_size), [])
        end = min(num_found + self.block_size, request.num_tokens - 1)
        token_ids = request.all_token_ids[num_found:end]
        tokens = struct.pack(f"<{len(token_ids)}i", *token_ids)
        i = bisect_left(siblings, tokens)  # neighbours share most
        shared = (_num_shared_bytes(tokens, sibling) for sibling in siblings[max(i - 1, 0) : i + 1])
        return max(shared, default=0) // TOKEN_BYTES


def _root(cache_salt: str | None) -> bytes:
    """Parent digest of first blocks: a salt separates everything that follows from requests without it."""
    return hashlib.sha256((cache_salt or "").encode("utf-8", "surrogatepass")).digest()


def _num_shared_bytes(first: bytes, second: bytes) -> int:
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (one, other) in pairs if one != other), min(len(first), len(second)))
