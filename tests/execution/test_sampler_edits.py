"""Bans, biases and penalties against numpy, and in vLLM's order."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pagedjax.execution.logit_edits import edit_logits
from tests.execution.naive_sampler import Row, edited, pack
from tests.execution.test_sampler import mixed_rows

VOCAB_SIZE = 300
edit = jax.jit(edit_logits)


def run(logits: np.ndarray, rows: list[Row]) -> np.ndarray:
    positions = jnp.array([row.position for row in rows], jnp.int32)
    return np.asarray(edit(jnp.asarray(logits), positions, pack(rows, logits.shape[1])))


def one(row: Row, vocab_size: int = 8) -> np.ndarray:
    """Edit the logits 1, 2, ..., V."""
    return run(np.arange(1, vocab_size + 1, dtype=np.float32)[None], [row])[0]


@pytest.mark.parametrize("seed", range(4))
def test_mixed_edits_equal_naive_ones(seed: int) -> None:
    rows = mixed_rows(seed)
    logits = (np.random.default_rng(seed).normal(size=(len(rows), VOCAB_SIZE)) * 4).astype(np.float32)
    expected = [edited(row_logits, row) for row_logits, row in zip(logits, rows, strict=True)]
    np.testing.assert_allclose(run(logits, rows), expected, rtol=1e-6, atol=1e-6)


def test_a_neutral_row_keeps_every_bit() -> None:
    logits = (np.random.default_rng(0).normal(size=(2, VOCAB_SIZE)) * 4).astype(np.float32)
    logits[0, 7] = -np.inf
    rows = [Row(prompt=[1, 2], output=[3, 4, 4]), Row()]
    np.testing.assert_array_equal(run(logits, rows).view(np.uint32), logits.view(np.uint32))


def test_allowed_token_ids_ban_the_rest() -> None:
    allowed = [0, 31, 32, 63, 64]
    assert np.nonzero(np.isfinite(one(Row(allowed=allowed), 70)))[0].tolist() == allowed


def test_a_bad_word_of_one_token_is_always_banned() -> None:
    assert one(Row(bad_words=[[3]])).tolist() == [1, 2, 3, -np.inf, 5, 6, 7, 8]


@pytest.mark.parametrize(
    ("output", "is_banned"),
    [([5, 6], True), ([0, 0, 5, 6], True), ([6], False), ([5, 6, 0], False), ([], False), ([5, 5], False)],
)
def test_a_bad_word_is_banned_after_the_rest_of_it_was_generated(output: list[int], is_banned: bool) -> None:
    logits = one(Row(bad_words=[[5, 6, 3]], output=output, prompt=[5, 6]))
    assert (logits[3] == -np.inf) == is_banned
    assert np.isfinite(np.delete(logits, 3)).all()


def test_stop_ids_are_banned_below_the_minimum_position() -> None:
    rows = [Row(stop_ids=[2, 7], min_position=10, position=position) for position in (9, 10)]
    logits = run(np.ones((2, 8), np.float32), rows)
    assert np.nonzero(logits[0] == -np.inf)[0].tolist() == [2, 7]
    assert np.isfinite(logits[1]).all()


def test_a_bias_comes_before_the_penalties() -> None:
    """The repetition penalty divides or multiplies by the sign that the bias leaves."""
    assert one(Row(bias={1: -6.0}, repetition_penalty=2.0, prompt=[1]))[1] == -8.0


def test_a_bias_cannot_lift_a_ban() -> None:
    assert one(Row(bias={3: 100.0}, bad_words=[[3]]))[3] == -np.inf


def test_penalties_count_the_prompt_for_repetition_only() -> None:
    row = Row(prompt=[0, 0, 1], output=[2, 2, 2], repetition_penalty=2.0)
    assert one(row).tolist() == [0.5, 1.0, 1.5, 4, 5, 6, 7, 8]
    row = Row(prompt=[0, 0, 1], output=[2, 2, 2], presence_penalty=0.5, frequency_penalty=0.25)
    assert one(row).tolist() == [1, 2, 3 - 0.5 - 0.75, 4, 5, 6, 7, 8]
