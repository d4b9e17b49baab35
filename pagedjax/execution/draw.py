"""Gumbel-max: the token with the largest sum of scaled logit and noise is a draw from the softmax.

Scores are the same number wherever they are computed, so the winner of a subset is the winner of any larger set
that it is the winner of: filters may look at few tokens or at all.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt

from pagedjax.execution.gumbel import gumbel_noise

MIN_TEMPERATURE = 0.01  # vLLM's: a smaller one above 0 is raised to it


class Draw(NamedTuple):
    """What scores depend on besides the logits."""

    maximum: Float[Array, " B"]  # the row's largest logit
    temperature: Float[Array, " B"]  # 0 is greedy
    seeds: UInt[Array, "B 2"]
    positions: Int[Array, " B"]


def shifted_logits(draw: Draw, logits: Float[Array, "B K"]) -> Float[Array, "B K"]:
    """Return (logits - maximum) / temperature, at most 0; a greedy row counts as temperature 1."""
    temperature = jnp.where(draw.temperature > 0, jnp.maximum(draw.temperature, MIN_TEMPERATURE), jnp.float32(1.0))
    inverse = jnp.float32(1.0) / temperature  # XLA divides by it or multiplies, depending on the shape
    return -jnp.abs((logits - draw.maximum[:, None]) * inverse[:, None])  # abs: see `portable_math`


def scores(draw: Draw, logits: Float[Array, "B K"], token_ids: Int[Array, "B K"]) -> Float[Array, "B K"]:
    """Return what the drawn token has most of: the shifted logit and noise, or the logit itself in a greedy row."""
    noisy = shifted_logits(draw, logits) + gumbel_noise(draw.seeds, draw.positions, token_ids)
    return jnp.where((draw.temperature > 0)[:, None], noisy, logits)


def best_token(values: Float[Array, "B K"], token_ids: Int[Array, "B K"], mask: Bool[Array, "B K"]) -> Int[Array, " B"]:
    """Return the id with the largest value where `mask` holds, the smallest such id; int32's maximum without any."""
    values = jnp.where(mask, values, -jnp.inf)
    best = jnp.max(values, axis=1, keepdims=True)
    return jnp.min(jnp.where(mask & (values == best), token_ids, jnp.iinfo(jnp.int32).max), axis=1)
