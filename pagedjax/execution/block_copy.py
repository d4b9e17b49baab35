"""Copies of KV cache blocks: several requests begin with one block's content, and one of them is about to go on in it.

One donated call an iteration, over all layers, before the step that writes the copies.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Array, Float, Int

from pagedjax.models.batch import KVCache

COPY_BUCKETS = (8, 64)  # a smaller batch costs as much; of a larger one a second call does the rest


def copy_blocks(kv_cache: KVCache, pairs: Int[Array, "2 n"]) -> KVCache:
    """Copy blocks `pairs[0]` to blocks `pairs[1]`. All are read before any is written; one past the end is a pad."""
    sources, targets = pairs

    def copied(pool: Float[Array, "P K S H"]) -> Float[Array, "P K S H"]:
        return pool.at[targets].set(pool[sources], mode="drop")

    return [(copied(k), copied(v)) for k, v in kv_cache]


def pack_copies(copies: Sequence[tuple[int, int]], bucket: int, *, num_blocks: int) -> np.ndarray:
    """[2, bucket] int32 for `copy_blocks`."""
    packed = np.zeros((2, bucket), np.int32)
    packed[1] = num_blocks
    if copies:
        packed[:, : len(copies)] = np.array(copies, np.int32).T
    return packed
