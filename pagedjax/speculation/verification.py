"""Accept the drafts that the target samples itself: the second half of a step that verifies.

    query tokens of a row      newest   draft 0   ..   draft k-1
    sampled after them         t[0]     t[1]      ..   t[k]
    accepted                   draft i, if all before it were and t[i] equals it
    new tokens                 t[0] .. t[a] for a accepted drafts

Sampling noise depends on (seed, position, token id) alone, so t[0] .. t[a] are what one token a step would have
given. Rows are rolled back here: their lengths leave out refused drafts, whose K and V are overwritten later.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt

from pagedjax.execution.gumbel import threefry_2x32
from pagedjax.execution.logprobs import top_logprobs
from pagedjax.execution.probabilities import probabilities
from pagedjax.execution.rejection import accept_or_replace, reached
from pagedjax.execution.request_state import RowState, SamplerState, gather_sampling_rows
from pagedjax.execution.sampler import Variant, sample
from pagedjax.execution.sampling_rows import SamplingRows
from pagedjax.execution.step import StepFunctions, TokenLogprobs, record_tokens

VerifyVariant = Literal["plain", "filtered", "edited", "standard"]
"""What covers a batch: "plain" any temperature, "filtered" all that changes no logit, "edited" everything.

"standard" is the other rule of acceptance, see `execution.rejection`, for everything. "edited" and "standard" go from
one position to the next, for what depends on the tokens in between; the others sample all positions of all rows at
once. On a CPU that is no faster, and so "edited" stands for "filtered", which is slow to compile.
"""
VERIFY_VARIANTS: dict[str, tuple[VerifyVariant, ...]] = {
    "cpu": ("plain", "edited"),
    "gpu": ("plain", "filtered", "edited"),
}


def num_columns(max_draft_tokens: int) -> int:
    """Columns of a result: 1 + K tokens, K drafts, number of new tokens, 1 where the logits were finite."""
    return 2 * max_draft_tokens + 3


class Verification:
    """The functions that verify drafts for one model. K is the most drafts a row verifies, R the number of rows."""

    def __init__(
        self, functions: StepFunctions, *, max_draft_tokens: int, max_logprobs: int,
        forced_acceptance: float | None = None,
    ):  # fmt: skip
        self._functions = functions
        self._forced = forced_acceptance
        self._width = 1 + max_draft_tokens
        self._max_logprobs = max_logprobs

    def pick(self, hidden: Float[Array, "T D"], index: Int[Array, " n"]) -> Float[Array, "n D"]:
        """Hidden states of the tokens that are sampled after, from those of a whole step."""
        return hidden[index]

    def verify(
        self,
        leaves: tuple,
        state: RowState,
        history: Int[Array, "R L"],
        wide: SamplerState | None,
        draft_masks: UInt[Array, "R K W"] | None,
        chances: Float[Array, "R K V"] | None,
        hidden: Float[Array, "n D"],
        batch: Int[Array, "3 B"],
        *,
        variant: VerifyVariant,
    ) -> tuple[RowState, Int[Array, "R L"], SamplerState | None, Int[Array, "B C"]]:
        """Sample and accept for `batch`: rows, their numbers of drafts, and 1 where a grammar masks the drafts.

        `hidden` is [R * (1 + K), D] in the order of the batch, `chances` are the distributions that the drafts were
        drawn from, for the standard rule. Returns the result array last, see `num_columns`.
        """
        assert state.drafts is not None, "an engine with speculation has rows with drafts"
        rows, num_drafts = batch[0], batch[1]
        hidden = hidden[: rows.shape[0] * self._width]
        drafts = state.drafts.at[rows].get(mode="clip")  # [B, K]
        if self._forced is not None:
            drafts = jnp.maximum(drafts, 0)  # where none was found, the one that was computed counts
        first = state.context_lens.at[rows].get(mode="clip") - num_drafts
        positions = first[:, None] + jnp.arange(self._width, dtype=jnp.int32)[None, :]  # [B, 1 + K] of sampled tokens
        with jax.named_scope("verify"):
            if variant in ("edited", "standard"):
                assert wide is not None
                assert draft_masks is not None
                choose = partial(self._draw_or_accept, chances) if variant == "standard" else self._draw
                wide, tokens, is_valid = self._one_by_one(
                    leaves, state, wide, draft_masks, hidden, batch, drafts, positions, choose
                )
            else:
                sampler: Variant = "full" if variant == "filtered" else "plain"
                tokens, is_valid = self._all_at_once(leaves, state, hidden, rows, drafts, positions, sampler)
            is_reached = reached((tokens[:, :-1] == drafts) & is_valid[:, :-1], num_drafts)
        is_new = is_reached & is_valid
        num_new = jnp.sum(is_new, axis=1, dtype=jnp.int32)
        newest = jnp.take_along_axis(tokens, jnp.maximum(num_new - 1, 0)[:, None], axis=1)[:, 0]
        state = replace(
            state,
            last_token_ids=state.last_token_ids.at[rows].set(newest, mode="drop"),
            context_lens=state.context_lens.at[rows].set(first - 1 + num_new, mode="drop"),
        )
        history = history.at[rows[:, None], positions].set(tokens, mode="drop")  # refused: past the row's length
        is_finite = jnp.all(is_valid | ~is_reached, axis=1).astype(jnp.int32)
        result = jnp.concatenate([tokens, drafts, num_new[:, None], is_finite[:, None]], axis=1)
        return state, history, wide, result

    def logprobs(self, leaves: tuple, hidden: Float[Array, "n D"], result: Int[Array, "B C"]) -> TokenLogprobs:
        """Log probabilities of the sampled tokens in `result`, [B * (1 + K)]."""
        with jax.named_scope("logprobs"):
            logits = self._functions.logits(leaves, hidden[: result.shape[0] * self._width])
            token_ids = result[:, : self._width].reshape(-1)
            return TokenLogprobs(*top_logprobs(logits, token_ids, num=self._max_logprobs))

    def _all_at_once(
        self, leaves: tuple, state: RowState, hidden: Array, rows: Array, drafts: Array, positions: Array,
        variant: Variant,
    ) -> tuple[Int[Array, "B n"], Bool[Array, "B n"]]:  # fmt: skip
        params = gather_sampling_rows(state, jnp.repeat(rows, self._width), None)
        logits = self._functions.logits(leaves, hidden)  # [B * (1 + K), V]
        tokens, is_valid = sample(logits, positions.reshape(-1), params, variant=variant)
        tokens, is_valid = tokens.reshape(positions.shape), is_valid.reshape(positions.shape)
        if self._forced is not None:
            none = jnp.full((drafts.shape[0], 1), -1, jnp.int32)
            seeds = params.seeds.reshape(*positions.shape, 2)
            tokens = force(tokens, jnp.concatenate([drafts, none], axis=1), seeds, positions, self._forced)
        return tokens, is_valid

    def _one_by_one(
        self, leaves: tuple, state: RowState, wide: SamplerState, draft_masks: Array, hidden: Array, batch: Array,
        drafts: Array, positions: Array, choose: Callable[..., tuple[Array, Array]],
    ) -> tuple[SamplerState, Int[Array, "B n"], Bool[Array, "B n"]]:  # fmt: skip
        """Sample position by position. A row whose draft was refused records no more tokens, so no count is undone."""
        rows, num_drafts, is_masked = batch
        no_row = state.context_lens.shape[0]
        by_position = jnp.swapaxes(hidden.reshape(rows.shape[0], self._width, -1), 0, 1)  # [1 + K, B, D]

        def sample_one(carry: tuple, inputs: tuple) -> tuple[tuple, tuple]:
            wide, is_reached = carry
            index, one_hidden, one_positions = inputs
            params = gather_sampling_rows(state, rows, wide)
            masks = draft_masks.at[rows, index - 1].get(mode="clip")
            uses_mask = (is_masked == 1) & (index > 0)
            allowed_mask = jnp.asarray(params.allowed_mask)
            params = replace(params, allowed_mask=jnp.where(uses_mask[:, None], masks, allowed_mask))
            logits = self._functions.logits(leaves, one_hidden)
            draft = drafts.at[:, index].get(mode="fill", fill_value=-1)
            is_drafted = (index < num_drafts) & (draft >= 0)
            tokens, is_valid = choose(logits, one_positions, params, rows, index, draft, is_drafted)
            is_new = is_reached & is_valid
            wide = record_tokens(wide, jnp.where(is_new, rows, no_row), tokens)
            return (wide, is_new & is_drafted & (tokens == draft)), (tokens, is_valid)

        inputs = (jnp.arange(self._width, dtype=jnp.int32), by_position, jnp.swapaxes(positions, 0, 1))
        everybody = jnp.ones(rows.shape, jnp.bool_)
        (wide, _), (tokens, is_valid) = jax.lax.scan(sample_one, (wide, everybody), inputs)
        return wide, jnp.swapaxes(tokens, 0, 1), jnp.swapaxes(is_valid, 0, 1)

    def _draw(
        self, logits: Array, positions: Array, params: SamplingRows, rows: Array, index: Array, draft: Array,
        is_drafted: Array,
    ) -> tuple[Array, Array]:  # fmt: skip
        """Sample as a plain step does."""
        tokens, is_valid = sample(logits, positions, params, variant="full")
        if self._forced is not None:
            tokens = force(tokens, draft, params.seeds, positions, self._forced)
        return tokens, is_valid

    def _draw_or_accept(
        self, chances: Array | None, logits: Array, positions: Array, params: SamplingRows, rows: Array, index: Array,
        draft: Array, is_drafted: Array,
    ) -> tuple[Array, Array]:  # fmt: skip
        """Go by the standard rule."""
        target, is_valid = probabilities(logits, positions, params)
        drawn_from = None if chances is None else chances.at[rows, index].get(mode="clip")
        return accept_or_replace(target, draft, is_drafted, drawn_from, params.seeds, positions), is_valid


def force(
    tokens: Int[Array, "*B"],
    drafts: Int[Array, "*B"],
    seeds: UInt[Array, "*B 2"],
    positions: Int[Array, "*B"],
    acceptance: float,
) -> Int[Array, "*B"]:
    """Replace sampled tokens by drafts (-1 for none) to have them accepted: for measuring speed, not for text.

    `acceptance` is the chance of each draft, 0 to 1.
    """
    stream = jnp.ones_like(seeds[..., 0])
    bits, _ = threefry_2x32(seeds[..., 0], seeds[..., 1], positions.astype(jnp.uint32), stream)
    is_accepted = (bits >> jnp.uint32(8)).astype(jnp.float32) < jnp.float32(acceptance * 2**24)
    other = jnp.where(tokens == 0, 1, tokens - 1)
    refused = jnp.where(tokens == drafts, other, tokens)
    return jnp.where(drafts < 0, tokens, jnp.where(is_accepted, drafts, refused))
