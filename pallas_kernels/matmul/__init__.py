"""A matrix product for a batch of tokens: few rows against the weights of a projection.

XLA's choices for such shapes leave multiprocessors idle: their tiles are made for thousands of rows.
"""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from pallas_kernels.hopper import choose, kernel_agrees, run, unavailable
from pallas_kernels.matmul.mosaic_gpu import mosaic_matmul, unsupported
from pallas_kernels.matmul.reference import reference_matmul

BACKENDS = {"mosaic_gpu": mosaic_matmul, "reference": reference_matmul}


def matmul(x: Float[Array, "T I"], w: Float[Array, "I O"], *, backend: str | None = None) -> Float[Array, "T O"]:
    """Return x @ w, summed in float32, in the type of x; operands of float32 are multiplied in full float32."""
    if backend is None:
        backend, _ = default_backend(x, w)
    return run("matmul", BACKENDS, backend, x, w)


def default_backend(x: Any, w: Any) -> tuple[str, str]:
    """Return the backend that runs for arrays of these shapes and types on the default device, and why."""
    return choose(unavailable() or unsupported(x, w), is_sound)


@cache
def is_sound() -> bool:
    """Whether the kernel computes on the default device what the reference does."""

    def draw(random: np.random.Generator) -> tuple[jax.Array, ...]:
        return tuple(jnp.asarray(random.normal(size=size), jnp.bfloat16) for size in ((128, 256), (256, 384)))

    return kernel_agrees(BACKENDS, draw)
