"""The op in plain jnp: the oracle, and what runs where there is no kernel."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def reference_add_rms_norm(
    x: Float[Array, "T D"], delta: Float[Array, "T D"], scale: Float[Array, " D"], *, eps: float
) -> tuple[Float[Array, "T D"], Float[Array, "T D"]]:
    """Compute `add_rms_norm`."""
    x = x + delta
    return x, rms_norm(x, scale, eps)


def rms_norm(x: Float[Array, "*rows D"], scale: Float[Array, " D"], eps: float) -> Float[Array, "*rows D"]:
    """Normalise every row by its root mean square, in float32; rounded before it is scaled."""
    x32 = x.astype(jnp.float32)
    variance = jnp.mean(jnp.square(x32), axis=-1, keepdims=True)
    normed = (x32 * jax.lax.rsqrt(variance + jnp.float32(eps))).astype(x.dtype)
    return normed * scale.reshape((1,) * (x.ndim - 1) + (-1,))
