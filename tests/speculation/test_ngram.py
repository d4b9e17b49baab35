"""The n-gram look-up on the device against the obvious one in Python."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pagedjax.execution.request_state import empty_rows
from pagedjax.speculation.ngram import continue_ngram, propose_ngram

LENGTH, NUM_DRAFTS = 40, 5


def look_up(tokens, min_tokens, max_tokens):
    """The longest ending that came before, where it came last, and what followed it, round and round."""
    for size in range(min(max_tokens, len(tokens) - 1), min_tokens - 1, -1):
        for end in range(len(tokens) - 2, size - 2, -1):
            if tokens[end - size + 1 : end + 1] == tokens[-size:]:
                followed = tokens[end + 1 :]
                return [followed[i % len(followed)] for i in range(NUM_DRAFTS)]
    return [-1] * NUM_DRAFTS


@pytest.mark.parametrize(("min_tokens", "max_tokens"), [(1, 1), (2, 3), (1, 4), (3, 3)])
def test_random_histories(min_tokens, max_tokens):
    random = np.random.default_rng(min_tokens)
    rows = [random.integers(0, 3, int(random.integers(1, LENGTH + 1))).tolist() for _ in range(64)]
    garbage = random.integers(0, 3, (64, LENGTH)).astype(np.int32)
    for target, row in zip(garbage, rows, strict=True):
        target[: len(row)] = row
    newest = jnp.array([len(row) - 1 for row in rows], jnp.int32)
    options = {"num_drafts": NUM_DRAFTS, "min_tokens": min_tokens, "max_tokens": max_tokens}
    drafts = jax.jit(lambda *args: continue_ngram(*args, **options))(jnp.asarray(garbage), newest)
    expected = [look_up(row, min_tokens, max_tokens) for row in rows]
    assert drafts.tolist() == expected
    assert sum(row[0] >= 0 for row in expected) > 10
    assert any(row[0] < 0 for row in expected)


def test_the_newest_token_comes_from_the_row_and_other_rows_stay_as_they_are():
    state = empty_rows(3, 4, max_draft_tokens=2)
    state = state.__class__(
        jnp.array([0, 4, 0], jnp.int32), jnp.array([9, 7, 9], jnp.int32), state.block_tables, state.floats, state.ints,
        state.drafts,
    )  # fmt: skip
    history = jnp.array([[1] * 8, [6, 7, 8, 6, 0, 0, 0, 0], [2] * 8], jnp.int32)
    state, history, drafts = propose_ngram(state, history, jnp.array([1, 3], jnp.int32), min_tokens=2, max_tokens=3)
    assert history.tolist() == [[1] * 8, [6, 7, 8, 6, 7, 0, 0, 0], [2] * 8]
    assert drafts[0].tolist() == [8, 6]
    assert state.drafts is not None
    assert state.drafts.tolist() == [[-1, -1], [8, 6], [-1, -1]]
