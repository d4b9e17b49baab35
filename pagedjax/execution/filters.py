"""Top-k, top-p and min-p as the set of tokens they keep: always the first few tokens in the order of `ranking`.

min_p keeps tokens at least min_p times as likely as the most likely one; top_k keeps the first k; top_p keeps the
shortest start of what the other two left whose share of it reaches p, hence at least one token. Equal logits are
told apart by token id, so top_k=1 and a tiny top_p are greedy decoding.

`draw_from_candidates` settles a row whose kept set lies within its first NUM_CANDIDATES tokens; the others go
through `draw_by_rejection`, which draws from the same kind of set over the whole vocabulary.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt

from pagedjax.execution.cut import Cut, cut_after, cut_by_mass, is_before, is_kept, no_cut
from pagedjax.execution.draw import Draw, best_token, scores, shifted_logits
from pagedjax.execution.mass import Mass, is_less, share, sums_before, token_weights, total, whole
from pagedjax.execution.portable_math import log
from pagedjax.execution.ranking import all_token_ids, first_token
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
    lowest = jnp.where(is_random & (rows.min_p > 0), jnp.minimum(log(rows.min_p), 0), -jnp.inf)
    return Filters(top_k, cut, lowest, jnp.where(is_random, rows.top_p, jnp.float32(1.0)))


def is_wide_top_k(filters: Filters, vocab_size: int) -> Bool[Array, " B"]:
    """Whether a row's top_k goes beyond the candidates."""
    return (filters.top_k > NUM_CANDIDATES) & (filters.top_k < vocab_size)


def search_wide_top_k(filters: Filters, logits: Float[Array, "B V"]) -> Cut:
    """Return `filters.top_k_cut`, completed for the rows whose top_k goes beyond the candidates."""
    return _choose(is_wide_top_k(filters, logits.shape[1]), cut_after(logits, filters.top_k), filters.top_k_cut)


def mass_of_candidates(draw: Draw, filters: Filters, candidates: Candidates) -> Mass:
    """Sum what top_k and min_p leave, for rows whose top_k lies within the candidates."""
    return total(_weights(draw, filters, candidates.logits, candidates.token_ids))


def mass_of_vocabulary(draw: Draw, filters: Filters, logits: Float[Array, "B V"]) -> Mass:
    """Sum what top_k and min_p leave."""
    return total(_weights(draw, filters, logits, all_token_ids(logits)))


def nucleus_target(filters: Filters, mass: Mass) -> Mass:
    """Return the mass that makes up top_p; a token is kept if the mass before it is less."""
    everything = Mass(jnp.full_like(mass.high, 2**32 - 1), jnp.full_like(mass.low, 2**13 - 1))
    return _choose(filters.top_p < 1, share(mass, filters.top_p), everything)


def draw_from_candidates(
    draw: Draw, filters: Filters, target: Mass, candidates: Candidates
) -> tuple[Int[Array, " B"], Bool[Array, " B"]]:
    """Return the best kept candidate, and whether no token beyond the candidates is kept."""
    token_ids, logits = candidates
    kept, is_settled = _keep_candidates(draw, filters, target, candidates)
    return best_token(scores(draw, logits, token_ids), token_ids, kept), is_settled


def kept_weights(
    draw: Draw, filters: Filters, target: Mass, candidates: Candidates, logits: Float[Array, "B V"]
) -> UInt[Array, "B V"]:
    """Return the weights of the kept tokens, 0 for all others."""
    token_ids = all_token_ids(logits)
    weights = _weights(draw, filters, logits, token_ids)
    kept, is_settled = _keep_candidates(draw, filters, target, candidates)
    last = jnp.clip(jnp.sum(kept, axis=1, dtype=jnp.int32) - 1, 0)[:, None]  # the kept ones come first
    last_id, edge = (jnp.take_along_axis(values, last, axis=1)[:, 0] for values in candidates)
    cut = _choose(is_settled, Cut(edge, last_id), no_cut(*logits.shape))
    is_open = ~is_settled & (filters.top_p < 1)
    searched = lax.cond(jnp.any(is_open), lambda: cut_by_mass(logits, weights, target), lambda: cut)
    return jnp.where(is_kept(logits, token_ids, _choose(is_open, searched, cut)), weights, jnp.uint32(0))


def draw_by_rejection(
    draw: Draw, filters: Filters, target: Mass, logits: Float[Array, "B V"], is_open: Bool[Array, " B"]
) -> Int[Array, " B"]:
    """Draw for the rows that are open: try the best-scored token; if top_p cuts it off, so does it all after it; again.

    The rounds depend on the data: one if top_p is off, seldom over four. A row ends at its first token at the latest.
    """
    token_ids = all_token_ids(logits)
    weights = _weights(draw, filters, logits, token_ids)
    passing = jnp.where(_passes(draw, filters, logits, token_ids), scores(draw, logits, token_ids), -jnp.inf)

    def try_best(state: tuple[Int[Array, " B"], Cut, Bool[Array, " B"]]) -> tuple:
        token, bound, is_open = state
        best, score = first_token(jnp.where(is_before(logits, token_ids, bound), passing, -jnp.inf))
        place = Cut(jnp.take_along_axis(logits, best[:, None], axis=1)[:, 0], best)
        before = total(jnp.where(is_before(logits, token_ids, place), weights, jnp.uint32(0)))
        is_rejected = ~is_less(before, target) & (score > -jnp.inf)
        return jnp.where(is_open, best, token), place, is_open & is_rejected

    state = (jnp.zeros_like(filters.top_k), no_cut(*logits.shape), is_open)
    return lax.while_loop(lambda state: jnp.any(state[2]), try_best, state)[0]


def _keep_candidates(
    draw: Draw, filters: Filters, target: Mass, candidates: Candidates
) -> tuple[Bool[Array, "B C"], Bool[Array, " B"]]:
    """Return which candidates are kept, and whether no token beyond them is."""
    token_ids, logits = candidates
    before = whole(sums_before(_weights(draw, filters, logits, token_ids)))  # 63 * 2^26 fit 32 bits
    kept = _passes(draw, filters, logits, token_ids) & is_less(before, Mass(*(word[:, None] for word in target)))
    return kept, ~kept[:, -1] | (filters.top_k <= NUM_CANDIDATES)


def _passes(
    draw: Draw, filters: Filters, logits: Float[Array, "B K"], token_ids: Int[Array, "B K"]
) -> Bool[Array, "B K"]:
    """Whether top_k, min_p and the bans leave a token."""
    is_likely = shifted_logits(draw, logits) >= filters.lowest[:, None]
    return is_likely & is_kept(logits, token_ids, filters.top_k_cut) & (logits > -jnp.inf)


def _weights(draw: Draw, filters: Filters, logits: Float[Array, "B K"], token_ids: Int[Array, "B K"]) -> Array:
    passes = _passes(draw, filters, logits, token_ids)
    return jnp.where(passes, token_weights(shifted_logits(draw, logits)), jnp.uint32(0))


def _choose[T: tuple](condition: Bool[Array, " B"], first: T, second: T) -> T:
    """Select between two tuples of [B] arrays row by row."""
    return type(first)(*(jnp.where(condition, a, b) for a, b in zip(first, second, strict=True)))
