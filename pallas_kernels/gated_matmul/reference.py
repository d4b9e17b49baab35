"""The op in plain jnp: the oracle, and what runs where the kernel does not or would be slower."""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.matmul import matmul

Activation = Literal["silu", "gelu_pytorch_tanh"]


def reference_gated_matmul(
    x: Float[Array, "T I"], w: Float[Array, "I twoF"], *, act: Activation
) -> Float[Array, "T F"]:
    """Compute `gated_matmul`."""
    return combine(matmul(x, w), act)


def combine(products: Float[Array, "T twoF"], act: Activation) -> Float[Array, "T F"]:
    """Return act(gate) * up, gate and up being the halves of every row."""
    gate, up = jnp.split(products, 2, axis=-1)  # [T, F] each
    return activate(gate, act) * up


def activate(x: Float[Array, "T F"], act: Activation) -> Float[Array, "T F"]:
    """Apply the activation to every value."""
    return jax.nn.silu(x) if act == "silu" else jax.nn.gelu(x, approximate=True)
