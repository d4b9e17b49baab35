"""Rotary frequencies against transformers' (tests/oracles/make_rope.py), and the rotation itself."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from pagedjax.errors import ConfigError
from pagedjax.models.config import RopeConfig
from pagedjax.models.rope import inverse_frequencies, rope_cos_sin
from pallas_kernels.rope_and_cache.reference import rotate

GOLDEN = json.loads((Path(__file__).parents[1] / "oracles" / "golden" / "rope.json").read_text())


def rope_config(theta: float, scaling: dict) -> RopeConfig:
    return RopeConfig(theta=theta, scaling=tuple(sorted(scaling.items())))


@pytest.mark.parametrize("name", GOLDEN)
def test_inverse_frequencies_equal_transformers_to_the_last_bit_or_two(name):
    case = GOLDEN[name]
    frequencies, factor = inverse_frequencies(
        rope_config(case["rope_theta"], case.get("rope_scaling", {})), case["head_dim"]
    )
    expected = np.array(case["inverse_frequencies"], np.float32)
    np.testing.assert_array_max_ulp(frequencies, expected, maxulp=2)  # torch's float32 power is off by one now and then
    assert factor == case["factor"]


def test_rotation_is_complex_multiplication_of_the_two_halves():
    x = np.random.RandomState(0).standard_normal((5, 3, 8)).astype(np.float32)
    positions = jnp.asarray([0, 1, 7, 100, 5000], jnp.int32)
    rotated = rotate(jnp.asarray(x), *rope_cos_sin(positions, RopeConfig(theta=100.0), 8))
    frequencies = 100.0 ** (-np.arange(0, 8, 2) / 8)
    turns = np.exp(1j * np.array([0, 1, 7, 100, 5000])[:, None, None] * frequencies)
    expected = (x[..., :4] + 1j * x[..., 4:]) * turns
    # an angle of 5000 radians has a float32 spacing of 5e-4
    np.testing.assert_allclose(rotated, np.concatenate([expected.real, expected.imag], -1), atol=2e-3)


def test_an_unsupported_scaling_type_is_refused_with_the_supported_ones():
    with pytest.raises(ConfigError, match="'dynamic' is not supported; supported are default, linear, llama3, yarn"):
        inverse_frequencies(rope_config(1e4, {"rope_type": "dynamic", "factor": 2.0}), 64)


def test_a_scaling_without_its_factor_is_refused_by_name():
    with pytest.raises(ConfigError, match="'linear' needs 'factor'"):
        inverse_frequencies(rope_config(1e4, {"rope_type": "linear"}), 64)
