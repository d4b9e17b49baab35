"""The op in plain jnp: the oracle, and what runs where the kernel does not or would be slower."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float


def reference_matmul(x: Float[Array, "T I"], w: Float[Array, "I O"]) -> Float[Array, "T O"]:
    """Compute `matmul`."""
    dtype = x.dtype if x.dtype == w.dtype else jnp.dtype(jnp.float32)
    product = jnp.matmul(x.astype(dtype), w.astype(dtype), precision=full_precision(dtype))
    return product.astype(x.dtype)


def full_precision(dtype: DTypeLike) -> jax.lax.Precision:
    """Return the matmul precision under which `dtype` keeps its own accuracy: GPUs would round float32 to TF32."""
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else jax.lax.Precision.DEFAULT
