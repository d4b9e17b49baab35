"""Log probabilities for outputs and prompts: under the raw logits, before penalties, temperature and filters."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pagedjax.execution.ranking import first_tokens


def top_logprobs(
    logits: Float[Array, "B V"], token_ids: Int[Array, " B"], *, num: int
) -> tuple[Float[Array, " B"], Int[Array, " B"], Int[Array, "B n"], Float[Array, "B n"]]:
    """Return log probability and rank of `token_ids`, then ids and log probabilities of the `num` most likely tokens.

    num is 0 to 128. The rank is 1 + the number of tokens with a larger logit; equal logits share it, while the list
    has the smaller id first. Past the vocabulary, entries have ids from V on and log probability -inf.
    """
    logits = logits.astype(jnp.float32)
    top_ids, top_logits = first_tokens(logits, max(num, 1))
    maximum = top_logits[:, :1]
    log_sum = jnp.log(jnp.sum(jnp.exp(logits - maximum), axis=1, keepdims=True))
    given = jnp.take_along_axis(logits, token_ids[:, None], axis=1)  # [B, 1]
    rank = 1 + jnp.sum(logits > given, axis=1, dtype=jnp.int32)
    logprob = (given - maximum) - log_sum  # in this order: large logits would swallow the sum
    return logprob[:, 0], rank, top_ids[:, :num], (top_logits[:, :num] - maximum) - log_sum
