"""The whole distribution that `sampler.sample` draws from, where one token of it is not enough.

Verification by the published rule (`rejection`) compares a draft's probability with the target's. They are the exact
weights by which the filters decide, so that a token that sampling could not give has probability 0 here.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pagedjax.execution.filters import kept_weights
from pagedjax.execution.mass import LOW_BITS, total
from pagedjax.execution.sampler import filter_rows
from pagedjax.execution.sampling_rows import SamplingRows


def probabilities(
    logits: Float[Array, "B V"], positions: Int[Array, " B"], rows: SamplingRows
) -> tuple[Float[Array, "B V"], Bool[Array, " B"]]:
    """Return each token's probability after edits, temperature and filters, and whether a row allows sampling at all.

    A greedy row has a single token, a row that does not allow it none. Below 2^-27 of the largest they are 0.
    """
    logits = logits.astype(jnp.float32)
    logits = jnp.where(logits < jnp.inf, logits, jnp.inf)  # NaN too
    row = filter_rows(logits, positions, rows, has_wide_rows=True)
    weights = kept_weights(row.draw, row.filters, row.target, row.candidates, row.logits)
    mass = total(weights)
    number = mass.high.astype(jnp.float32) * jnp.float32(2**LOW_BITS) + mass.low.astype(jnp.float32)
    shares = weights.astype(jnp.float32) / jnp.maximum(number, jnp.float32(1.0))[:, None]
    return jnp.where(row.is_valid[:, None], shares, jnp.float32(0.0)), row.is_valid  # [B, V]
