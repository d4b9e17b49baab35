"""The first half of a gated MLP: act(x @ gate) * (x @ up), gate and up being the halves of one weight.

XLA writes both products to memory and reads them again to combine them, which takes 3 % of a step of long prompts.
"""

from functools import cache
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from pallas_kernels.gated_matmul.mosaic_gpu import mosaic_gated_matmul, unsupported
from pallas_kernels.gated_matmul.reference import Activation, reference_gated_matmul
from pallas_kernels.hopper import choose, kernel_agrees, run, unavailable

BACKENDS = {"mosaic_gpu": mosaic_gated_matmul, "reference": reference_gated_matmul}


def gated_matmul(
    x: Float[Array, "T I"], w: Float[Array, "I twoF"], *, act: Activation, backend: str | None = None
) -> Float[Array, "T F"]:
    """Return act(x @ w[:, :F]) * (x @ w[:, F:]) in the type of x; sums are float32.

    The kernel rounds once, at the end; the reference rounds the products to the type of x first. Raises ValueError for
    an activation that is not one of `Activation`.
    """
    if act not in get_args(Activation):
        raise ValueError(f"gated_matmul act is {act!r}; choose one of {', '.join(get_args(Activation))}")
    if backend is None:
        backend, _ = default_backend(x, w)
    return run("gated_matmul", BACKENDS, backend, x, w, act=act)


def default_backend(x: Any, w: Any) -> tuple[str, str]:
    """Return the backend that runs for arrays of these shapes and types on the default device, and why."""
    return choose(unavailable() or unsupported(x, w), is_sound)


@cache
def is_sound() -> bool:
    """Whether the kernel computes on the default device what the reference does."""

    def draw(random: np.random.Generator) -> tuple[jax.Array, jax.Array]:
        x, w = (jnp.asarray(random.normal(size=size), jnp.bfloat16) for size in ((256, 256), (256, 512)))
        return x, w / 16

    return kernel_agrees(BACKENDS, draw, act="silu")
