"""The functions of a draft model: a small model whose KV cache has the target's blocks, tables and slots.

    positions of a row       0  ..  c-2      c-1    c        c+1 ..
    K and V of the draft     right           ?      -
    first draft step                         both computed: the newest token and the one before
    next ones                                                drafts, one a step

The token at c - 1 is computed again because it may have been the last draft of a step that accepted all of them: the
draft model never read that one. Tokens come from the history, so refused drafts leave nothing behind.
"""

from dataclasses import replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from pagedjax.execution.buckets import MIN_DECODE_ROWS
from pagedjax.execution.probabilities import probabilities
from pagedjax.execution.request_state import RowState, gather_sampling_rows
from pagedjax.execution.sampler import sample
from pagedjax.execution.step import find_slots, request_of_tokens
from pagedjax.models.batch import AttentionBatch, KVCache
from pallas_kernels import hopper

DraftVariant = Literal["plain", "full"]  # of the sampler, see there
DRAFT_VARIANTS: tuple[DraftVariant, ...] = ("plain", "full")


class DraftFunctions:
    """Jitted by whoever owns the arrays. `leaves` are the draft model's parameters as a flat tuple."""

    def __init__(self, model: nnx.Module, *, block_size: int, num_blocks: int):
        self._graphdef, state = nnx.split(model)
        leaves, self._treedef = jax.tree.flatten(state)
        self.leaves = tuple(leaves)
        self._pool = {"block_size": block_size, "num_blocks": num_blocks}

    def prefill(
        self, leaves: tuple, kv_cache: KVCache, state: RowState, history: Int[Array, "R L"], packed: Int[Array, "3 B"],
        *, num_tokens: int,
    ) -> KVCache:  # fmt: skip
        """Compute K and V of tokens in the history: `packed` are rows, first positions and numbers of tokens."""
        rows, starts, lens = packed
        ends = jnp.cumsum(lens, dtype=jnp.int32)
        request = request_of_tokens(ends, num_tokens)
        token_index = jnp.arange(num_tokens, dtype=jnp.int32)
        is_query = token_index < ends[-1]
        positions = jnp.where(is_query, starts[request] + token_index - (ends - lens)[request], 0)
        tables = state.block_tables.at[rows].get(mode="clip")
        batch = AttentionBatch(
            positions=positions,
            slot_mapping=find_slots(tables, request, positions, is_query, **self._pool),
            block_tables=tables,
            query_start_loc=jnp.concatenate([jnp.zeros(1, jnp.int32), ends]),
            seq_lens=jnp.where(lens > 0, starts + lens, 0),
        )
        token_ids = history.at[rows[request], positions].get(mode="clip")
        return self._merge(leaves)(token_ids, batch, kv_cache)[1]

    def propose(
        self, leaves: tuple, kv_cache: KVCache, state: RowState, history: Int[Array, "R L"], rows: Int[Array, " B"],
        updates: Int[Array, "3 U"], chances: Float[Array, "R n V"] | None, *, variant: DraftVariant,
    ) -> tuple[KVCache, RowState, Int[Array, "R L"], Int[Array, "B n"], Float[Array, "R n V"] | None]:  # fmt: skip
        """Draft K tokens for `rows` (a row of R is a pad) with the noise that the target will sample with.

        `updates` are the rows, table indices and ids of blocks that the step begins to use. `chances`, where they are
        wanted, take in the distribution that each draft is drawn from.
        """
        assert state.drafts is not None, "an engine with speculation has rows with drafts"
        num_drafts, num_rows = state.drafts.shape[1], rows.shape[0]
        num_pads = max(0, MIN_DECODE_ROWS[hopper.platform()] - num_rows)
        rows = jnp.pad(rows, (0, num_pads), constant_values=state.block_tables.shape[0])
        block_tables = state.block_tables.at[updates[0], updates[1]].set(updates[2], mode="drop")
        state = replace(state, block_tables=block_tables)
        newest = state.context_lens.at[rows].get(mode="clip")
        history = history.at[rows, newest].set(state.last_token_ids.at[rows].get(mode="clip"), mode="drop")
        both = jnp.stack([newest - 1, newest], axis=1)  # [B, 2]
        token_ids = history.at[rows[:, None], jnp.maximum(both, 0)].get(mode="clip")
        hidden, kv_cache = self._run(leaves, kv_cache, state, jnp.repeat(rows, 2), both.reshape(-1), token_ids)
        params = gather_sampling_rows(state, rows, None)

        def draw(hidden: Array, i: Any, chances: Array | None) -> tuple[Array, Array | None]:
            logits, positions = self._merge(leaves).compute_logits(hidden), newest + 1 + i
            if chances is not None:
                chances = chances.at[rows, i].set(probabilities(logits, positions, params)[0], mode="drop")
            return sample(logits, positions, params, variant=variant)[0], chances

        first, chances = draw(hidden[1::2], 0, chances)
        drafts = jnp.full((rows.shape[0], num_drafts), -1, jnp.int32).at[:, 0].set(first)

        def draft_next(i: Int[Array, ""], carry: tuple) -> tuple:
            kv_cache, drafts, chances = carry
            hidden, kv_cache = self._run(leaves, kv_cache, state, rows, newest + i, drafts.at[:, i - 1].get())
            token_ids, chances = draw(hidden, i, chances)
            return kv_cache, drafts.at[:, i].set(token_ids), chances

        # A loop, so that the model is compiled twice and not K times; its length is known, so no host waits for it.
        kv_cache, drafts, chances = jax.lax.fori_loop(1, num_drafts, draft_next, (kv_cache, drafts, chances))
        assert state.drafts is not None, "the rows of an engine with speculation hold drafts"
        state = replace(state, drafts=state.drafts.at[rows].set(drafts, mode="drop"))
        return kv_cache, state, history, drafts[:num_rows], chances

    def _run(
        self, leaves: tuple, kv_cache: KVCache, state: RowState, rows: Array, positions: Array, token_ids: Array
    ) -> tuple[Array, KVCache]:
        """Compute one token at each of `positions`, as rows of their own; those before a row's first are padding."""
        num_rows, max_blocks = state.block_tables.shape
        is_query = (rows < num_rows) & (positions >= 0) & (positions < max_blocks * self._pool["block_size"])
        positions = jnp.where(is_query, positions, 0)
        tables = state.block_tables.at[rows].get(mode="clip")
        index = jnp.arange(rows.shape[0], dtype=jnp.int32)
        batch = AttentionBatch(
            positions=positions,
            slot_mapping=find_slots(tables, index, positions, is_query, **self._pool),
            block_tables=tables,
            query_start_loc=jnp.arange(rows.shape[0] + 1, dtype=jnp.int32),
            seq_lens=jnp.where(is_query, positions + 1, 0),
        )
        return self._merge(leaves)(token_ids.reshape(-1), batch, kv_cache)

    def _merge(self, leaves: tuple) -> Any:
        return nnx.merge(self._graphdef, self._treedef.unflatten(leaves))
