"""The distribution after filters is the one that the sampler draws from, token by token."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pagedjax.execution.probabilities import probabilities
from tests.execution import naive_sampler
from tests.execution.naive_sampler import Row, draw, pack

pytestmark = pytest.mark.usefixtures("compiled_quickly")

VOCAB_SIZE, NUM_ROWS = 150, 32  # more than the candidates
GENERATOR = np.random.default_rng(0)
run = partial(jax.jit)(probabilities)

STEEP = [
    Row(),
    Row(temperature=0.3),
    Row(top_k=7),
    Row(top_k=100),
    Row(top_p=0.8),
    Row(top_p=0.999),
    Row(top_p=1e-6),
    Row(min_p=0.05),
    Row(temperature=1.3, top_k=20, top_p=0.9, min_p=0.01),
    Row(repetition_penalty=1.5, output=[3, 3, 7], prompt=[0, 1]),
    Row(presence_penalty=0.7, frequency_penalty=0.4, output=[5, 5, 9], top_p=0.95),
    Row(bias={2: -3.0, 5: 4.0}, allowed=[*range(0, VOCAB_SIZE, 2), 5]),
]
FLAT = [Row(top_p=0.9), Row(top_p=0.6), Row(top_k=100, top_p=0.7), Row(min_p=0.3), Row(top_k=64), Row(top_k=65)]


def shares(logits: np.ndarray, rows: list[Row]) -> np.ndarray:
    rows = (rows * NUM_ROWS)[:NUM_ROWS]
    positions = jnp.array([row.position for row in rows], jnp.int32)
    result, is_valid = run(jnp.asarray(np.resize(logits, (NUM_ROWS, VOCAB_SIZE))), positions, pack(rows, VOCAB_SIZE))
    assert is_valid.all()
    return np.asarray(result)


@pytest.mark.parametrize(("scale", "rows"), [(3.0, STEEP), (0.4, FLAT)], ids=["steep", "flat"])
def test_probabilities_are_the_exact_ones(scale, rows):
    logits = (GENERATOR.normal(size=VOCAB_SIZE) * scale).astype(np.float32)
    for row, result in zip(rows, shares(logits, rows), strict=False):
        expected = naive_sampler.probabilities(logits, row)
        assert (expected[result > 0] > 0).all(), row
        assert (result[expected > 1e-7] > 0).all(), row
        np.testing.assert_allclose(result, expected, atol=3e-7, err_msg=str(row))


def test_ties_at_the_edge_of_a_nucleus_are_broken_by_token_id():
    logits = np.zeros(VOCAB_SIZE, np.float32)
    result = shares(logits, [Row(top_p=0.5), Row(top_p=0.5 + 1e-3), Row(top_p=1e-9), Row(top_k=70)])
    for row, num_kept in zip(result, (75, 76, 1, 70), strict=False):
        np.testing.assert_array_equal(np.flatnonzero(row), np.arange(num_kept))
        np.testing.assert_allclose(row[:num_kept], 1 / num_kept, rtol=1e-6)


def test_a_greedy_row_has_one_token_and_it_is_the_sampled_one():
    logits = GENERATOR.normal(size=VOCAB_SIZE).astype(np.float32)
    row = Row(temperature=0.0, top_p=0.9, top_k=50)
    np.testing.assert_array_equal(shares(logits, [row])[0], np.eye(VOCAB_SIZE)[draw(logits[None], [row])[0]])


def test_what_the_sampler_draws_always_has_a_probability():
    logits = (GENERATOR.normal(size=VOCAB_SIZE) * 0.5).astype(np.float32)
    for row in (Row(top_p=0.3), Row(top_p=0.9), Row(top_k=90, min_p=0.2)):
        rows = [Row(**(vars(row) | {"position": position})) for position in range(NUM_ROWS)]
        drawn = draw(np.resize(logits, (NUM_ROWS, VOCAB_SIZE)), rows)
        assert (shares(logits, [row])[0][drawn] > 0).all()


def test_rows_that_allow_no_token_are_invalid_and_empty():
    logits = np.full((NUM_ROWS, VOCAB_SIZE), -np.inf, np.float32)
    logits[1, 3], logits[2, 4] = np.nan, np.inf
    logits[3, 5] = 1.0
    rows = pack([Row(top_p=0.9)] * NUM_ROWS, VOCAB_SIZE)
    result, is_valid = run(jnp.asarray(logits), jnp.zeros(NUM_ROWS, jnp.int32), rows)
    assert np.flatnonzero(is_valid).tolist() == [3]
    assert np.flatnonzero(result.sum(axis=1)).tolist() == [3]
    assert result[3, 5] == 1
