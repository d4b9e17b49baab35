"""The pure functions that are jitted, one executable a bucket: prepare, forward, sample, score.

    decode   rows -> ids      forward and sample in one call, for batches where every row samples plainly
    forward  tokens -> hidden the ragged general case: chunks of prompts beside single tokens
    sample   hidden -> ids    the rest of the general case
    beam     hidden -> the most likely tokens, for rows of beam searches
    logprobs hidden -> log probabilities of the sampled tokens
    score    hidden -> log probabilities of prompt tokens

Positions, slots and lengths are computed here from the device rows, never on the host. The KV cache and the row
state are donated. Knows nothing of requests or of scheduling.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from pagedjax.execution.buckets import SCORE_ROWS, StepShape
from pagedjax.execution.logprobs import top_logprobs
from pagedjax.execution.model_input import FROM_ROW
from pagedjax.execution.request_state import RowState, SamplerState, gather_sampling_rows
from pagedjax.execution.sampler import Variant, sample
from pagedjax.models.batch import AttentionBatch, KVCache
from pagedjax.sampling_params import MAX_BEAM_WIDTH

NUM_BEAM_CANDIDATES = 2 * MAX_BEAM_WIDTH  # tokens after each beam that the host chooses from
RESULT_COLUMNS = 3  # token id, number of new tokens, 1 where the logits were finite; see `verification` for drafts


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TokenLogprobs:
    """Raw log probabilities beside B sampled or given tokens."""

    logprob: Float[Array, " B"]
    rank: Int[Array, " B"]
    top_ids: Int[Array, "B n"]
    top_logprobs: Float[Array, "B n"]


class StepFunctions:
    """The step functions of one model. `leaves` are the model's parameters as a flat tuple."""

    def __init__(self, model: nnx.Module, *, block_size: int, num_blocks: int, max_num_seqs: int, max_logprobs: int):
        self._graphdef, state = nnx.split(model)
        leaves, self._treedef = jax.tree.flatten(state)
        self.leaves = tuple(leaves)
        self._block_size = block_size
        self._num_blocks = num_blocks
        self._max_num_seqs = max_num_seqs
        self._max_logprobs = max_logprobs

    def __repr__(self) -> str:
        """Name everything that the functions depend on and the shapes of their arguments do not tell."""
        sizes = (self._block_size, self._max_num_seqs, self._max_logprobs)
        return f"StepFunctions{sizes} of {self._treedef}"

    def decode(
        self, leaves: tuple, kv_cache: KVCache, state: RowState, packed: Array, *, shape: StepShape, variant: Variant
    ) -> tuple[KVCache, RowState, Array]:
        """One token for every row. Returns the result array [B, RESULT_COLUMNS]."""
        hidden, kv_cache, state = self._run_model(leaves, kv_cache, state, packed, shape)
        rows = packed[: shape.num_rows]
        state, _, result = self._sample_rows(leaves, state, None, hidden, rows, variant)
        return kv_cache, state, result

    def forward(
        self, leaves: tuple, kv_cache: KVCache, state: RowState, packed: Array, *, shape: StepShape
    ) -> tuple[KVCache, RowState, Array, Array]:
        """Returns hidden states [T, D], and those of each row's last token padded to [max_num_seqs, D]."""
        hidden, kv_cache, state = self._run_model(leaves, kv_cache, state, packed, shape)
        query_lens = packed[shape.num_rows : 2 * shape.num_rows]
        last = jnp.clip(jnp.cumsum(query_lens, dtype=jnp.int32) - 1, 0)
        padding = jnp.zeros(self._max_num_seqs - shape.num_rows, jnp.int32)
        return kv_cache, state, hidden, hidden[jnp.concatenate([last, padding])]

    def sample(
        self, leaves: tuple, state: RowState, wide: SamplerState | None, last_hidden: Array, rows: Array,
        *, variant: Variant,
    ) -> tuple[RowState, SamplerState | None, Array]:  # fmt: skip
        """Sample for `rows` [B] from the first B of `last_hidden` [max_num_seqs, D]. Returns the result array last."""
        return self._sample_rows(leaves, state, wide, last_hidden[: rows.shape[0]], rows, variant)

    def beam(self, leaves: tuple, last_hidden: Array, *, num_rows: int) -> Int[Array, "B n"]:
        """Return ids of each row's NUM_BEAM_CANDIDATES most likely tokens, then the bits of their log probabilities.

        The first B of `last_hidden` [max_num_seqs, D] count. Log probabilities are NaN where logits were not finite.
        """
        with jax.named_scope("beam"):
            logits = self._merge(leaves).compute_logits(last_hidden[:num_rows])
            first = jnp.zeros(num_rows, jnp.int32)
            _, _, ids, logprobs = top_logprobs(logits, first, num=NUM_BEAM_CANDIDATES)
            return jnp.concatenate([ids, jax.lax.bitcast_convert_type(logprobs, jnp.int32)], axis=1)

    def logprobs(self, leaves: tuple, last_hidden: Array, result: Array) -> TokenLogprobs:
        """Log probabilities of what `sample` put into `result`; the logits are computed again, for the few who ask."""
        with jax.named_scope("logprobs"):
            logits = self._merge(leaves).compute_logits(last_hidden[: result.shape[0]])
            return TokenLogprobs(*top_logprobs(logits, result[:, 0], num=self._max_logprobs))

    def score(self, leaves: tuple, hidden: Array, token_index: Array, targets: Array) -> TokenLogprobs:
        """Log probabilities of `targets` [SCORE_ROWS] after the tokens at `token_index` of `hidden` [T, D]."""
        assert token_index.shape == (SCORE_ROWS,)
        with jax.named_scope("score"):
            logits = self._merge(leaves).compute_logits(hidden[token_index])
            return TokenLogprobs(*top_logprobs(logits, targets, num=self._max_logprobs))

    def logits(self, leaves: tuple, hidden: Array) -> Array:
        """Return the logits [n, V] of hidden states [n, D], inside a jitted function."""
        return self._merge(leaves).compute_logits(hidden)

    def _merge(self, leaves: tuple) -> Any:
        return nnx.merge(self._graphdef, self._treedef.unflatten(leaves))

    def _run_model(
        self, leaves: tuple, kv_cache: KVCache, state: RowState, packed: Array, shape: StepShape
    ) -> tuple[Array, KVCache, RowState]:
        with jax.named_scope("prepare"):
            state, token_ids, batch = prepare(
                state, packed, shape=shape, block_size=self._block_size, num_blocks=self._num_blocks
            )
        hidden, kv_cache = self._merge(leaves)(token_ids, batch, kv_cache)
        return hidden, kv_cache, state

    def _sample_rows(
        self, leaves: tuple, state: RowState, wide: SamplerState | None, hidden: Array, rows: Array, variant: Variant
    ) -> tuple[RowState, SamplerState | None, Array]:
        with jax.named_scope("sample"):
            logits = self._merge(leaves).compute_logits(hidden)  # [B, V]
            positions = state.context_lens.at[rows].get(mode="clip")
            params = gather_sampling_rows(state, rows, wide)
            token_ids, is_finite = sample(logits, positions, params, variant=variant)
            state = replace(state, last_token_ids=state.last_token_ids.at[rows].set(token_ids, mode="drop"))
            if wide is not None:
                wide = record_tokens(wide, rows, token_ids)
            is_finite = is_finite.astype(jnp.int32)
            result = jnp.stack([token_ids, is_finite, is_finite], axis=1)  # [B, RESULT_COLUMNS]
        return state, wide, result


def prepare(
    state: RowState, packed: Int[Array, " C"], *, shape: StepShape, block_size: int, num_blocks: int
) -> tuple[RowState, Int[Array, " T"], AttentionBatch]:
    """Apply one step's changes to the rows and derive tokens, positions, slots and lengths from them.

    A token past the last query, or whose block is the null block, gets the slot one past the end, so that its
    write is dropped.
    """
    num_rows, num_tokens = shape.num_rows, shape.num_tokens
    rows, query_lens = packed[:num_rows], packed[num_rows : 2 * num_rows]
    updates = packed[2 * num_rows : 2 * num_rows + 3 * shape.num_updates].reshape(3, shape.num_updates)
    block_tables = state.block_tables.at[updates[0], updates[1]].set(updates[2], mode="drop")
    context_lens = state.context_lens.at[rows].get(mode="clip")
    seq_lens = jnp.where(query_lens > 0, context_lens + query_lens, 0)
    ends = jnp.cumsum(query_lens, dtype=jnp.int32)
    query_start_loc = jnp.concatenate([jnp.zeros(1, jnp.int32), ends])

    token_index = jnp.arange(num_tokens, dtype=jnp.int32)
    request = token_index if shape.is_decode else request_of_tokens(ends, num_tokens)  # decode: rows without come last
    is_query = token_index < ends[-1]
    positions = jnp.where(is_query, context_lens[request] + token_index - query_start_loc[request], 0)
    row_tables = block_tables.at[rows].get(mode="clip")  # [B, M]
    slots = find_slots(row_tables, request, positions, is_query, block_size=block_size, num_blocks=num_blocks)

    last_token_ids = state.last_token_ids.at[rows].get(mode="clip")[request]
    token_ids = last_token_ids
    if not shape.is_decode:
        given = packed[packed.shape[0] - num_tokens :]
        token_ids = jnp.where(given == FROM_ROW, last_token_ids, given)
        if state.drafts is not None:
            draft = state.drafts.at[rows[request], FROM_ROW - 1 - given].get(mode="clip")
            token_ids = jnp.where(given < FROM_ROW, jnp.maximum(draft, 0), token_ids)
    context_lens = state.context_lens.at[rows].set(seq_lens, mode="drop")
    state = replace(state, context_lens=context_lens, block_tables=block_tables)
    if shape.is_verify:  # the same tokens as rows of one: kernels for one query token read long contexts in parallel
        query_start_loc = jnp.minimum(jnp.arange(num_tokens + 1, dtype=jnp.int32), ends[-1])
        row_tables, seq_lens = row_tables[request], jnp.where(is_query, positions + 1, 0)
    batch = AttentionBatch(
        positions=positions,
        slot_mapping=slots,
        block_tables=row_tables,
        query_start_loc=query_start_loc,
        seq_lens=seq_lens,
    )
    return state, token_ids, batch


def request_of_tokens(ends: Int[Array, " B"], num_tokens: int) -> Int[Array, " T"]:
    """Return whose each token is, where request b's tokens end before `ends[b]`; the last one's for padding."""
    token_index = jnp.arange(num_tokens, dtype=jnp.int32)
    # counted, because a binary search is a loop, and a loop of kernels on a GPU
    request = jnp.sum(ends[None, :] <= token_index[:, None], axis=1, dtype=jnp.int32)
    return jnp.minimum(request, ends.shape[0] - 1)


def find_slots(
    block_tables: Int[Array, "B M"],
    request: Int[Array, " T"],
    positions: Int[Array, " T"],
    is_query: Bool[Array, " T"],
    *,
    block_size: int,
    num_blocks: int,
) -> Int[Array, " T"]:
    """Return where each token's K and V go: one past the end, to be dropped, if it is padding or has no block."""
    block_ids = block_tables.at[request, positions // block_size].get(mode="clip")
    is_written = is_query & (block_ids != 0)
    return jnp.where(is_written, block_ids * block_size + positions % block_size, num_blocks * block_size)


def record_tokens(wide: SamplerState, rows: Int[Array, " B"], token_ids: Int[Array, " B"]) -> SamplerState:
    """Count the tokens that `rows` sampled (a row of R is a pad), and keep the newest."""
    counts, recent = jnp.asarray(wide.output_counts), jnp.asarray(wide.recent_token_ids)
    num = counts.at[rows, token_ids].get(mode="clip")
    most = jnp.iinfo(counts.dtype).max
    newest = jnp.concatenate([recent.at[rows, 1:].get(mode="clip"), token_ids[:, None]], axis=1)
    return replace(
        wide,
        output_counts=counts.at[rows, token_ids].set(jnp.where(num < most, num + 1, num), mode="drop"),
        recent_token_ids=recent.at[rows].set(newest, mode="drop"),
    )
