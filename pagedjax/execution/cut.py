"""A cut keeps the first tokens of each row, in the order of `ranking`, and names the last one kept.

`find_cut` finds where the mass before a token reaches a target: top-k with every weight 1, top-p with the
tokens' probabilities. The search fixes the bits of the last logit from the top; each pass over the vocabulary settles
`digit_bits` of them. Exact for any logits, and no step depends on the data, so a GPU never waits for the host.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt

from pagedjax.execution.mass import MAX_VOCAB_SIZE, Mass, difference, is_less, plus_times, sums_before, total
from pagedjax.execution.ranking import TILE


class Cut(NamedTuple):
    """Logit and id of the last kept token of each row."""

    logit: Float[Array, " B"]
    token_id: Int[Array, " B"]


def no_cut(num_rows: int, vocab_size: int) -> Cut:
    """Keep every token whose logit is not -inf."""
    lowest = jnp.full(num_rows, jnp.finfo(jnp.float32).min, jnp.float32)
    return Cut(lowest, jnp.full(num_rows, vocab_size, jnp.int32))


def is_before(logits: Float[Array, "B K"], token_ids: Int[Array, "B K"], cut: Cut) -> Bool[Array, "B K"]:
    """Whether each token comes before the last kept one."""
    edge, edge_id = cut.logit[:, None], cut.token_id[:, None]
    return (logits > edge) | ((logits == edge) & (token_ids < edge_id))


def is_kept(logits: Float[Array, "B K"], token_ids: Int[Array, "B K"], cut: Cut) -> Bool[Array, "B K"]:
    """Whether each token comes before the last kept one or is it."""
    return is_before(logits, token_ids, Cut(cut.logit, cut.token_id + 1))


def find_cut(logits: Float[Array, "B V"], weights: UInt[Array, "B V"], target: Mass, *, digit_bits: int) -> Cut:
    """Keep the tokens before which less than `target` mass lies; target is at least 1, no logit is NaN or -0.0."""
    keys = _ordered_keys(logits)

    def mass_above(key: UInt[Array, " B"]) -> Mass:
        return total(jnp.where(keys > key[:, None], weights, jnp.uint32(0)))

    def settle_digit(step: Int[Array, ""], edge: UInt[Array, " B"]) -> UInt[Array, " B"]:
        shift = jnp.uint32(32 - digit_bits) - jnp.uint32(digit_bits) * step.astype(jnp.uint32)
        rest = (jnp.uint32(1) << shift) - jnp.uint32(1)
        digit = jnp.zeros_like(edge)
        for candidate in range(2**digit_bits - 1):  # the last one always keeps little enough
            last = edge + (jnp.uint32(candidate) << shift) + rest
            digit = digit + (~is_less(mass_above(last), target)).astype(jnp.uint32)
        return edge + (digit << shift)

    edge = lax.fori_loop(0, 32 // digit_bits, settle_digit, jnp.zeros(logits.shape[0], jnp.uint32))
    is_edge = keys == edge[:, None]
    weight = jnp.max(jnp.where(is_edge, weights, jnp.uint32(0)), axis=1)
    num_kept = _last_below(mass_above(edge), weight, target) + 1
    return Cut(_from_keys(edge), _nth(is_edge, num_kept))


def _last_below(mass: Mass, weight: UInt[Array, " B"], target: Mass) -> Int[Array, " B"]:
    """Return the largest n with mass + n * weight < target, at most MAX_VOCAB_SIZE - 1; mass is below target.

    The division is off by less than one, the comparisons are exact.
    """
    gap = difference(target, mass) / weight.astype(jnp.float32)
    guess = jnp.clip(gap, 1.0, MAX_VOCAB_SIZE - 2.0).astype(jnp.uint32)
    has_guess = is_less(plus_times(mass, weight, guess), target)
    has_next = is_less(plus_times(mass, weight, guess + jnp.uint32(1)), target)
    return guess.astype(jnp.int32) - 1 + has_guess.astype(jnp.int32) + has_next.astype(jnp.int32)


def _nth(mask: Bool[Array, "B V"], n: Int[Array, " B"]) -> Int[Array, " B"]:
    """Return the column of the n-th True (from 1) of each row; V or more where there are fewer.

    First the group of tiles that holds it, then the tile, then the column.
    """
    num_rows, vocab_size = mask.shape
    mask = jnp.pad(mask, ((0, 0), (0, -vocab_size % TILE**2))).reshape(num_rows, -1, TILE, TILE)
    rows = jnp.arange(num_rows, dtype=jnp.int32)
    group, n = _group_of_nth(jnp.sum(mask, axis=(2, 3), dtype=jnp.int32), n)
    tiles = mask.at[rows, group].get(mode="clip")  # [B, TILE, TILE]
    tile, n = _group_of_nth(jnp.sum(tiles, axis=2, dtype=jnp.int32), n)
    lane, _ = _group_of_nth(tiles.at[rows, tile].get(mode="clip").astype(jnp.int32), n)
    return (group * TILE + tile) * TILE + lane


def _group_of_nth(counts: Int[Array, "B g"], n: Int[Array, " B"]) -> tuple[Int[Array, " B"], Int[Array, " B"]]:
    """Return the group that holds the n-th element (g if none does) and the element's number within it."""
    is_past = sums_before(counts) + counts < n[:, None]
    return jnp.sum(is_past, axis=1, dtype=jnp.int32), n - jnp.sum(jnp.where(is_past, counts, 0), axis=1)


def _ordered_keys(logits: Float[Array, "B V"]) -> UInt[Array, "B V"]:
    """Map floats to integers in the same order."""
    bits = lax.bitcast_convert_type(logits, jnp.uint32)
    return jnp.where(bits >> jnp.uint32(31) == 1, ~bits, bits | jnp.uint32(1 << 31))


def _from_keys(keys: UInt[Array, " B"]) -> Float[Array, " B"]:
    bits = jnp.where(keys >> jnp.uint32(31) == 1, keys ^ jnp.uint32(1 << 31), ~keys)
    return lax.bitcast_convert_type(bits, jnp.float32)
