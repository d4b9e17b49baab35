"""A cut keeps the first tokens of each row, in the order of `ranking`, and is the place of the last one kept."""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt

from pagedjax.execution.mass import Mass, is_less, total


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


def cut_after(logits: Float[Array, "B V"], num: Int[Array, " B"]) -> Cut:
    """Keep the first `num` tokens, 1 to V; no logit is NaN or -0.0.

    Bisects the logit of the last one, then its id among equals: a pass over the vocabulary for each bit of both, which
    pays only where `num` is too large for `ranking.first_tokens`.
    """
    keys = _ordered_keys(logits)
    token_ids = jnp.arange(logits.shape[1], dtype=jnp.uint32)[None, :]
    edge = _smallest(32, num, lambda key: _count(keys > key[:, None]) < num)
    is_edge = keys == edge[:, None]
    num_equal = num - _count(keys > edge[:, None])
    bits = logits.shape[1].bit_length()
    last = _smallest(bits, num, lambda token_id: _count(is_edge & (token_ids <= token_id[:, None])) >= num_equal)
    return Cut(_from_keys(edge), last.astype(jnp.int32))


def cut_by_mass(logits: Float[Array, "B V"], weights: UInt[Array, "B V"], target: Mass) -> Cut:
    """Keep the tokens whose predecessors weigh less than `target`, which is above 0. Bisects as `cut_after` does."""
    keys = _ordered_keys(logits)
    token_ids = jnp.arange(logits.shape[1], dtype=jnp.uint32)[None, :]
    everything = no_cut(*logits.shape)
    edge = _smallest(32, everything.token_id, lambda key: is_less(_total_where(keys > key[:, None], weights), target))
    is_above, is_edge = keys > edge[:, None], keys == edge[:, None]

    def has_target(token_id: UInt[Array, " B"]) -> Bool[Array, " B"]:
        return ~is_less(_total_where(is_above | (is_edge & (token_ids <= token_id[:, None])), weights), target)

    last = _smallest(logits.shape[1].bit_length(), everything.token_id, has_target)
    is_all = is_less(total(weights), target)
    return Cut(
        jnp.where(is_all, everything.logit, _from_keys(edge)),
        jnp.where(is_all, everything.token_id, last.astype(jnp.int32)),
    )


def _total_where(mask: Bool[Array, "B V"], weights: UInt[Array, "B V"]) -> Mass:
    return total(jnp.where(mask, weights, jnp.uint32(0)))


def _smallest(
    num_bits: int, like: Int[Array, " B"], holds: Callable[[UInt[Array, " B"]], Bool[Array, " B"]]
) -> UInt[Array, " B"]:
    """Return the smallest number of `num_bits` bits for which a monotone condition holds; it does for the largest."""

    def settle_bit(step: Int[Array, ""], number: UInt[Array, " B"]) -> UInt[Array, " B"]:
        bit = jnp.uint32(1) << (jnp.uint32(num_bits - 1) - step.astype(jnp.uint32))
        return jnp.where(holds(number + (bit - jnp.uint32(1))), number, number + bit)

    return lax.fori_loop(0, num_bits, settle_bit, jnp.zeros_like(like, dtype=jnp.uint32))


def _count(mask: Bool[Array, "B V"]) -> Int[Array, " B"]:
    return jnp.sum(mask.astype(jnp.float32), axis=1).astype(jnp.int32)  # exact below 2^24, and a CPU's fastest sum


def _ordered_keys(logits: Float[Array, "B V"]) -> UInt[Array, "B V"]:
    """Map floats to integers in the same order."""
    bits = lax.bitcast_convert_type(logits, jnp.uint32)
    return jnp.where(bits >> jnp.uint32(31) == 1, ~bits, bits | jnp.uint32(1 << 31))


def _from_keys(keys: UInt[Array, " B"]) -> Float[Array, " B"]:
    bits = jnp.where(keys >> jnp.uint32(31) == 1, keys ^ jnp.uint32(1 << 31), ~keys)
    return lax.bitcast_convert_type(bits, jnp.float32)
