"""Gumbel noise that depends on (request seed, position, token id) and on nothing else.

The bits come from Threefry-2x32 with 20 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
2011): the request seed encrypts the position, the result is the key that encrypts the token id. A value is the same
to the last bit alone or in any batch, for the whole vocabulary or a few candidates, on every device.
Written out instead of taken from jax.random, whose bits depend on the shape drawn and on configuration.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt

from pagedjax.execution.portable_math import exponential_variate, log

ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
KEY_PARITY = 0x1BD11BDA


def gumbel_noise(
    seeds: UInt[Array, "B 2"], positions: Int[Array, " B"], token_ids: Int[Array, "B K"], *, stream: int = 0
) -> Float[Array, "B K"]:
    """Return standard Gumbel noise for each of `token_ids` in the draw at `positions`: finite, in [-3.2, 22.2].

    Each `stream` is independent of the others; 0 is the one that tokens are sampled with.
    """
    return -log(exponential_variate(random_bits(seeds, positions, token_ids, stream=stream)))  # [B, K]


def random_bits(
    seeds: UInt[Array, "B 2"], positions: Int[Array, " B"], counters: Int[Array, "B K"], *, stream: int
) -> UInt[Array, "B K"]:
    """Return 32 random bits for each counter."""
    zeros = jnp.zeros_like(positions, dtype=jnp.uint32)
    key = threefry_2x32(seeds[:, 0], seeds[:, 1], positions.astype(jnp.uint32), zeros)
    key_low, key_high = (jnp.broadcast_to(word[:, None], counters.shape) for word in key)
    return threefry_2x32(key_low, key_high, counters.astype(jnp.uint32), jnp.full_like(key_low, stream))[0]


def seed_words(seed: int) -> tuple[int, int]:
    """Return the low and high 32-bit word of any Python integer, in two's complement."""
    return seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF


def threefry_2x32(
    key_low: UInt[Array, "*S"], key_high: UInt[Array, "*S"], low: UInt[Array, "*S"], high: UInt[Array, "*S"]
) -> tuple[UInt[Array, "*S"], UInt[Array, "*S"]]:
    """Encrypt the counters (low, high) elementwise."""
    keys = (key_low, key_high, key_low ^ key_high ^ jnp.uint32(KEY_PARITY))
    low, high = low + keys[0], high + keys[1]
    for group in range(5):
        for distance in ROTATIONS[group % 2]:
            low = low + high
            high = low ^ _rotate_left(high, distance)
        low = low + keys[(group + 1) % 3]
        high = high + keys[(group + 2) % 3] + jnp.uint32(group + 1)
    return low, high


def _rotate_left(word: UInt[Array, "*S"], distance: int) -> UInt[Array, "*S"]:
    return (word << jnp.uint32(distance)) | (word >> jnp.uint32(32 - distance))
