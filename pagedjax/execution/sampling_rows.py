"""What the sampler knows of each row of a step: the parameters of its request, gathered for B rows.

The fields that change logits come all or not at all: without them (None) no penalty, bias or ban is traced. Owned
by whoever gathers them from the request rows; the sampler only reads.
"""

from dataclasses import dataclass

import jax
from jaxtyping import Array, Bool, Float, Int, UInt


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class SamplingRows:
    """Parameters of B rows over a vocabulary of V tokens. A pad of an id list is V (or more) and has no effect."""

    temperature: Float[Array, " B"]  # 0 is greedy
    top_k: Int[Array, " B"]  # 0 is off
    top_p: Float[Array, " B"]
    min_p: Float[Array, " B"]
    seeds: UInt[Array, "B 2"]  # low and high word of the request's seed, see `gumbel.seed_words`
    min_position: Int[Array, " B"]  # stop ids are banned while the sampled token's position is below
    repetition_penalty: Float[Array, " B"]
    presence_penalty: Float[Array, " B"]
    frequency_penalty: Float[Array, " B"]

    output_counts: Int[Array, "B V"] | None = None  # times each token was generated
    prompt_mask: Bool[Array, "B V"] | None = None  # whether the prompt holds the token
    allowed_mask: UInt[Array, "B W"] | None = None  # bit v % 32 of word v // 32; all ones without a restriction
    bias_ids: Int[Array, "B E"] | None = None
    bias_values: Float[Array, "B E"] | None = None
    stop_ids: Int[Array, "B X"] | None = None
    bad_words: Int[Array, "B Y Z"] | None = None  # token ids, right-aligned, filled up with -1
    recent_token_ids: Int[Array, "B Z"] | None = None  # newest output tokens, newest last, -1 before the first

    @property
    def has_edits(self) -> bool:
        """Whether the fields that change logits are there."""
        return self.output_counts is not None
