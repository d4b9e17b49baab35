"""From the fused projection to attention: norm heads where the model does, rotate queries and keys, write the cache.

XLA makes three kernels of it, five with norms, which at small batches cost more than their bytes.
"""

from functools import cache
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels.hopper import choose, kernel_agrees, run, unavailable
from pallas_kernels.rope_and_cache.mosaic_gpu import mosaic_rope_and_cache, unsupported
from pallas_kernels.rope_and_cache.reference import reference_rope_and_cache

BACKENDS = {"mosaic_gpu": mosaic_rope_and_cache, "reference": reference_rope_and_cache}

Pool = Float[Array, "P K S H"]


def rope_and_cache(
    heads: Float[Array, "T R H"],
    cos: Float[Array, "T half"],
    sin: Float[Array, "T half"],
    k_pool: Pool,
    v_pool: Pool,
    slot_mapping: Int[Array, " T"],
    head_scales: tuple[Float[Array, " H"], Float[Array, " H"]] | None = None,
    *,
    eps: float = 0.0,
    backend: str | None = None,
) -> tuple[Float[Array, "T N H"], Pool, Pool]:
    """Return the rotated queries, and the pools with this step's rotated keys and its values at their slots.

    `heads` are N query, K key and K value heads beside each other, R in all. The first half of a head is rotated
    against the second, in float32. `head_scales` are the weights of the root mean square norms of query and key
    heads, with `eps`, taken before the rotation. A slot (block * S + offset) of P * S or more is dropped;
    none may be negative, which would be another token's: -1 is the last slot of the pool.
    """
    if backend is None:
        backend, _ = default_backend(heads, k_pool)
    return run("rope_and_cache", BACKENDS, backend, heads, cos, sin, k_pool, v_pool, slot_mapping, head_scales, eps=eps)


def default_backend(heads: Any, k_pool: Any) -> tuple[str, str]:
    """Return the backend that runs for arrays of these shapes and types on the default device, and why."""
    return choose(unavailable() or unsupported(heads, k_pool), is_sound)


@cache
def is_sound() -> bool:
    """Whether the kernel computes on the default device what the reference does."""

    def draw(random: np.random.Generator) -> tuple:
        heads, k_pool, v_pool, q_scale, k_scale = (
            jnp.asarray(random.normal(size=size), jnp.bfloat16)
            for size in ((4, 8, 128), (3, 2, 16, 128), (3, 2, 16, 128), 128, 128)
        )
        angles = random.normal(size=(4, 64))
        cos, sin = (jnp.asarray(table, jnp.float32) for table in (np.cos(angles), np.sin(angles)))
        slots = jnp.asarray([20, 3 * 16, 5, 47], jnp.int32)  # the second is dropped
        return heads, cos, sin, k_pool, v_pool, slots, (q_scale, k_scale)

    return kernel_agrees(BACKENDS, draw, eps=1e-5)
