"""Changes to the logits themselves, before temperature and filters: they also decide greedy choices.

In vLLM's order: allowed_token_ids, bad_words and min_tokens ban tokens (the logit becomes -inf); logit_bias is
added; then repetition, frequency and presence penalties. A neutral row comes out bit for bit as it went in.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt

from pagedjax.execution.sampling_rows import SamplingRows


def edit_logits(logits: Float[Array, "B V"], positions: Int[Array, " B"], rows: SamplingRows) -> Float[Array, "B V"]:
    """Apply masks, bans, biases and penalties; `rows` must have the fields for it."""
    return lax.optimization_barrier(_penalize(_bias(_ban(logits, positions, rows), rows), rows))  # computed once


def _ban(logits: Float[Array, "B V"], positions: Int[Array, " B"], rows: SamplingRows) -> Float[Array, "B V"]:
    assert rows.allowed_mask is not None, "gathered without the fields that change logits"
    assert rows.stop_ids is not None
    assert rows.bad_words is not None
    assert rows.recent_token_ids is not None
    logits = jnp.where(_allowed_tokens(rows.allowed_mask, logits.shape[1]), logits, -jnp.inf)
    early_stop_ids = jnp.where((positions < rows.min_position)[:, None], rows.stop_ids, -1)
    banned_ids = jnp.concatenate([_bad_word_endings(rows.bad_words, rows.recent_token_ids), early_stop_ids], axis=1)
    banned_ids = jnp.where(banned_ids < 0, logits.shape[1], banned_ids)  # a negative index would count from the end
    return logits.at[_row_index(logits), banned_ids].set(-jnp.inf, mode="drop")


def _allowed_tokens(allowed_mask: UInt[Array, "B W"], vocab_size: int) -> Bool[Array, "B V"]:
    bits = allowed_mask[:, :, None] >> jnp.arange(32, dtype=allowed_mask.dtype)[None, None, :]
    return (bits & jnp.ones((), bits.dtype)).reshape(bits.shape[0], -1)[:, :vocab_size] != 0  # [B, V]


def _bad_word_endings(bad_words: Int[Array, "B Y Z"], recent_token_ids: Int[Array, "B Z"]) -> Int[Array, "B Y"]:
    """Return the last token of each bad word whose other tokens are the newest output tokens, -1 for the rest."""
    prefix = bad_words[:, :, :-1]
    is_next = jnp.all((prefix < 0) | (prefix == recent_token_ids[:, None, 1:]), axis=2)
    return jnp.where(is_next, bad_words[:, :, -1], -1)  # [B, Y]


def _bias(logits: Float[Array, "B V"], rows: SamplingRows) -> Float[Array, "B V"]:
    assert rows.bias_ids is not None
    assert rows.bias_values is not None
    return logits.at[_row_index(logits), rows.bias_ids].add(rows.bias_values, mode="drop")


def _penalize(logits: Float[Array, "B V"], rows: SamplingRows) -> Float[Array, "B V"]:
    """Scale towards -inf what the prompt or the output holds, then subtract for each and for any occurrence."""
    assert rows.output_counts is not None
    assert rows.prompt_mask is not None
    is_generated = rows.output_counts > 0
    penalty = rows.repetition_penalty[:, None]
    scale = jnp.where(logits > 0, jnp.float32(1.0) / penalty, penalty)
    logits = jnp.where(rows.prompt_mask | is_generated, logits * scale, logits)
    frequency = rows.frequency_penalty[:, None] * rows.output_counts.astype(jnp.float32)
    frequency = jnp.minimum(frequency, jnp.finfo(jnp.float32).max)  # keeps the product out of a fused multiply-add
    presence = jnp.where(is_generated, rows.presence_penalty[:, None], jnp.float32(0.0))
    return logits - frequency - presence


def _row_index(logits: Float[Array, "B V"]) -> Int[Array, "B 1"]:
    return jnp.arange(logits.shape[0], dtype=jnp.int32)[:, None]
