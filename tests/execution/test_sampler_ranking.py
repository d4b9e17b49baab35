"""First tokens and cuts against a stable sort."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pagedjax.execution.cut import cut_after, is_kept
from pagedjax.execution.ranking import first_token, first_tokens

pytestmark = pytest.mark.usefixtures("compiled_quickly")

first = jax.jit(first_token)
firsts = partial(jax.jit, static_argnums=1)(first_tokens)


def random_logits(vocab_size: int, step: float) -> np.ndarray:
    """Logits in multiples of `step`, so that large steps make ties; a tenth is -inf."""
    generator = np.random.default_rng(vocab_size)
    logits = np.round(generator.normal(size=(3, vocab_size)) * 4 / step) * step
    logits[generator.random(logits.shape) < 0.1] = -np.inf
    return logits.astype(np.float32) + np.float32(0.0)  # no -0.0


@pytest.mark.parametrize("step", [1e-4, 1.0, 8.0])
@pytest.mark.parametrize("vocab_size", [1, 2, 127, 128, 129, 1000, 9000, 20001])
def test_first_tokens_are_those_of_a_stable_sort(vocab_size: int, step: float) -> None:
    logits = random_logits(vocab_size, step)
    order = np.argsort(-logits, axis=1, kind="stable")
    token, value = first(logits)
    np.testing.assert_array_equal(token, order[:, 0])
    np.testing.assert_array_equal(value, logits.max(axis=1))
    for num in (1, 20, 64):
        token_ids, values = firsts(logits, num)
        num_real = min(num, vocab_size)
        np.testing.assert_array_equal(token_ids[:, :num_real], order[:, :num_real])
        np.testing.assert_array_equal(values[:, :num_real], np.take_along_axis(logits, order, 1)[:, :num_real])
        assert (token_ids[:, num_real:] >= vocab_size).all()
        assert (values[:, num_real:] == -np.inf).all()


def test_both_zeros_are_equal_and_the_smaller_id_comes_first() -> None:
    logits = np.array([[-1.0, -0.0, 0.0, -0.0]], np.float32)
    assert firsts(logits, 3)[0].tolist() == [[1, 2, 3]]
    assert first(logits)[0].tolist() == [1]


def test_the_first_token_is_in_range_without_any_usable_logit() -> None:
    for value in (-np.inf, np.inf, np.nan):
        assert 0 <= first(np.full((1, 130), value, np.float32))[0][0] < 130


@pytest.mark.parametrize("step", [1e-4, 8.0])
@pytest.mark.parametrize("vocab_size", [5, 128, 3000])
def test_a_cut_keeps_exactly_the_first_tokens(vocab_size: int, step: float) -> None:
    logits = np.concatenate([random_logits(vocab_size, step), -np.abs(random_logits(vocab_size, step))])
    num = np.array([1, 2, vocab_size // 2, vocab_size - 1, vocab_size, 3], np.int32)
    cut = jax.jit(cut_after)(logits, num)
    ids = jnp.broadcast_to(jnp.arange(vocab_size, dtype=jnp.int32), logits.shape)
    rank = np.argsort(np.argsort(-logits, axis=1, kind="stable"), axis=1)
    np.testing.assert_array_equal(is_kept(jnp.asarray(logits), ids, cut), rank < num[:, None])
