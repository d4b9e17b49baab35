"""Probability mass in whole numbers, so that sums are exact: the same for every order, batch and padding.

The weight of a token is its probability relative to the most likely one, in units of 2^-26. A sum over a vocabulary
does not fit 32 bits, so a `Mass` keeps it in two words.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped, UInt

from pagedjax.execution.portable_math import fixed_point_exp
from pagedjax.execution.ranking import TILE

WEIGHT_BITS = 26
LOW_BITS = 13
MAX_VOCAB_SIZE = 2 ** (32 - LOW_BITS) - 1  # neither word of a sum overflows


class Mass(NamedTuple):
    """The number high * 2^13 + low, with low < 2^13."""

    high: UInt[Array, "*S"]
    low: UInt[Array, "*S"]


def token_weights(shifted: Float[Array, "*S"]) -> UInt[Array, "*S"]:
    """Return the weights of tokens whose scaled logits lie `shifted` <= 0 below the largest one."""
    return fixed_point_exp(shifted, WEIGHT_BITS)


def total(weights: UInt[Array, "B V"]) -> Mass:
    """Sum each row."""
    assert weights.shape[1] <= MAX_VOCAB_SIZE, f"{weights.shape[1]} weights could overflow, {MAX_VOCAB_SIZE} cannot"
    weights = jnp.pad(weights, ((0, 0), (0, -weights.shape[1] % TILE))).astype(jnp.int32)
    tiles = weights.reshape(weights.shape[0], -1, TILE)
    high = _sum_tiles(tiles >> jnp.int32(LOW_BITS))
    low = _sum_tiles(tiles & jnp.int32(2**LOW_BITS - 1))
    return Mass(high + (low >> jnp.uint32(LOW_BITS)), low & jnp.uint32(2**LOW_BITS - 1))  # [B]


def whole(number: Int[Array, "*S"] | UInt[Array, "*S"]) -> Mass:
    """Return a non-negative 32-bit number as a mass."""
    number = number.astype(jnp.uint32)
    return Mass(number >> jnp.uint32(LOW_BITS), number & jnp.uint32(2**LOW_BITS - 1))


def share(mass: Mass, fraction: Float[Array, "*S"]) -> Mass:
    """Return fraction * mass for a fraction of at most 1, rounded in float32, at least one unit."""
    unit = jnp.float32(2**LOW_BITS)
    number = fraction * (mass.high.astype(jnp.float32) * unit + mass.low.astype(jnp.float32))
    number = jnp.maximum(number, jnp.float32(1.0))
    high = jnp.floor(number * jnp.float32(2**-LOW_BITS))
    return Mass(high.astype(jnp.uint32), (number - high * unit).astype(jnp.uint32))


def sums_before(numbers: Shaped[Array, "B n"]) -> Shaped[Array, "B n"]:
    """Return for each column the sum of the columns left of it; for short rows (quadratic work, one kernel)."""
    columns = jnp.arange(numbers.shape[1], dtype=jnp.int32)
    is_left = columns[None, None, :] < columns[None, :, None]
    return jnp.sum(jnp.where(is_left, numbers[:, None, :], 0), axis=2, dtype=numbers.dtype)


def is_less(first: Mass, second: Mass) -> Bool[Array, "*S"]:
    """Compare exactly."""
    return (first.high < second.high) | ((first.high == second.high) & (first.low < second.low))


def _sum_tiles(tiles: Int[Array, "B n L"]) -> UInt[Array, " B"]:
    """Sum each row; within a tile in float32, which is a CPU's fastest sum and exact below 2^24."""
    sums = jnp.sum(tiles.astype(jnp.float32), axis=2)
    return jnp.sum(sums.astype(jnp.uint32), axis=1, dtype=jnp.uint32)
