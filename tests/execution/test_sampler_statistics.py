"""Tens of thousands of draws against the exact probabilities, by a chi-square test that can fail."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import chi2

from pagedjax.execution.sampler import sample
from tests.execution.naive_sampler import Row, pack, probabilities

NUM_DRAWS, BATCH = 24_576, 4096
VOCAB_SIZE = 150  # more than the candidates, so that wide nuclei are drawn by rejection
GENERATOR = np.random.default_rng(0)
STEEP = (GENERATOR.normal(size=VOCAB_SIZE) * 3).astype(np.float32)
FLAT = (GENERATOR.normal(size=VOCAB_SIZE) * 0.5).astype(np.float32)
run = partial(jax.jit, static_argnames="variant")(sample)
OUTPUT = [int(token) for token in np.argsort(-STEEP)[:3]] * 2


def draws(logits: np.ndarray, row: Row) -> np.ndarray:
    """Tokens at many positions of one request."""
    rows = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (BATCH, *leaf.shape[1:])), pack([row], len(logits)))
    batch = jnp.broadcast_to(logits, (BATCH, len(logits)))
    starts = range(0, NUM_DRAWS, BATCH)
    results = [run(batch, jnp.arange(start, start + BATCH, dtype=jnp.int32), rows, variant="full") for start in starts]
    assert all(is_valid.all() for _, is_valid in results)
    return np.concatenate([token_ids for token_ids, _ in results])


def p_value(tokens: np.ndarray, expected: np.ndarray) -> float:
    """Probability of a chi-square this large; tokens expected fewer than 8 times share a cell."""
    observed, expected = np.bincount(tokens, minlength=len(expected)), expected * len(tokens)
    assert observed[expected == 0].sum() == 0, "a token was drawn that has probability 0"
    is_rare = (expected < 8) & (expected > 0)
    observed = np.append(observed[expected >= 8], observed[is_rare].sum())
    expected = np.append(expected[expected >= 8], expected[is_rare].sum())
    observed, expected = observed[expected > 0], expected[expected > 0]
    return float(chi2.sf(((observed - expected) ** 2 / expected).sum(), max(len(expected) - 1, 1)))


@pytest.mark.parametrize(
    ("logits", "row"),
    [
        (STEEP, Row()),
        (STEEP, Row(temperature=0.5)),
        (STEEP, Row(temperature=1.8)),
        (STEEP, Row(top_k=7)),
        (STEEP, Row(top_p=0.8)),
        (STEEP, Row(min_p=0.05)),
        (STEEP, Row(temperature=1.3, top_k=20, top_p=0.9, min_p=0.01)),
        (STEEP, Row(repetition_penalty=1.5, output=OUTPUT, prompt=[0, 1, 2])),
        (STEEP, Row(presence_penalty=0.7, frequency_penalty=0.4, output=OUTPUT, top_p=0.95)),
        (STEEP, Row(bias={OUTPUT[0]: -3.0, 5: 4.0}, allowed=[*range(0, VOCAB_SIZE, 2), OUTPUT[0]])),
        (FLAT, Row(top_p=0.9)),
        (FLAT, Row(top_p=0.15)),
        (FLAT, Row(top_k=100, top_p=0.7)),
        (FLAT, Row(min_p=0.3)),
    ],
)
def test_draws_follow_the_exact_probabilities(logits: np.ndarray, row: Row) -> None:
    assert p_value(draws(logits, row), probabilities(logits, row)) > 1e-3


@pytest.mark.parametrize("wrong", [Row(temperature=1.15), Row(min_p=0.005), Row(bias={OUTPUT[0]: 0.25})])
def test_the_chi_square_test_notices_a_biased_sampler(wrong: Row) -> None:
    assert p_value(draws(STEEP, wrong), probabilities(STEEP, Row())) < 1e-6


def test_different_seeds_draw_independently() -> None:
    first, second = (draws(FLAT, Row(seed=seed)) for seed in (1, 2))
    share = (first == second).mean()
    expected = (probabilities(FLAT, Row()) ** 2).sum()
    assert abs(share - expected) < 4 * np.sqrt(expected / NUM_DRAWS)
