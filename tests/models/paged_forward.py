"""Runs a model over a paged pool the way the engine's step does: any split of tokens into chunks, any batch.

Blocks are handed out in a scrambled order, unused ones hold garbage, and batches are padded with garbage tokens, so
that a test sees addressing mistakes.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pagedjax.models.batch import AttentionBatch, KVCache
from pagedjax.models.causal_lm import CausalLM

BLOCK_SIZE, NUM_BLOCKS, MAX_BLOCKS = 8, 64, 12
NUM_ROWS = 4


class PagedForward:
    """A model, its pool, and the blocks and length of every request that has run so far.

    `token_buckets` are the lengths that batches are padded to, one executable each.
    """

    def __init__(self, model: CausalLM, dtype: jnp.dtype, *, token_buckets: tuple[int, ...] = (48,)):
        self.token_buckets = token_buckets
        self.cache = garbage_cache(model, dtype)
        self.tables, self.lengths = {}, {}
        self.free = [block for block in np.random.RandomState(7).permutation(NUM_BLOCKS).tolist() if block != 0]
        graphdef, state = nnx.split(model)
        self.leaves, treedef = jax.tree.flatten(state)

        def step(leaves, token_ids, batch, cache):
            model = nnx.merge(graphdef, jax.tree.unflatten(treedef, leaves))
            hidden, cache = model(token_ids, batch, cache)
            return model.compute_logits(hidden), cache

        self.step = jax.jit(step, donate_argnames="cache")

    def __call__(self, chunks: dict[str, list[int]]) -> dict[str, np.ndarray]:
        """Compute the next tokens of some requests in one step; return each one's logits, [its tokens, V]."""
        token_ids, batch = self.inputs(chunks)
        logits, self.cache = self.step(self.leaves, token_ids, batch, self.cache)
        ends = np.cumsum([len(chunk) for chunk in chunks.values()])
        parts = np.split(np.asarray(logits), ends)
        return dict(zip(chunks, parts, strict=False))

    def lower(self, chunks: dict[str, list[int]]) -> jax.stages.Lowered:
        """Lower the step that would compute `chunks`."""
        return self.step.lower(self.leaves, *self.inputs(chunks), self.cache)

    def inputs(self, chunks: dict[str, list[int]]) -> tuple[jax.Array, AttentionBatch]:
        """Give the chunks their blocks; return padded token ids and the batch."""
        token_ids, positions, slots, tables, seq_lens = [], [], [], [], []
        for name, chunk in chunks.items():
            begin, end = self.lengths.get(name, 0), self.lengths.get(name, 0) + len(chunk)
            table = self.tables.setdefault(name, [])
            while len(table) * BLOCK_SIZE < end:
                table.append(self.free.pop())
            token_ids += chunk
            positions += range(begin, end)
            slots += [table[i // BLOCK_SIZE] * BLOCK_SIZE + i % BLOCK_SIZE for i in range(begin, end)]
            tables.append(table + [0] * (MAX_BLOCKS - len(table)))
            seq_lens.append(end)
            self.lengths[name] = end
        num_tokens = min(bucket for bucket in self.token_buckets if bucket >= len(token_ids))
        pads, pad_rows = num_tokens - len(token_ids), NUM_ROWS - len(chunks)
        starts = np.cumsum([0] + [len(chunk) for chunk in chunks.values()] + [0] * pad_rows)
        batch = AttentionBatch(
            positions=jnp.asarray(positions + [3] * pads, jnp.int32),
            slot_mapping=jnp.asarray(slots + [NUM_BLOCKS * BLOCK_SIZE] * pads, jnp.int32),
            block_tables=jnp.asarray(tables + [[0] * MAX_BLOCKS] * pad_rows, jnp.int32),
            query_start_loc=jnp.asarray(starts, jnp.int32),
            seq_lens=jnp.asarray(seq_lens + [0] * pad_rows, jnp.int32),
        )
        return jnp.asarray(token_ids + [7] * pads, jnp.int32), batch


def garbage_cache(model: CausalLM, dtype: jnp.dtype) -> KVCache:
    """Allocate a pool of large values, which a correct forward never lets through."""
    config = model.config
    shape = (NUM_BLOCKS, config.num_kv_heads, BLOCK_SIZE, config.head_dim)
    return [(jnp.full(shape, 1e3, dtype), jnp.full(shape, 1e3, dtype)) for _ in range(config.num_layers)]
