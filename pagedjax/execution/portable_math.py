"""Logarithm and exponential that round alike for every shape, jitted or not, on every device.

A compiler's own versions differ in the last bit between its vector and scalar loops, and it contracts a product
and a sum into a fused multiply-add wherever it likes. Here only IEEE operations are used, and each product that
is added to something has a known sign and goes through `abs`, which no compiler contracts across.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, UInt

LOG_2 = 0.6931471805599453
LOG2_E = 1.4426950408889634

# Minimax fits. |coefficients| of log(1 + x) / x on [0, 1), alternating in sign, absolute error 1.4e-7;
LOG1P = (0.99999982, 0.49997449, 0.33276176, 0.24499612, 0.17757024, 0.10785368, 0.04421419, 0.00857468)
# of -log(1 - x) / x on [0, 0.5], none negative, relative error 5.2e-7;
NEGATIVE_LOG1M = (1.00000048, 0.49991035, 0.33579096, 0.22607909, 0.29760781, 0.03384395, 0.0, 0.57244247)
# |coefficients| of 2^-x on [0, 1], alternating in sign, absolute error 1e-7.
EXP2 = (1.0, 0.69314706, 0.24022436, 0.05549103, 0.00958006, 0.00127572, 0.00010939)


def log(x: Float[Array, "*S"]) -> Float[Array, "*S"]:
    """Return the natural logarithm of positive normal numbers, within 3e-7 or one rounding."""
    exponent, fraction = _split(x)
    fraction = fraction - jnp.float32(1.0)
    whole = jnp.abs(exponent.astype(jnp.float32) * jnp.float32(LOG_2))
    rest = jnp.abs(_alternating(LOG1P, fraction) * fraction)
    return jnp.where(exponent < 0, rest - whole, rest + whole)


def exponential_variate(bits: UInt[Array, "*S"]) -> Float[Array, "*S"]:
    """Return -log(u) with u = (n + 0.5) / 2^31, n the upper 31 bits: in [2.3e-10, 22.2], never 0 or infinite.

    Near u = 1 the distance 1 - u comes from the integer, since u itself would be rounded too coarsely for the small
    values that decide a race. Otherwise u = m / 2^e with m in [0.5, 1) and -log(u) = e log(2) - log(m).
    """
    number = (bits >> jnp.uint32(1)).astype(jnp.int32)
    to_one = ((jnp.int32(2**31 - 1) - number).astype(jnp.float32) + jnp.float32(0.5)) * jnp.float32(2**-31)
    exponent, fraction = _split(number.astype(jnp.float32) + jnp.float32(0.5))
    is_upper_half = number >= jnp.int32(2**30)
    distance = jnp.where(is_upper_half, to_one, jnp.float32(1.0) - jnp.float32(0.5) * fraction)
    doublings = jnp.where(is_upper_half, jnp.int32(0), jnp.int32(30) - exponent)
    series = jnp.float32(NEGATIVE_LOG1M[-1])
    for coefficient in NEGATIVE_LOG1M[-2::-1]:
        series = jnp.float32(coefficient) + jnp.abs(series * distance)
    return jnp.abs(doublings.astype(jnp.float32) * jnp.float32(LOG_2)) + jnp.abs(series * distance)


def fixed_point_exp(x: Float[Array, "*S"], bits: int) -> UInt[Array, "*S"]:
    """Return exp(x) for x <= 0 in units of 2^-bits, rounded, exact at 0; 0 for NaN and -inf. bits is at most 28."""
    lowest = jnp.float32(bits + 2)
    halvings = jnp.where(x <= 0, jnp.minimum(jnp.abs(x * jnp.float32(LOG2_E)), lowest), lowest)
    whole = jnp.floor(halvings)
    mantissa = _alternating(EXP2, halvings - whole) * jnp.float32(2 ** (bits + 1))  # one bit more, to round
    shifted = mantissa.astype(jnp.int32) >> whole.astype(jnp.int32)
    return ((shifted + jnp.int32(1)) >> jnp.int32(1)).astype(jnp.uint32)


def _alternating(coefficients: tuple[float, ...], x: Float[Array, "*S"]) -> Float[Array, "*S"]:
    """Return c0 - c1 x + c2 x^2 - ... for x in [0, 1]; the coefficients fall, so every partial sum is positive."""
    series = jnp.float32(coefficients[-1])
    for coefficient in coefficients[-2::-1]:
        series = jnp.float32(coefficient) - jnp.abs(series * x)
    return series


def _split(x: Float[Array, "*S"]) -> tuple[Int[Array, "*S"], Float[Array, "*S"]]:
    """Return (e, m) with x = m * 2^e and m in [1, 2), for positive normal x."""
    word = lax.bitcast_convert_type(x, jnp.int32)
    fraction = (word & jnp.int32(0x007FFFFF)) | jnp.int32(0x3F800000)
    return (word >> jnp.int32(23)) - jnp.int32(127), lax.bitcast_convert_type(fraction, jnp.float32)
