"""Rotary position embedding: inverse frequencies as transformers computes them, and their angles.

Frequencies are numpy float32 constants of the traced step, one set a kind of layer. Angles are float32.
Scaling types whose frequencies depend on the longest running request ("dynamic", "longrope") are
refused: cached keys would not fit later ones.
"""

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pagedjax.errors import ConfigError
from pagedjax.models.config import RopeConfig

Scaling = dict[str, Any]
Frequencies = Float[np.ndarray, " half"]


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[Frequencies, float]:
    """Return the inverse frequencies, one a rotated pair of axes, and the factor on cos and sin.

    Raises:
        ConfigError: the scaling type is not one of `SCALING_TYPES`, or lacks a key, or head_dim is odd.
    """
    if head_dim % 2:
        raise ConfigError(f"head_dim is {head_dim}; rotary embedding needs an even one")
    scaling = dict(rope.scaling)
    rope_type = scaling.get("rope_type", scaling.get("type", "default"))
    if rope_type not in SCALING_TYPES:
        raise ConfigError(f"rope scaling type {rope_type!r} is not supported; supported are {', '.join(SCALING_TYPES)}")
    try:
        return SCALING_TYPES[rope_type](rope.theta, head_dim, scaling)
    except KeyError as missing:
        raise ConfigError(
            f"rope scaling type {rope_type!r} needs {missing} in rope_scaling, which has {sorted(scaling)}"
        ) from None


def longest_context(num_positions: int, rope: RopeConfig, *, is_gemma: bool) -> int:
    """Return how many positions scaling makes usable of a checkpoint's figure; Llama 3's and Gemma's includes it."""
    scaling = dict(rope.scaling)
    if scaling.get("rope_type") == "yarn":
        return int(scaling["original_max_position_embeddings"] * scaling.get("factor", 1))
    if scaling.get("rope_type") == "linear" and not is_gemma:
        return int(num_positions * scaling.get("factor", 1))
    return num_positions


def rope_cos_sin(
    positions: Int[Array, " T"], rope: RopeConfig, head_dim: int
) -> tuple[Float[Array, "T half"], Float[Array, "T half"]]:
    """Return float32 cos and sin of every position's angles, scaled."""
    frequencies, factor = inverse_frequencies(rope, head_dim)
    angles = positions.astype(jnp.float32)[:, None] * jnp.asarray(frequencies)[None, :]  # [T, H / 2]
    scale = jnp.float32(factor)
    return jnp.cos(angles) * scale, jnp.sin(angles) * scale


def _default(theta: float, dim: int, scaling: Scaling) -> tuple[Frequencies, float]:
    return np.float32(1.0) / _powers(theta, dim), 1.0


def _linear(theta: float, dim: int, scaling: Scaling) -> tuple[Frequencies, float]:
    return np.float32(1.0) / _powers(theta, dim) / np.float32(scaling["factor"]), 1.0


def _llama3(theta: float, dim: int, scaling: Scaling) -> tuple[Frequencies, float]:
    """Llama 3.1: long wavelengths are divided by `factor`, short ones kept, those between blended."""
    inverse = np.float32(1.0) / _powers(theta, dim)
    factor, low, high = (np.float32(scaling[key]) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    original = np.float32(scaling["original_max_position_embeddings"])
    wavelength = np.float32(2 * math.pi) / inverse
    blend = (original / wavelength - low) / (high - low)
    blended = (1 - blend) * inverse / factor + blend * inverse
    scaled = np.where(wavelength > original / low, inverse / factor, blended)
    return np.where(wavelength < original / high, inverse, scaled).astype(np.float32), 1.0


def _yarn(theta: float, dim: int, scaling: Scaling) -> tuple[Frequencies, float]:
    """YaRN (arXiv 2309.00071): interpolate slow dimensions, keep fast ones, ramp between."""
    factor, original = scaling["factor"], scaling["original_max_position_embeddings"]
    low = _yarn_dimension(scaling.get("beta_fast") or 32, theta, dim, original)
    high = _yarn_dimension(scaling.get("beta_slow") or 1, theta, dim, original)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low if high != low else 0.001  # no division by zero
    ramp = np.clip((np.arange(dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(width), 0, 1)
    keep = 1 - ramp
    powers = _powers(theta, dim)
    inverse = (1 / (np.float32(factor) * powers)) * (1 - keep) + (1 / powers) * keep
    return inverse.astype(np.float32), _yarn_attention_factor(factor, scaling)


def _yarn_dimension(rotations: float, theta: float, dim: int, original: int) -> float:
    """Return the dimension whose angle turns `rotations` times over the original length."""
    return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))


def _yarn_attention_factor(factor: float, scaling: Scaling) -> float:
    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    mscale, mscale_all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if mscale and mscale_all_dim:
        return _mscale(factor, mscale) / _mscale(factor, mscale_all_dim)
    return _mscale(factor, 1.0)


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _powers(theta: float, dim: int) -> Frequencies:
    return np.float32(theta) ** (np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim))


SCALING_TYPES: dict[str, Callable[[float, int, Scaling], tuple[Frequencies, float]]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}
