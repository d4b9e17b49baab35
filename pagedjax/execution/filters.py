"""Top-k, top-p and min-p as the set of tokens they keep: always the first few tokens in the order of `ranking`.

min_p keeps tokens at least min_p times as likely as the most likely one; top_k keeps the first k; top_p keeps the
shortest start of what the other two left whose share of it reaches p, hence at least one token. Equal logits are
told apart by token id, so top_k=1 and a tiny top_p are greedy decoding.

`draw_from_candidates` settles a row whose kept set lies within its first NUM_CANDIDATES tokens. For the others,
`draw_by_rejection` (a loop that depends on the data: CPUs) and `draw_by_search` (fixed work, so that a GPU never
waits for the host) return the best-scored token of the same set.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pagedjax.execution.cut import Cut, find_cut, is_before, is_kept, no_cut
from pagedjax.execution.draw import Draw, best_token, scores, shifted_logits
from pagedjax.execution.mass import Mass, is_less, share, sums_before, token_weights, total, whole
from pagedjax.execution.portable_math import log
from pagedjax.execution.ranking import first_token
from pagedjax.execution.sampling_rows import SamplingRows

NUM_CANDIDATES = 64


class Candidates(NamedTuple):
    """The first tokens of each row, in order."""

    token_ids: Int[Array, "B C"]
    logits: Float[Array, "B C"]


class Filters(NamedTuple):
    """What decides whether a token is kept."""

    top_k: Int[Array, " B"]  # number of tokens, at least 1; V is off
    top_k_cut: Cut  # the same as a place in the order
    lowest: Float[Array, " B"]  # min_p as the lowest shifted logit
    top_p: Float[Array, " B"]


def make_filters(rows: SamplingRows, candidates: Candidates, vocab_size: int) -> Filters:
    """Turn parameters into bounds; a greedy row keeps one token. A top_k beyond the candidates has no cut yet."""
    is_random = rows.temperature > 0
    top_k = jnp.where((rows.top_k <= 0) | (rows.top_k > vocab_size), vocab_size, rows.top_k)
    top_k = jnp.where(is_random, top_k, 1)
    last = jnp.clip(top_k - 1, 0, NUM_CANDIDATES - 1)[:, None]
    edge_id, edge = (jnp.take_along_axis(values, last, axis=1)[:, 0] for values in candidates)
    cut = _choose(top_k <= NUM_CANDIDATES, Cut(edge, edge_id), no_cut(top_k.shape[0], vocab_size))
    lowest = jnp.where(is_random & (rows.min_p > 0), log(rows.min_p), -jnp.inf)
    return Filters(top_k, cut, lowest, jnp.where(is_random, rows.top_p, jnp.float32(1.0)))


def is_wide_top_k(filters: Filters, vocab_size: int) -> Bool[Array, " B"]:
    """Whether a row's top_k goes beyond the candidates."""
    return (filters.top_k > NUM_CANDIDATES) & (filters.top_k < vocab_size)


def search_wide_top_k(filters: Filters, logits: Float[Array, "B V"], *, digit_bits: int) -> Cut:
    """Return `filters.top_k_cut`, found for the rows whose top_k goes beyond the candidates."""
    cut = find_cut(logits, jnp.ones(logits.shape, jnp.uint32), whole(filters.top_k), digit_bits=digit_bits)
    return _choose(is_wide_top_k(filters, logits.shape[1]), cut, filters.top_k_cut)


def mass_of_candidates(draw: Draw, filters: Filters, candidates: Candidates) -> Mass:
    """Sum what top_k and min_p leave, for rows whose top_k lies within the candidates."""
    weights = _weights(draw, filters, candidates.logits, candidates.token_ids)
    return whole(jnp.sum(weights, axis=1, dtype=jnp.uint32))


def mass_of_vocabulary(draw: Draw, filters: Filters, logits: Float[Array, "B V"]) -> Mass:
    """Sum what top_k and min_p leave."""
    return total(_weights(draw, filters, logits, _all_ids(logits)))


def nucleus_target(filters: Filters, mass: Mass) -> Mass:
    """Return the mass that makes up top_p; a token is kept if the mass before it is less."""
    everything = Mass(jnp.full_like(mass.high, 2**32 - 1), jnp.full_like(mass.low, 2**13 - 1))
    return _choose(filters.top_p < 1, share(mass, filters.top_p), everything)


def draw_from_candidates(
    draw: Draw, filters: Filters, target: Mass, candidates: Candidates
) -> tuple[Int[Array, " B"], Bool[Array, " B"]]:
    """Return the best kept candidate, and whether no token beyond the candidates is kept."""
    token_ids, logits = candidates
    weights = _weights(draw, filters, logits, token_ids)
    before = whole(sums_before(weights))  # 64 * 2^26 fit 32 bits
    kept = _passes(draw, filters, logits, token_ids) & is_less(before, Mass(*(word[:, None] for word in target)))
    token = best_token(scores(draw, logits, token_ids), token_ids, kept)
    return token, ~kept[:, -1] | (filters.top_k <= NUM_CANDIDATES)


def draw_by_rejection(
    draw: Draw, filters: Filters, target: Mass, logits: Float[Array, "B V"], is_open: Bool[Array, " B"]
) -> Int[Array, " B"]:
    """Draw for the rows that are open: take the best-scored token; if it is cut off, so is all after it; again.

    A few rounds, one if top_p is off, none if no row is open. The first token is always kept, so it ends.
    """
    token_ids = _all_ids(logits)
    weights = _weights(draw, filters, logits, token_ids)
    passing = jnp.where(_passes(draw, filters, logits, token_ids), scores(draw, logits, token_ids), -jnp.inf)

    def try_best(state: tuple[Int[Array, " B"], Cut, Bool[Array, " B"]]) -> tuple:
        token, bound, is_open = state
        best, _ = first_token(jnp.where(is_before(logits, token_ids, bound), passing, -jnp.inf))
        place = Cut(jnp.take_along_axis(logits, best[:, None], axis=1)[:, 0], best)
        before = total(jnp.where(is_before(logits, token_ids, place), weights, jnp.uint32(0)))
        return jnp.where(is_open, best, token), place, is_open & ~is_less(before, target)

    nothing = jnp.zeros(logits.shape[0], jnp.int32)
    state = (nothing, no_cut(*logits.shape), is_open)
    return lax.while_loop(lambda state: jnp.any(state[2]), try_best, state)[0]


def draw_by_search(
    draw: Draw, filters: Filters, target: Mass, logits: Float[Array, "B V"], *, digit_bits: int
) -> Int[Array, " B"]:
    """Draw for every row, after a search for the last token that top_p keeps."""
    token_ids = _all_ids(logits)
    cut = find_cut(logits, _weights(draw, filters, logits, token_ids), target, digit_bits=digit_bits)
    kept = _passes(draw, filters, logits, token_ids) & is_kept(logits, token_ids, cut)
    return first_token(jnp.where(kept, scores(draw, logits, token_ids), -jnp.inf))[0]


def _passes(
    draw: Draw, filters: Filters, logits: Float[Array, "B K"], token_ids: Int[Array, "B K"]
) -> Bool[Array, "B K"]:
    """Whether top_k, min_p and the bans leave a token."""
    is_likely = shifted_logits(draw, logits) >= filters.lowest[:, None]
    return is_likely & is_kept(logits, token_ids, filters.top_k_cut) & (logits > -jnp.inf)


def _weights(draw: Draw, filters: Filters, logits: Float[Array, "B K"], token_ids: Int[Array, "B K"]) -> Array:
    passes = _passes(draw, filters, logits, token_ids)
    return jnp.where(passes, token_weights(shifted_logits(draw, logits)), jnp.uint32(0))


def _all_ids(logits: Float[Array, "B V"]) -> Int[Array, "B V"]:
    return jnp.broadcast_to(jnp.arange(logits.shape[1], dtype=jnp.int32), logits.shape)


def _choose[T: tuple](condition: Bool[Array, " B"], first: T, second: T) -> T:
    """Select between two tuples of [B] arrays row by row."""
    return type(first)(*(jnp.where(condition, a, b) for a, b in zip(first, second, strict=True)))
