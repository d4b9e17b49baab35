"""One token for each row, all on the device: nothing here waits for a value or sorts the vocabulary.

In vLLM's order: the raw logits serve log probabilities (`logprobs`); then `logit_edits` (allowed_token_ids, bad_words,
min_tokens, logit_bias, penalties); greedy rows take the first token; the others go through temperature, min_p,
top_k, top_p (`filters`) and Gumbel-max (`draw`). Noise and filters are exact functions of the row, so the token
depends neither on the batch, its padding, nor on the variant that runs.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pagedjax.execution.draw import Draw, scores
from pagedjax.execution.filters import (
    NUM_CANDIDATES,
    Candidates,
    Filters,
    draw_by_rejection,
    draw_from_candidates,
    is_wide_top_k,
    make_filters,
    mass_of_candidates,
    mass_of_vocabulary,
    nucleus_target,
    search_wide_top_k,
)
from pagedjax.execution.logit_edits import edit_logits
from pagedjax.execution.mass import Mass
from pagedjax.execution.ranking import all_token_ids, first_token, first_tokens
from pagedjax.execution.sampling_rows import SamplingRows

Variant = Literal["plain", "top_k", "full"]

# What loops and conditions on data need on a GPU: they become nodes of a CUDA graph. Without it the host waits at each
# of them for the device (H200, full variant behind a queue of 40 ms: dispatch took 36 ms without and 0.5 ms with it).
GPU_COMPILER_OPTIONS = {
    "xla_gpu_enable_command_buffer": ("FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE")
}


def sample(
    logits: Float[Array, "B V"], positions: Int[Array, " B"], rows: SamplingRows, *, variant: Variant
) -> tuple[Int[Array, " B"], Bool[Array, " B"]]:
    """Return the token sampled at `positions` from each row, and whether the row allows sampling at all.

    It does not if the raw logits hold NaN or +inf, or if every token is -inf or banned; the id is 0 then. A variant
    must cover its rows, and where several do they agree:

      plain   any temperature, nothing else set; without noise where all rows are greedy
      top_k   greedy, or 1 <= top_k <= NUM_CANDIDATES; with or without the other filters and edits
      full    everything
    """
    logits = logits.astype(jnp.float32)
    if variant == "plain":

        def draw_each() -> tuple[Int[Array, " B"], Float[Array, " B"]]:
            maximum = jnp.max(_checked(logits), axis=1)
            draw = Draw(jnp.where(jnp.isfinite(maximum), maximum, 0), rows.temperature, rows.seeds, positions)
            return first_token(scores(draw, logits, all_token_ids(logits)))[0], maximum

        is_random = jnp.any(rows.temperature > 0)
        token_ids, maximum = lax.cond(is_random, draw_each, lambda: first_token(_checked(logits)))
        is_valid = jnp.isfinite(maximum)
    else:
        token_ids, is_valid = _sample_filtered(_checked(logits), positions, rows, has_wide_rows=variant == "full")
    return jnp.where(is_valid, token_ids, 0), is_valid


def _checked(logits: Float[Array, "B V"]) -> Float[Array, "B V"]:
    """Turn NaN into infinity: a maximum may drop it. Inside a branch this is fused, across its border it is stored."""
    return jnp.where(logits < jnp.inf, logits, jnp.inf)


class FilteredRows(NamedTuple):
    """Rows after edits and filters: a token is kept if `filters` pass it and the mass before it is below `target`."""

    logits: Float[Array, "B V"]
    candidates: Candidates
    draw: Draw
    filters: Filters
    target: Mass
    is_valid: Bool[Array, " B"]


def filter_rows(
    logits: Float[Array, "B V"], positions: Int[Array, " B"], rows: SamplingRows, *, has_wide_rows: bool
) -> FilteredRows:
    """Edit the logits, free of NaN, and decide which tokens are kept; `has_wide_rows` as for the variant "full"."""
    is_valid = jnp.max(logits, axis=1) < jnp.inf
    if rows.has_edits:
        logits = edit_logits(logits, positions, rows)
    logits = jnp.where(logits == 0, jnp.float32(0.0), logits)  # no -0.0: equal logits have equal bits
    candidates = Candidates(*first_tokens(logits, NUM_CANDIDATES))
    maximum = candidates.logits[:, 0]
    is_valid &= jnp.isfinite(maximum)
    draw = Draw(jnp.where(is_valid, maximum, 0), rows.temperature, rows.seeds, positions)

    filters = make_filters(rows, candidates, logits.shape[1])
    mass = mass_of_candidates(draw, filters, candidates)
    if has_wide_rows:
        filters, mass = _look_beyond(draw, filters, mass, logits)
    return FilteredRows(logits, candidates, draw, filters, nucleus_target(filters, mass), is_valid)


def _sample_filtered(
    logits: Float[Array, "B V"], positions: Int[Array, " B"], rows: SamplingRows, *, has_wide_rows: bool
) -> tuple[Int[Array, " B"], Bool[Array, " B"]]:
    logits, candidates, draw, filters, target, is_valid = filter_rows(
        logits, positions, rows, has_wide_rows=has_wide_rows
    )
    token_ids, is_settled = draw_from_candidates(draw, filters, target, candidates)
    if has_wide_rows:
        is_open = is_valid & ~is_settled
        drawn = if_any(is_open, lambda: draw_by_rejection(draw, filters, target, logits, is_open), token_ids)
        token_ids = jnp.where(is_open, drawn, token_ids)
    return token_ids, is_valid


def if_any[T](is_needed: Bool[Array, " B"], compute: Callable[[], T], otherwise: T) -> T:
    """Compute something only where a row needs it."""
    return lax.cond(jnp.any(is_needed), compute, lambda: otherwise)


def _look_beyond(draw: Draw, filters: Filters, mass: Mass, logits: Float[Array, "B V"]) -> tuple[Filters, Mass]:
    """Add what the candidates do not tell: the cut of a large top_k, and the mass of rows without a small one."""
    is_wide = is_wide_top_k(filters, logits.shape[1])
    cut = if_any(is_wide, lambda: search_wide_top_k(filters, logits), filters.top_k_cut)
    filters = filters._replace(top_k_cut=cut)
    needs_mass = (filters.top_k > NUM_CANDIDATES) & (filters.top_p < 1)
    return filters, if_any(needs_mass, lambda: mass_of_vocabulary(draw, filters, logits), mass)
