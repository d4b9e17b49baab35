"""Log probabilities, ranks and the most likely tokens against numpy."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pagedjax.execution.logprobs import top_logprobs

pytestmark = pytest.mark.usefixtures("compiled_quickly")

run = partial(jax.jit, static_argnames="num")(top_logprobs)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    logits = logits.astype(np.float64)
    shifted = logits - logits.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


@pytest.mark.parametrize("num", [0, 1, 20, 64])
@pytest.mark.parametrize(("num_rows", "vocab_size"), [(1, 70), (5, 300), (4, 20_001)])
@pytest.mark.parametrize("step", [1e-4, 2.0])
def test_logprobs_ranks_and_lists_equal_naive_ones(num: int, num_rows: int, vocab_size: int, step: float) -> None:
    generator = np.random.default_rng(vocab_size)
    logits = (np.round(generator.normal(size=(num_rows, vocab_size)) * 4 / step) * step).astype(np.float32)
    token_ids = generator.integers(0, vocab_size, num_rows).astype(np.int32)
    logprob, rank, top_ids, top = run(logits, token_ids, num=num)
    expected, index = log_softmax(logits), np.arange(num_rows)
    given = logits[index, token_ids][:, None]
    order = np.argsort(-logits, axis=1, kind="stable")[:, :num]
    np.testing.assert_allclose(logprob, expected[index, token_ids], atol=1e-5)
    np.testing.assert_array_equal(rank, 1 + (logits > given).sum(axis=1))
    np.testing.assert_array_equal(top_ids, order)
    np.testing.assert_allclose(top, np.take_along_axis(expected, order, axis=1), atol=1e-5)


def test_the_sampled_token_has_the_same_logprob_in_the_list() -> None:
    logits = np.random.default_rng(0).normal(size=(3, 500)).astype(np.float32)
    logprob, rank, top_ids, top = run(logits, logits.argmax(axis=1).astype(np.int32), num=5)
    np.testing.assert_array_equal(top[:, 0], logprob)
    np.testing.assert_array_equal(top_ids[:, 0], logits.argmax(axis=1))
    assert rank.tolist() == [1, 1, 1]


def test_large_logits_and_impossible_tokens_keep_the_rest_finite() -> None:
    logits = np.array([[1e4, 1e4 - 1, -np.inf, -1e4]], np.float32)
    logprob, rank, top_ids, top = run(logits, np.array([2], np.int32), num=4)
    assert logprob.tolist() == [-np.inf]
    assert rank.tolist() == [4]
    assert top_ids.tolist() == [[0, 1, 3, 2]]
    np.testing.assert_allclose(top[0, :2], np.log([1 / (1 + np.exp(-1)), 1 / (1 + np.e)]), rtol=1e-5)


def test_a_list_longer_than_the_vocabulary_ends_in_impossible_ids() -> None:
    _, _, top_ids, top = run(np.zeros((1, 3), np.float32), np.array([0], np.int32), num=5)
    assert top_ids[0, :3].tolist() == [0, 1, 2]
    assert (np.asarray(top_ids)[0, 3:] >= 3).all()
    assert np.asarray(top)[0, 3:].tolist() == [-np.inf] * 2


def test_bfloat16_logits_are_widened_first() -> None:
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(2, 300)) * 5, jnp.bfloat16)
    token_ids = jnp.array([3, 200], jnp.int32)
    for narrow, wide in zip(
        run(logits, token_ids, num=3), run(logits.astype(jnp.float32), token_ids, num=3), strict=True
    ):
        np.testing.assert_array_equal(narrow, wide)
