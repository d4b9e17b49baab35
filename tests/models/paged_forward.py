"""Runs a model over a paged pool the way the engine's step does: any split of tokens into chunks, any batch.

Blocks are handed out in a scrambled order and batches are padded, so that a test sees addressing mistakes.
"""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pagedjax.models.batch import AttentionBatch, KVCache
from pagedjax.models.causal_lm import CausalLM

BLOCK_SIZE, NUM_BLOCKS, MAX_BLOCKS = 8, 64, 12


@dataclass
class PagedForward:
    """A model, its pool, and the blocks and length of every request that has run so far."""

    model: CausalLM
    cache: KVCache
    tables: dict[str, list[int]] = field(default_factory=dict)
    lengths: dict[str, int] = field(default_factory=dict)
    free: list[int] = field(default_factory=lambda: np.random.RandomState(7).permutation(NUM_BLOCKS)[:-1].tolist())

    def __post_init__(self) -> None:
        self.free = [block for block in self.free if block != 0]  # the null block
        graphdef, state = nnx.split(self.model)
        self._leaves, treedef = jax.tree.flatten(state)

        def step(leaves: list, token_ids: jax.Array, batch: AttentionBatch, cache: KVCache) -> tuple:
            model = nnx.merge(graphdef, jax.tree.unflatten(treedef, leaves))
            hidden, cache = model(token_ids, batch, cache)
            return model.compute_logits(hidden), cache

        self._step = jax.jit(step, donate_argnames="cache")

    def __call__(self, chunks: dict[str, list[int]], *, pad_tokens_to: int = 0) -> dict[str, np.ndarray]:
        """Compute the next tokens of some requests in one step; return each one's logits, [its tokens, V]."""
        token_ids = np.concatenate([np.array(chunk, np.int32) for chunk in chunks.values()])
        padding = max(pad_tokens_to - len(token_ids), 0)
        batch, starts = self._batch(chunks, padding)
        padded_ids = np.pad(token_ids, (0, padding), constant_values=5)
        logits, self.cache = self._step(self._leaves, jnp.asarray(padded_ids), batch, self.cache)
        return {name: np.asarray(logits[starts[i] : starts[i + 1]]) for i, name in enumerate(chunks)}

    def _batch(self, chunks: dict[str, list[int]], padding: int) -> tuple[AttentionBatch, list[int]]:
        positions, slots, tables, starts, seq_lens = [], [], [], [0], []
        for name, chunk in chunks.items():
            begin, end = self.lengths.get(name, 0), self.lengths.get(name, 0) + len(chunk)
            table = self.tables.setdefault(name, [])
            while len(table) * BLOCK_SIZE < end:
                table.append(self.free.pop())
            positions += range(begin, end)
            slots += [table[i // BLOCK_SIZE] * BLOCK_SIZE + i % BLOCK_SIZE for i in range(begin, end)]
            tables.append(table + [0] * (MAX_BLOCKS - len(table)))
            starts.append(starts[-1] + len(chunk))
            seq_lens.append(end)
            self.lengths[name] = end
        batch = AttentionBatch(
            positions=jnp.asarray(positions + [0] * padding, jnp.int32),
            slot_mapping=jnp.asarray(slots + [NUM_BLOCKS * BLOCK_SIZE] * padding, jnp.int32),
            block_tables=jnp.asarray([*tables, [0] * MAX_BLOCKS], jnp.int32),  # the last row is a padding request
            query_start_loc=jnp.asarray([*starts, starts[-1]], jnp.int32),
            seq_lens=jnp.asarray([*seq_lens, 0], jnp.int32),
        )
        return batch, starts


def empty_cache(model: CausalLM, dtype: jnp.dtype) -> KVCache:
    """Allocate a pool full of garbage, which a correct forward never reads."""
    config = model.config
    shape = (NUM_BLOCKS, config.num_kv_heads, BLOCK_SIZE, config.head_dim)
    return [(jnp.full(shape, 1e3, dtype), jnp.full(shape, 1e3, dtype)) for _ in range(config.num_layers)]
