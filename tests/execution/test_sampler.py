"""The sampler as a whole: agreement with a naive one, between variants and between batches, and bad logits."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedjax.execution.sampler import Variant
from tests.execution.naive_sampler import NUM_ROWS, Row, draw, expected_tokens, sample_rows

VOCAB_SIZE = 300  # more than the candidates, and no multiple of a tile
GENERATOR = np.random.default_rng(0)
LOGITS = (GENERATOR.normal(size=(NUM_ROWS, VOCAB_SIZE)) * 3).astype(np.float32)
TEMPERATURES = (0.0, 0.3, 1.0, 1.7)
TOP_KS = (0, 1, 5, 64, 65, 100, 200, 10**6)
TOP_PS = (1.0, 0.95, 0.5, 0.05)
MIN_PS = (0.0, 0.02, 0.4)


def mixed_rows(seed: int, vocab_size: int = VOCAB_SIZE) -> list[Row]:
    """Rows with every kind of parameter."""
    generator = np.random.default_rng(seed)

    def tokens(num: int) -> list[int]:
        return generator.integers(0, vocab_size, num).tolist()

    def one(index: int) -> Row:
        output = tokens(20)
        return Row(
            temperature=float(generator.choice(TEMPERATURES)),
            top_k=int(generator.choice(TOP_KS)),
            top_p=float(generator.choice(TOP_PS)),
            min_p=float(generator.choice(MIN_PS)),
            seed=int(generator.integers(-(2**63), 2**63)),
            position=int(generator.integers(0, 10_000)),
            repetition_penalty=float(generator.choice([1.0, 1.3, 0.8])),
            presence_penalty=float(generator.choice([0.0, 0.5, -1.0])),
            frequency_penalty=float(generator.choice([0.0, 0.2])),
            prompt=tokens(30),
            output=output,
            allowed=sorted(set(tokens(200))) if index % 3 == 0 else None,
            bias={token: float(generator.normal() * 5) for token in tokens(index % 4)},
            stop_ids=tokens(index % 3),
            min_position=5000,
            bad_words=[[output[-1], *tokens(1)], tokens(2)][: index % 3],
        )

    return [one(index) for index in range(NUM_ROWS)]


@pytest.mark.parametrize("scale", [0.03, 1.0, 4.0])
@pytest.mark.parametrize("seed", range(4))
def test_mixed_rows_draw_what_a_naive_sampler_draws(seed: int, scale: float) -> None:
    rows, logits = mixed_rows(seed), LOGITS * np.float32(scale)
    for row, row_logits, token in zip(rows, logits, draw(logits, rows), strict=True):
        assert token in expected_tokens(row_logits, row), row


def test_every_combination_of_filters_draws_what_a_naive_sampler_draws() -> None:
    grid = [(t, k, p, m) for t in TEMPERATURES for k in TOP_KS for p in TOP_PS for m in MIN_PS]
    for start in range(0, len(grid), NUM_ROWS):
        chosen = grid[start : start + NUM_ROWS]
        rows = [Row(*values, seed=start, position=i) for i, values in enumerate(chosen)]
        for row, row_logits, token in zip(rows, LOGITS, draw(LOGITS[: len(rows)], rows), strict=False):
            assert token in expected_tokens(row_logits, row), row


row_strategy = st.builds(
    Row,
    temperature=st.sampled_from([0.0, 1e-3]) | st.integers(1, 64).map(lambda n: n / 32),
    top_k=st.integers(-1, VOCAB_SIZE + 10),
    top_p=st.integers(1, 1024).map(lambda n: n / 1024),
    min_p=st.integers(0, 64).map(lambda n: n / 64),
    seed=st.integers(-(2**63), 2**63 - 1),
    position=st.integers(0, 2**31 - 1),
    repetition_penalty=st.sampled_from([0.5, 1.0, 1.25, 2.0]),
    bias=st.dictionaries(st.integers(0, VOCAB_SIZE - 1), st.integers(-100, 100).map(float), max_size=4),
    prompt=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=5),
)
# quarters, so that penalties and temperatures move values but ties are common
logit_strategy = st.lists(st.integers(-40, 40).map(lambda n: n / 4) | st.just(-np.inf), min_size=1, max_size=9)


@settings(max_examples=100, deadline=None)
@given(st.lists(row_strategy, min_size=1, max_size=NUM_ROWS), logit_strategy)
def test_any_parameters_with_many_equal_logits_draw_what_a_naive_sampler_draws(
    rows: list[Row], pattern: list[float]
) -> None:
    logits = np.resize(np.array([1.0, *pattern], np.float32), (NUM_ROWS, VOCAB_SIZE))
    for row, row_logits, token in zip(rows, logits, draw(logits, rows), strict=False):
        assert token in expected_tokens(row_logits, row), row


def test_a_row_draws_the_same_alone_in_a_batch_and_in_a_padded_vocabulary() -> None:
    """Bitwise: padding tokens have logit -inf, as those that a sharded vocabulary ends in."""
    rows, logits = mixed_rows(1), LOGITS * np.float32(0.7)
    batch = draw(logits, rows)
    padded = np.pad(logits, ((0, 0), (0, 84)), constant_values=-np.inf)
    np.testing.assert_array_equal(draw(padded, rows), batch)
    alone = [draw(logits[i : i + 1], rows[i : i + 1], fill=False)[0] for i in range(NUM_ROWS)]
    np.testing.assert_array_equal(alone, batch)
    order = np.random.default_rng(2).permutation(NUM_ROWS)
    np.testing.assert_array_equal(draw(logits[order], [rows[i] for i in order]), batch[order])


@pytest.mark.parametrize(
    ("variant", "rows"),
    [
        ("plain", [Row(temperature=0.0, top_p=0.5)] * NUM_ROWS),
        ("plain", [Row(temperature=t, seed=i) for i, t in enumerate(np.linspace(0, 2, NUM_ROWS))]),
        ("top_k", [Row(temperature=i % 4 / 2, top_k=1 + 2 * i, top_p=0.9, seed=i) for i in range(NUM_ROWS)]),
        ("top_k", [replace(row, top_k=min(max(row.top_k, 3), 64)) for row in mixed_rows(5)]),
    ],
)
@pytest.mark.parametrize("scale", [0.1, 1.0])
def test_variants_agree_where_they_cover_the_same_rows(variant: Variant, rows: list[Row], scale: float) -> None:
    logits = LOGITS * np.float32(scale)
    logits[0] = np.round(logits[0])  # ties
    np.testing.assert_array_equal(draw(logits, rows, variant=variant), draw(logits, rows, variant="full"))


def test_a_row_without_edits_draws_the_same_with_and_without_their_arrays() -> None:
    rows = [Row(temperature=1.0, top_k=10 * i, top_p=0.9, seed=i) for i in range(NUM_ROWS)]
    np.testing.assert_array_equal(draw(LOGITS, rows, edits=False), draw(LOGITS, rows))


def test_x64_changes_nothing() -> None:
    rows = mixed_rows(3)
    expected = draw(LOGITS, rows)
    with jax.enable_x64(not jax.config.jax_enable_x64):
        np.testing.assert_array_equal(draw(LOGITS, rows), expected)


@pytest.mark.parametrize(
    "row", [Row(top_k=1), Row(top_p=1e-6), Row(temperature=1e-4, top_p=0.5), Row(min_p=1.0), Row(temperature=0.0)]
)
def test_extreme_filters_are_greedy(row: Row) -> None:
    rows = [replace(row, seed=i) for i in range(NUM_ROWS)]
    np.testing.assert_array_equal(draw(LOGITS, rows), LOGITS.argmax(axis=1))


def test_greedy_top_k_1_and_tiny_top_p_take_the_smaller_id_of_equal_logits() -> None:
    logits = np.full((3, VOCAB_SIZE), 2.5, np.float32)
    logits[:, :7] = -1.0
    assert draw(logits, [Row(temperature=0.0), Row(top_k=1), Row(top_p=1e-6)]).tolist() == [7, 7, 7]


@pytest.mark.parametrize("num_equal", [32, 128])  # within the candidates and beyond
def test_top_p_keeps_exactly_its_share_of_equal_logits(num_equal: int) -> None:
    logits = np.full((NUM_ROWS, VOCAB_SIZE), -np.inf, np.float32)
    logits[:, :num_equal] = 1.5
    drawn = [draw(logits, [Row(top_p=0.75, seed=i, position=p) for i in range(NUM_ROWS)]) for p in range(20)]
    assert set(np.concatenate(drawn)) == set(range(num_equal * 3 // 4))


def test_the_smallest_temperature_is_a_hundredth() -> None:
    logits = np.full((NUM_ROWS, VOCAB_SIZE), -100.0, np.float32)
    logits[:, :2] = [0.0, 0.01]
    drawn = [draw(logits, [Row(temperature=t, seed=i) for i in range(NUM_ROWS)]) for t in (1e-6, 0.01)]
    np.testing.assert_array_equal(drawn[0], drawn[1])
    assert set(drawn[0]) == {0, 1}


def test_the_only_token_left_is_drawn_and_banned_ones_never_are() -> None:
    rows = [Row(allowed=[i]) for i in range(NUM_ROWS)]
    assert draw(LOGITS, rows).tolist() == list(range(NUM_ROWS))
    logits = np.full((NUM_ROWS, VOCAB_SIZE), -np.inf, np.float32)
    logits[:, 5:8] = -1e30
    assert set(draw(logits, [Row(seed=i) for i in range(NUM_ROWS)])) <= {5, 6, 7}


@pytest.mark.parametrize(("variant", "temperature"), [("plain", 0.0), ("plain", 1.0), ("top_k", 1.0), ("full", 1.0)])
@pytest.mark.parametrize("place", [0, 130, VOCAB_SIZE - 1])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_logits_that_are_not_finite_make_their_row_invalid(
    variant: Variant, temperature: float, place: int, value: float
) -> None:
    logits = LOGITS.copy()
    logits[1, place] = value
    logits[2] = -np.inf
    logits[3, 1:] = -np.inf
    rows = [Row(temperature=temperature, top_k=3 if variant == "top_k" else 0)] * NUM_ROWS
    token_ids, is_valid = sample_rows(logits, rows, variant=variant)
    assert is_valid.tolist() == [True, False, False] + [True] * (NUM_ROWS - 3)
    assert token_ids[1:4].tolist() == [0, 0, 0]
    clean, _ = sample_rows(LOGITS, rows, variant=variant)
    np.testing.assert_array_equal(np.delete(token_ids, [1, 2, 3]), np.delete(clean, [1, 2, 3]))


def test_nan_is_seen_in_a_large_vocabulary() -> None:
    """A CPU's fast maximum drops NaN there."""
    logits = np.zeros((1, 50_000), np.float32)
    logits[0, 49_000] = np.nan
    assert sample_rows(logits, [Row(temperature=0.0)], variant="plain", edits=False, fill=False)[1].tolist() == [False]
    assert sample_rows(logits, [Row()], variant="plain", edits=False, fill=False)[1].tolist() == [False]


def test_a_row_whose_every_token_is_banned_is_invalid() -> None:
    rows = [Row(allowed=[4, 5], stop_ids=[4, 5], min_position=100), Row(), Row(temperature=0.0)]
    token_ids, is_valid = sample_rows(LOGITS[:3], rows)
    assert is_valid.tolist() == [False, True, True]
    assert token_ids[0] == 0
