"""Which drafts are accepted, by the two rules there are.

    coupled   the target's own sample at each position, drawn with the noise that the draft was drawn with, is the
              output; drafts are accepted as far as they are equal to it
    standard  a draft x is accepted with probability min(1, p(x) / q(x)); the first refused one is replaced by a draw
              from max(p - q, 0), and after the last one a token is drawn from p (Leviathan, Kalman and Matias, "Fast
              inference from transformers via speculative decoding", 2023)

Both give tokens with the target's distribution. The first gives the tokens that plain sampling gives with the same
seed; the second accepts a little more. All noise depends on the request's seed and the position alone.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt

from pagedjax.execution.gumbel import gumbel_noise, random_bits
from pagedjax.execution.ranking import all_token_ids, first_token

ACCEPTANCE_STREAM, RESIDUAL_STREAM = 1, 2  # of noise; drafts are drawn with stream 0


def count_accepted(
    sampled: Int[Array, "B J"], drafts: Int[Array, "B K"], num_drafts: Int[Array, " B"]
) -> Int[Array, " B"]:
    """Return how many drafts the coupled rule accepts: `sampled` [B, K + 1] are the target's samples."""
    return _count_first(drafts == sampled[:, :-1], num_drafts)


def verify_standard(
    target: Float[Array, "B J V"],
    drafts: Int[Array, "B K"],
    num_drafts: Int[Array, " B"],
    draft_probabilities: Float[Array, "B K V"] | None,
    seeds: UInt[Array, "B 2"],
    positions: Int[Array, " B"],
) -> tuple[Int[Array, "B J"], Int[Array, " B"]]:
    """Return tokens [B, K + 1], of which the first 1 + accepted count, and the number of accepted drafts.

    Args:
      target: probabilities p at K + 1 positions, the first of which is `positions`.
      drafts: the first `num_drafts` of each row count.
      draft_probabilities: q, that each draft was drawn from; None where drafts were not drawn but looked up.
    """
    num_rows, max_drafts = drafts.shape
    ids = jnp.clip(drafts, 0, target.shape[2] - 1)[:, :, None]
    chance = jnp.take_along_axis(target[:, :-1], ids, axis=2)[:, :, 0]  # [B, K]
    if draft_probabilities is not None:
        proposed = jnp.take_along_axis(draft_probabilities, ids, axis=2)[:, :, 0]
    else:
        proposed = jnp.ones_like(chance)
    offsets = jnp.arange(max_drafts, dtype=jnp.int32)
    uniform = _uniform(seeds, positions[:, None] + offsets[None, :])
    num_accepted = _count_first(uniform * proposed < chance, num_drafts)

    at = num_accepted[:, None, None]
    weights = jnp.take_along_axis(target, at, axis=1)[:, 0]  # [B, V]
    is_refused = num_accepted < num_drafts
    refused = jnp.minimum(at, max_drafts - 1)
    if draft_probabilities is not None:
        taken = jnp.take_along_axis(draft_probabilities, refused, axis=1)[:, 0]
    else:
        refused_id = jnp.take_along_axis(drafts, refused[:, :, 0], axis=1)  # [B, 1]
        taken = (all_token_ids(weights) == refused_id).astype(jnp.float32)
    residual = jnp.maximum(weights - taken, jnp.float32(0.0))
    has_residual = is_refused & (jnp.max(residual, axis=1) > 0)  # p = q up to rounding leaves nothing
    weights = jnp.where(has_residual[:, None], residual, weights)
    last = _draw(weights, seeds, positions + num_accepted)
    tokens = jnp.concatenate([drafts, jnp.zeros((num_rows, 1), drafts.dtype)], axis=1)
    is_last = jnp.arange(max_drafts + 1, dtype=jnp.int32)[None, :] == num_accepted[:, None]
    return jnp.where(is_last, last[:, None], tokens), num_accepted


def _count_first(is_accepted: Bool[Array, "B K"], num_drafts: Int[Array, " B"]) -> Int[Array, " B"]:
    """Count the leading accepted ones among the first `num_drafts`."""
    is_draft = jnp.arange(is_accepted.shape[1], dtype=jnp.int32)[None, :] < num_drafts[:, None]
    return jnp.sum(jnp.cumprod((is_accepted & is_draft).astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)


def _draw(weights: Float[Array, "B V"], seeds: UInt[Array, "B 2"], positions: Int[Array, " B"]) -> Int[Array, " B"]:
    """Draw a token with probabilities proportional to the weights."""
    noise = gumbel_noise(seeds, positions, all_token_ids(weights), stream=RESIDUAL_STREAM)
    return first_token(jnp.where(weights > 0, jnp.log(weights) + noise, -jnp.inf))[0]


def _uniform(seeds: UInt[Array, "B 2"], positions: Int[Array, "B K"]) -> Float[Array, "B K"]:
    """Return a number in (0, 1) for each position."""
    flat = positions.reshape(-1)
    keys = jnp.repeat(seeds, positions.shape[1], axis=0)
    bits = random_bits(keys, flat, jnp.zeros_like(flat)[:, None], stream=ACCEPTANCE_STREAM)
    number = (bits >> jnp.uint32(8)).astype(jnp.float32) + jnp.float32(0.5)
    return (number * jnp.float32(2**-24)).reshape(positions.shape)
