"""Add to the residual and normalise it, in one pass: what lies between any two matrix products of a decoder.

XLA makes two or three kernels of it, which at small batches cost more than their bytes.
"""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from pallas_kernels.add_rms_norm.mosaic_gpu import mosaic_add_rms_norm, unsupported
from pallas_kernels.add_rms_norm.reference import reference_add_rms_norm
from pallas_kernels.hopper import choose, kernel_agrees, run, unavailable

BACKENDS = {"mosaic_gpu": mosaic_add_rms_norm, "reference": reference_add_rms_norm}


def add_rms_norm(
    x: Float[Array, "T D"],
    delta: Float[Array, "T D"],
    scale: Float[Array, " D"],
    *,
    eps: float,
    backend: str | None = None,
) -> tuple[Float[Array, "T D"], Float[Array, "T D"]]:
    """Return x + delta, and its root mean square norm times `scale`, both in the type of x.

    The sum is rounded to that type before it is normalised; the norm is taken in float32 and rounded before it is
    scaled, as Llama does.
    """
    if backend is None:
        backend, _ = default_backend(x)
    return run("add_rms_norm", BACKENDS, backend, x, delta, scale, eps=eps)


def default_backend(x: Any) -> tuple[str, str]:
    """Return the backend that runs for an array of this shape and type on the default device, and why."""
    return choose(unavailable() or unsupported(x), is_sound)


@cache
def is_sound() -> bool:
    """Whether the kernel computes on the default device what the reference does."""

    def draw(random: np.random.Generator) -> tuple[jax.Array, ...]:
        return tuple(jnp.asarray(random.normal(size=size), jnp.bfloat16) for size in ((3, 512), (3, 512), 512))

    return kernel_agrees(BACKENDS, draw, eps=1e-5)
