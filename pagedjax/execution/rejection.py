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


def reached(is_right: Bool[Array, "B K"], num_drafts: Int[Array, " B"]) -> Bool[Array, "B n"]:
    """Whether each position's token counts: all drafts up to it exist and were right. The first always does."""
    index = jnp.arange(is_right.shape[1], dtype=jnp.int32)
    is_accepted = is_right & (index[None, :] < num_drafts[:, None])
    accepted = jnp.cumprod(is_accepted.astype(jnp.int32), axis=1) == 1
    return jnp.concatenate([jnp.ones((is_right.shape[0], 1), jnp.bool_), accepted], axis=1)


def accept_or_replace(
    target: Float[Array, "B V"],
    drafts: Int[Array, " B"],
    is_drafted: Bool[Array, " B"],
    chances: Float[Array, "B V"] | None,
    seeds: UInt[Array, "B 2"],
    positions: Int[Array, " B"],
) -> Int[Array, " B"]:
    """Return each row's draft or what the standard rule puts in its place; for a row without one, a draw.

    Args:
      target: the probabilities p of the tokens at `positions`.
      chances: the probabilities q that the drafts were drawn from; None where they were not drawn but looked up.
    """
    if chances is None:
        chances = (all_token_ids(target) == drafts[:, None]).astype(jnp.float32)
    ids = jnp.maximum(drafts, 0)[:, None]
    p, q = (jnp.take_along_axis(each, ids, axis=1)[:, 0] for each in (target, chances))
    is_accepted = is_drafted & (_uniform(seeds, positions) * q < p)
    residual = jnp.maximum(target - chances, jnp.float32(0.0))
    has_residual = is_drafted & (jnp.max(residual, axis=1) > 0)  # p = q up to rounding leaves nothing
    weights = jnp.where(has_residual[:, None], residual, target)
    return jnp.where(is_accepted, drafts, _draw(weights, seeds, positions))


def _draw(weights: Float[Array, "B V"], seeds: UInt[Array, "B 2"], positions: Int[Array, " B"]) -> Int[Array, " B"]:
    """Draw a token with probabilities proportional to the weights."""
    noise = gumbel_noise(seeds, positions, all_token_ids(weights), stream=RESIDUAL_STREAM)
    return first_token(jnp.where(weights > 0, jnp.log(weights) + noise, -jnp.inf))[0]


def _uniform(seeds: UInt[Array, "B 2"], positions: Int[Array, " B"]) -> Float[Array, " B"]:
    """Return a number in (0, 1) for each row."""
    bits = random_bits(seeds, positions, jnp.zeros_like(positions)[:, None], stream=ACCEPTANCE_STREAM)[:, 0]
    return ((bits >> jnp.uint32(8)).astype(jnp.float32) + jnp.float32(0.5)) * jnp.float32(2**-24)
