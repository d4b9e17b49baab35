"""A ragged batch over a paged pool, made from the lengths of its requests."""

import dataclasses
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention import paged_attention


@dataclass(frozen=True)
class Batch:
    """Arguments of `paged_attention` as numpy arrays; slots that no request owns hold garbage."""

    q: np.ndarray
    k_pool: np.ndarray
    v_pool: np.ndarray
    block_tables: np.ndarray
    query_start_loc: np.ndarray
    seq_lens: np.ndarray
    scale: float

    @property
    def num_tokens(self) -> int:
        """Tokens that are no padding."""
        return int(self.query_start_loc[-1])

    def replace(self, **changes) -> "Batch":
        return dataclasses.replace(self, **changes)

    def owned(self) -> np.ndarray:
        """Which slots hold a live token, [P, S]."""
        num_blocks, _, block_size, _ = self.k_pool.shape
        owned = np.zeros((num_blocks, block_size), bool)
        for blocks, seq_len in zip(self.block_tables, self.seq_lens, strict=True):
            position = np.arange(seq_len)
            owned[blocks[position // block_size], position % block_size] = True
        return owned

    def attend(self, *, dtype=jnp.float32, **options) -> np.ndarray:
        """Run the op with the floating arrays in the given type; float32."""
        floats = [jnp.asarray(array, dtype) for array in (self.q, self.k_pool, self.v_pool)]
        integers = [jnp.asarray(array) for array in (self.block_tables, self.query_start_loc, self.seq_lens)]
        out = paged_attention(*floats, *integers, scale=self.scale, **options)
        assert out.dtype == dtype
        return np.asarray(out.astype(jnp.float32))


@pytest.fixture(autouse=True)
def _strict_promotion():
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


@pytest.fixture
def make_batch():
    return build_batch


def build_batch(
    lens, *, heads=(4, 2), head_dim=16, block_size=16, num_blocks=160, max_blocks=24, pad_tokens=0, pad_requests=0
) -> Batch:
    """Build requests of (query_len, seq_len); table entries past a sequence's end name other requests' blocks."""
    rng = np.random.default_rng(7)
    num_heads, num_kv_heads = heads
    query_lens = np.array([query_len for query_len, _ in lens] + [0] * pad_requests)
    seq_lens = np.array([seq_len for _, seq_len in lens] + [0] * pad_requests, np.int32)
    block_tables = rng.integers(0, num_blocks, (len(seq_lens), max_blocks)).astype(np.int32)
    free = rng.permutation(np.arange(1, num_blocks))
    for row, seq_len in zip(block_tables, seq_lens, strict=True):
        needed = -(-seq_len // block_size)
        row[:needed], free = free[:needed], free[needed:]
    pool_shape = (num_blocks, num_kv_heads, block_size, head_dim)
    return Batch(
        q=rng.normal(size=(query_lens.sum() + pad_tokens, num_heads, head_dim)).astype(np.float32),
        k_pool=rng.normal(size=pool_shape).astype(np.float32),
        v_pool=rng.normal(size=pool_shape).astype(np.float32),
        block_tables=block_tables,
        query_start_loc=np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32),
        seq_lens=seq_lens,
        scale=head_dim**-0.5,
    )
