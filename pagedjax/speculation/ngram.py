"""Propose what followed the last time that the newest tokens came in this order: no model, one pass over the history.

Prompt lookup decoding (Saxena, 2023) on the device, for all rows at once and at fixed shapes.
"""

from dataclasses import replace

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from pagedjax.execution.request_state import RowState


def propose_ngram(
    state: RowState,
    history: Int[Array, "R L"],
    rows: Int[Array, " B"],
    *,
    min_tokens: int,
    max_tokens: int,
) -> tuple[RowState, Int[Array, "R L"], Int[Array, "B K"]]:
    """Write drafts for `rows` (a row of R is a pad) into the state, and the rows' newest tokens into the history.

    Looks for the newest tokens, `max_tokens` of them or as few as `min_tokens`, among those before; the longest match
    wins, of equal ones the most recent. Drafts go on behind it, and from its end again where they reach the newest
    token. -1 where nothing matches.
    """
    assert state.drafts is not None, "an engine with speculation has rows with drafts"
    newest_position = state.context_lens.at[rows].get(mode="clip")
    newest = state.last_token_ids.at[rows].get(mode="clip")
    history = history.at[rows, newest_position].set(newest, mode="drop")
    tokens = history.at[rows].get(mode="clip")  # [B, L]
    drafts = continue_ngram(
        tokens, newest_position, num_drafts=state.drafts.shape[1], min_tokens=min_tokens, max_tokens=max_tokens
    )
    return replace(state, drafts=state.drafts.at[rows].set(drafts, mode="drop")), history, drafts


def continue_ngram(
    tokens: Int[Array, "B L"], newest_position: Int[Array, " B"], *, num_drafts: int, min_tokens: int, max_tokens: int
) -> Int[Array, "B K"]:
    """Return drafts for rows of `tokens` whose newest token is at `newest_position`; others behind it are not read."""
    length = tokens.shape[1]
    place = jnp.arange(length, dtype=jnp.int32)[None, :]
    is_running = place < newest_position[:, None]  # a match ends at a place before the newest token
    match_len = jnp.zeros_like(tokens)
    for i in range(max_tokens):
        is_running &= _looks_like_newest(tokens, newest_position, i)
        match_len += is_running.astype(jnp.int32)
    score = jnp.where(match_len >= min_tokens, match_len * length + place, -1)
    end = jnp.argmax(score, axis=1).astype(jnp.int32)[:, None]  # [B, 1]
    is_found = jnp.take_along_axis(score, end, axis=1) >= 0
    period = jnp.maximum(newest_position[:, None] - end, 1)
    ahead = jnp.arange(num_drafts, dtype=jnp.int32)[None, :] % period
    drafts = jnp.take_along_axis(tokens, jnp.minimum(end + 1 + ahead, length - 1), axis=1)
    return jnp.where(is_found, drafts, -1)


def _looks_like_newest(tokens: Int[Array, "B L"], newest_position: Int[Array, " B"], i: int) -> Bool[Array, "B L"]:
    """Whether the token `i` before each place is the token `i` before the newest."""
    wanted = jnp.take_along_axis(tokens, jnp.maximum(newest_position - i, 0)[:, None], axis=1)
    shifted = jnp.pad(tokens, ((0, 0), (i, 0)), constant_values=-1)[:, : tokens.shape[1]]
    return (shifted == wanted) & (newest_position >= i)[:, None]
