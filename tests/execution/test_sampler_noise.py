"""The noise is Gumbel noise, and depends on seed, position and token id alone."""

import hashlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pagedjax.execution.gumbel import gumbel_noise, seed_words, threefry_2x32
from pagedjax.execution.portable_math import exponential_variate, fixed_point_exp, log

VOCAB_SIZE = 5000

noise = jax.jit(gumbel_noise)


def whole_vocabulary(seeds: np.ndarray, positions: np.ndarray, vocab_size: int = VOCAB_SIZE) -> np.ndarray:
    ids = np.broadcast_to(np.arange(vocab_size, dtype=np.int32), (len(seeds), vocab_size))
    return np.asarray(noise(jnp.asarray(seeds, jnp.uint32), jnp.asarray(positions, jnp.int32), jnp.asarray(ids)))


@pytest.mark.parametrize("num_ids", [1, 3, 5, 7, 15, 64, 101])
def test_noise_of_a_few_tokens_is_that_of_the_whole_vocabulary_to_the_bit(num_ids: int) -> None:
    seeds, positions = np.array([[1, 2], [3, 4], [2**32 - 1, 0]]), np.array([0, 17, 2**31 - 1])
    full = whole_vocabulary(seeds, positions)
    ids = np.random.default_rng(num_ids).integers(0, VOCAB_SIZE, (3, num_ids)).astype(np.int32)
    some = noise(jnp.asarray(seeds, jnp.uint32), jnp.asarray(positions, jnp.int32), jnp.asarray(ids))
    np.testing.assert_array_equal(some, np.take_along_axis(full, ids, axis=1))


def test_noise_of_a_row_alone_is_that_in_a_batch_to_the_bit() -> None:
    seeds, positions = np.arange(66).reshape(33, 2), np.arange(33) * 100
    batch = whole_vocabulary(seeds, positions)
    for row in (0, 13, 32):
        alone = whole_vocabulary(seeds[row : row + 1], positions[row : row + 1])
        np.testing.assert_array_equal(alone[0], batch[row])


def test_noise_does_not_depend_on_jit_or_x64() -> None:
    seeds, positions = np.arange(4).reshape(2, 2), np.array([5, 6])
    jitted = whole_vocabulary(seeds, positions)
    ids = jnp.broadcast_to(jnp.arange(VOCAB_SIZE, dtype=jnp.int32), (2, VOCAB_SIZE))
    arguments = (jnp.asarray(seeds, jnp.uint32), jnp.asarray(positions, jnp.int32), ids)
    np.testing.assert_array_equal(gumbel_noise(*arguments), jitted)
    with jax.enable_x64(not jax.config.jax_enable_x64):
        np.testing.assert_array_equal(jax.jit(gumbel_noise)(*arguments), jitted)


def test_noise_is_the_same_on_every_device_and_for_ever() -> None:
    """Seeded outputs may not change with a release or a device; an H200 and two CPUs gave this hash."""
    values = whole_vocabulary(np.arange(16).reshape(8, 2), np.arange(8), 100_000)
    assert hashlib.sha256(values.tobytes()).hexdigest()[:16] == "55d026d6dd7348b0"


@pytest.mark.parametrize(
    ("key", "counter", "expected"),
    [
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((2**32 - 1, 2**32 - 1), (2**32 - 1, 2**32 - 1), (0x1CB996FC, 0xBB002BE7)),
        ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
    ],
)
def test_threefry_gives_the_published_answers(key: tuple, counter: tuple, expected: tuple) -> None:
    words = [jnp.array([word], jnp.uint32) for word in (*key, *counter)]
    assert tuple(int(word[0]) for word in threefry_2x32(*words)) == expected


def test_noise_follows_the_gumbel_distribution() -> None:
    values = np.sort(whole_vocabulary(np.array([[11, 22]]), np.array([3]), 200_000)[0].astype(np.float64))
    distance = np.abs(np.exp(-np.exp(-values)) - (np.arange(len(values)) + 0.5) / len(values)).max()
    assert distance < 1.95 / np.sqrt(len(values))  # Kolmogorov-Smirnov at 0.1 %
    assert np.isfinite(values).all()


def test_noise_of_neighbouring_seeds_positions_and_tokens_is_uncorrelated() -> None:
    seeds = np.array([[5, 0], [6, 0], [5, 1], [5, 0]])
    values = whole_vocabulary(seeds, np.array([10, 10, 10, 11]), 50_000).astype(np.float64)
    for other in (values[1, 1:], values[2, 1:], values[3, 1:], values[0, 1:]):
        assert abs(float(np.corrcoef(values[0, :-1], other)[0, 1])) < 4 / np.sqrt(50_000)
    for row in (1, 2, 3):
        assert abs(float(np.corrcoef(values[0], values[row])[0, 1])) < 4 / np.sqrt(50_000)


def test_seed_words_take_any_integer_and_use_64_bits() -> None:
    assert seed_words(0) == (0, 0)
    assert seed_words(-1) == (2**32 - 1, 2**32 - 1) == seed_words(2**64 - 1)
    assert seed_words(-(2**63)) == (0, 2**31)
    assert seed_words((7 << 32) + 9) == (9, 7)


def test_exponential_variates_are_accurate_and_never_zero_or_infinite() -> None:
    extremes = np.array([0, 1, 2, 3, 2**31 - 2, 2**31 - 1, 2**31, 2**31 + 1, 2**32 - 3, 2**32 - 1], np.uint32)
    bits = np.concatenate([extremes, np.random.default_rng(0).integers(0, 2**32, 100_000, dtype=np.uint32)])
    values = np.asarray(exponential_variate(jnp.asarray(bits))).astype(np.float64)
    exact = -np.log(((bits >> 1) + 0.5) / 2**31)
    np.testing.assert_allclose(values, exact, rtol=1e-6)
    assert values.min() > 0


def test_portable_log_is_accurate() -> None:
    x = np.exp(np.random.default_rng(0).uniform(-22, 4, 100_000)).astype(np.float32)
    np.testing.assert_allclose(log(jnp.asarray(x)), np.log(x.astype(np.float64)), rtol=2e-7, atol=4e-7)
    assert log(jnp.ones(1, jnp.float32))[0] == 0


def test_fixed_point_exponential_is_rounded_and_bounded() -> None:
    x = -np.random.default_rng(0).uniform(0, 30, 100_000).astype(np.float32)
    values = np.asarray(fixed_point_exp(jnp.asarray(x), 26)).astype(np.float64)
    np.testing.assert_allclose(values, np.exp(x.astype(np.float64)) * 2**26, rtol=1.5e-6, atol=0.51)
    special = fixed_point_exp(jnp.array([0.0, -1e-9, -1e30, -np.inf, np.nan], jnp.float32), 26)
    assert special.tolist() == [2**26, 2**26, 0, 0, 0]
