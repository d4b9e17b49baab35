"""The op in plain jnp: the oracle, and what runs where there is no kernel."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def reference_add_rms_norm(
    x: Float[Array, "T D"], delta: Float[Array, "T D"], scale: Float[Array, " D"], *, eps: float
) -> tuple[Float[Array, "T D"], Float[Array, "T D"]]:
    """Compute `add_rms_norm`."""
    x = x + delta
    x32 = x.astype(jnp.float32)
    variance = jnp.mean(jnp.square(x32), axis=-1, keepdims=True)
    return x, (x32 * jax.lax.rsqrt(variance + jnp.float32(eps))).astype(x.dtype) * scale[None, :]
