"""Request state on the device: one row per running slot, donated through every step.

`RowState` is what each step needs; `SamplerState` holds the wide rows that only the full sampler reads
(lists, masks, counts). Rows are filled by the jitted writers here when a request is admitted or resumed;
after that the device keeps them up to date itself. Knows nothing of the scheduler.
"""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from pagedjax.execution.sampling_rows import SamplingRows
from pagedjax.sampling_params import (
    MAX_BAD_WORD_SEQUENCES,
    MAX_BAD_WORD_TOKENS,
    MAX_LOGIT_BIAS,
    MAX_STOP_TOKEN_IDS,
)

FLOATS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
INTS = ("top_k", "seed_low", "seed_high", "min_position")
AnyArray = Array | np.ndarray
NUM_FIXED = 3 + len(FLOATS) + len(INTS)  # row, context_len, last token, then the parameters; the block table follows


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RowState:
    """R rows. A row whose request is gone holds stale values that nothing reads: only scheduled rows are gathered."""

    context_lens: Int[Array, " R"]  # tokens whose K and V are in the pool
    last_token_ids: Int[Array, " R"]  # newest token, input of the next decode step
    block_tables: Int[Array, "R M"]
    floats: Float[Array, "R 6"]  # in the order of FLOATS
    ints: Int[Array, "R 4"]  # in the order of INTS
    drafts: Int[Array, "R K"] | None = None  # guesses at the tokens after the newest, -1 for none; None: no speculation


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplerState:
    """What penalties, biases, masks and bans need: all R rows on the device, or a single one on its way there.

    What every row of a step records, counts and recent tokens, changes nothing for a row that asked for none of them:
    its penalties are neutral, and it has no bad words.
    """

    output_counts: Int[AnyArray, "R V"]
    prompt_mask: Bool[AnyArray, "R V"]
    allowed_mask: UInt32[AnyArray, "R W"]
    bias_ids: Int[AnyArray, "R E"]
    bias_values: Float[AnyArray, "R E"]
    stop_ids: Int[AnyArray, "R X"]
    bad_words: Int[AnyArray, "R Y Z"]
    recent_token_ids: Int[AnyArray, "R Z"]  # newest output tokens, newest last, -1 before the first


def empty_rows(num_rows: int, max_blocks: int, *, max_draft_tokens: int = 0) -> RowState:
    """All-zero rows, without drafts."""
    return RowState(
        context_lens=jnp.zeros(num_rows, jnp.int32),
        last_token_ids=jnp.zeros(num_rows, jnp.int32),
        block_tables=jnp.zeros((num_rows, max_blocks), jnp.int32),
        floats=jnp.zeros((num_rows, len(FLOATS)), jnp.float32),
        ints=jnp.zeros((num_rows, len(INTS)), jnp.int32),
        drafts=jnp.full((num_rows, max_draft_tokens), -1, jnp.int32) if max_draft_tokens else None,
    )


def neutral_sampler_row(vocab_size: int) -> SamplerState:
    """One row, as numpy arrays, that changes no logit."""
    return SamplerState(
        output_counts=np.zeros((1, vocab_size), np.int16),
        prompt_mask=np.zeros((1, vocab_size), np.bool_),
        allowed_mask=np.full((1, -(-vocab_size // 32)), 0xFFFFFFFF, np.uint32),
        bias_ids=np.full((1, MAX_LOGIT_BIAS), vocab_size, np.int32),
        bias_values=np.zeros((1, MAX_LOGIT_BIAS), np.float32),
        stop_ids=np.full((1, MAX_STOP_TOKEN_IDS), vocab_size, np.int32),
        bad_words=np.full((1, MAX_BAD_WORD_SEQUENCES, MAX_BAD_WORD_TOKENS), -1, np.int32),
        recent_token_ids=np.full((1, MAX_BAD_WORD_TOKENS), -1, np.int32),
    )


def neutral_sampler_rows(num_rows: int, vocab_size: int) -> SamplerState:
    """R neutral rows on the device."""
    return jax.tree.map(lambda leaf: jnp.repeat(jnp.asarray(leaf), num_rows, axis=0), neutral_sampler_row(vocab_size))


def write_rows(state: RowState, packed: Int[Array, "n C"]) -> RowState:
    """Overwrite whole rows. packed: row (R is a pad), context_len, last token, FLOATS bit-cast, INTS, block table."""
    rows = packed[:, 0]
    after_floats = 3 + len(FLOATS)

    def put(field: Array, values: Array) -> Array:
        return field.at[rows].set(values, mode="drop")

    floats = jax.lax.bitcast_convert_type(packed[:, 3:after_floats], jnp.float32)
    return RowState(
        context_lens=put(state.context_lens, packed[:, 1]),
        last_token_ids=put(state.last_token_ids, packed[:, 2]),
        block_tables=put(state.block_tables, packed[:, NUM_FIXED:]),
        floats=put(state.floats, floats),
        ints=put(state.ints, packed[:, after_floats:NUM_FIXED]),
        drafts=state.drafts,  # proposed anew before anybody reads them
    )


def write_sampler_row(state: SamplerState, row: Int[Array, ""], values: SamplerState) -> SamplerState:
    """Overwrite one wide row with the single row of `values`."""
    return jax.tree.map(lambda field, value: field.at[row].set(value[0], mode="drop"), state, values)


def write_masks(state: SamplerState, rows: Int[Array, " n"], masks: UInt32[Array, "n W"]) -> SamplerState:
    """Overwrite the tokens that rows may sample (a row of R is a pad), before each step of a row under a grammar."""
    return replace(state, allowed_mask=jnp.asarray(state.allowed_mask).at[rows].set(masks, mode="drop"))


def gather_sampling_rows(state: RowState, rows: Int[Array, " B"], wide: SamplerState | None) -> SamplingRows:
    """Parameters of the rows of one step; `wide` None leaves out what only the full sampler reads."""
    floats = state.floats.at[rows].get(mode="clip")  # [B, 6]
    ints = state.ints.at[rows].get(mode="clip")  # [B, 4]
    named = {name: floats[:, i] for i, name in enumerate(FLOATS)}
    if wide is not None:
        fields = {name: getattr(wide, name).at[rows].get(mode="clip") for name in SamplerState.__dataclass_fields__}
        named |= fields
    return SamplingRows(
        top_k=ints[:, 0],
        seeds=jax.lax.bitcast_convert_type(ints[:, 1:3], jnp.uint32),
        min_position=ints[:, 3],
        **named,
    )
