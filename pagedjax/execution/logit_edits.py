"""Changes to the logits themselves, before temperature and filters: they also decide greedy choices.

In vLLM's order: allowed_token_ids, bad_words and min_tokens ban tokens (the logit becomes -inf); logit_bias is
added; then repetition, frequency and presence penalties, in that order. A neutral row comes out bit for bit as it
went in.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pagedjax.execution.sampling_rows import SamplingRows


def edit_logits(
    logits: Float[Array, "B V"], positions: Int[Array, " B"], rows: SamplingRows
) -> Float[Array, "B V"]:
    """Apply masks, bans, biases and penalties of `rows`, which must carry them."""
    assert rows.has_edits, "rows were gathered without the fields that edit_logits reads"
    num_rows, vocab_size = logits.shape
    row_index = jnp.arange(num_rows, dtype=jnp.int32)[:, None]
    logits = jnp.where(_allowed_tokens(rows, vocab_size), logits, -jnp.inf)
    banned_ids = jnp.concatenate([_bad_word_endings(rows), _early_stop_ids(positions, rows)], axis=1)
    banned_ids = jnp.where(banned_ids < 0, vocab_size, banned_ids)  # a negative index would count from the end
    logits = logits.at[row_index, banned_ids].set(-jnp.inf, mode="drop")
    logits = logits.at[row_index, rows.bias_ids].add(rows.bias_values, mode="drop")
    return lax.optimization_barrier(_penalize(logits, rows))  # computed once, whatever reads it


def _allowed_tokens(rows: SamplingRows, vocab_size: int) -> Bool[Array, "B V"]:
    words = rows.allowed_mask[:, :, None]
    bits = (words >> jnp.arange(32, dtype=words.dtype)[None, None, :]) & jnp.ones((), words.dtype)
    return bits.reshape(words.shape[0], -1)[:, :vocab_size] != 0  # [B, V]


def _bad_word_endings(rows: SamplingRows) -> Int[Array, "B Y"]:
    """Last token of each bad word whose other tokens are the newest output tokens, else -1 (as for unused entries)."""
    prefix = rows.bad_words[:, :, :-1]
    recent = rows.recent_token_ids[:, None, 1:]
    is_next = jnp.all((prefix < 0) | (prefix == recent), axis=2)
    return jnp.where(is_next, rows.bad_words[:, :, -1], -1)  # [B, Y]


def _early_stop_ids(positions: Int[Array, " B"], rows: SamplingRows) -> Int[Array, "B X"]:
    return jnp.where((positions < rows.min_position)[:, None], rows.stop_ids, -1)


def _penalize(logits: Float[Array, "B V"], rows: SamplingRows) -> Float[Array, "B V"]:
    counts = rows.output_counts.astype(jnp.float32)
    repetition = rows.repetition_penalty[:, None]
    scale = jnp.where(logits > 0, jnp.float32(1.0) / repetition, repetition)
    logits = jnp.where(rows.prompt_mask | (rows.output_counts > 0), logits * scale, logits)
    frequency = rows.frequency_penalty[:, None] * counts
    frequency = jnp.minimum(frequency, jnp.finfo(jnp.float32).max)  # keeps the product out of a fused multiply-add
    presence = jnp.where(rows.output_counts > 0, rows.presence_penalty[:, None], jnp.float32(0.0))
    return logits - frequency - presence
