"""Probability mass in whole numbers, so that sums are exact: the same for every order, batch and padding.

The weight of a token is its probability relative to the most likely one, in units of 2^-26. A sum over a vocabulary
does not fit 32 bits, so a `Mass` keeps it in two words.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped, UInt

from pagedjax.execution.portable_math import fixed_point_exp

WEIGHT_BITS = 26
LOW_BITS = 13
MAX_VOCAB_SIZE = 2 ** (32 - LOW_BITS)  # neither word of a sum overflows


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
    high = jnp.sum(weights >> jnp.uint32(LOW_BITS), axis=1, dtype=jnp.uint32)
    low = jnp.sum(weights & jnp.uint32(2**LOW_BITS - 1), axis=1, dtype=jnp.uint32)
    return _carry(high, low)  # [B]


def whole(number: Int[Array, "*S"] | UInt[Array, "*S"]) -> Mass:
    """Return a non-negative 32-bit number as a mass."""
    number = number.astype(jnp.uint32)
    return Mass(number >> jnp.uint32(LOW_BITS), number & jnp.uint32(2**LOW_BITS - 1))


def plus_times(mass: Mass, weight: UInt[Array, "*S"], count: UInt[Array, "*S"]) -> Mass:
    """Return mass + weight * count, for a count below MAX_VOCAB_SIZE."""
    high = mass.high + (weight >> jnp.uint32(LOW_BITS)) * count
    product = (weight & jnp.uint32(2**LOW_BITS - 1)) * count
    return _carry(high + (product >> jnp.uint32(LOW_BITS)), mass.low + (product & jnp.uint32(2**LOW_BITS - 1)))


def share(mass: Mass, fraction: Float[Array, "*S"]) -> Mass:
    """Return fraction * mass for a fraction of at most 1, rounded in float32, at least one unit."""
    unit = jnp.float32(2**LOW_BITS)
    number = fraction * (mass.high.astype(jnp.float32) * unit + mass.low.astype(jnp.float32))
    number = jnp.maximum(number, jnp.float32(1.0))
    high = jnp.floor(number * jnp.float32(2**-LOW_BITS))
    return Mass(high.astype(jnp.uint32), (number - high * unit).astype(jnp.uint32))


def difference(first: Mass, second: Mass) -> Float[Array, "*S"]:
    """Return first - second, rounded to float32, for a second that is not larger."""
    borrow = first.low < second.low
    low = jnp.where(borrow, first.low + jnp.uint32(2**LOW_BITS), first.low) - second.low
    high = first.high - second.high - borrow.astype(jnp.uint32)
    return high.astype(jnp.float32) * jnp.float32(2**LOW_BITS) + low.astype(jnp.float32)


def sums_before(numbers: Shaped[Array, "B n"]) -> Shaped[Array, "B n"]:
    """Return for each column the sum of the columns left of it; for short rows (quadratic work, one kernel)."""
    columns = jnp.arange(numbers.shape[1], dtype=jnp.int32)
    is_left = columns[None, None, :] < columns[None, :, None]
    return jnp.sum(jnp.where(is_left, numbers[:, None, :], 0), axis=2, dtype=numbers.dtype)


def is_less(first: Mass, second: Mass) -> Bool[Array, "*S"]:
    """Compare exactly."""
    return (first.high < second.high) | ((first.high == second.high) & (first.low < second.low))


def _carry(high: UInt[Array, "*S"], low: UInt[Array, "*S"]) -> Mass:
    return Mass(high + (low >> jnp.uint32(LOW_BITS)), low & jnp.uint32(2**LOW_BITS - 1))
