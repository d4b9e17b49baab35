"""From the fused projection to attention: norm heads where the model does, rotate queries and keys, write the cache.

XLA makes three kernels of it, five with norms, which at small batches cost more than their bytes.
"""

import jax
from jaxtyping import Array, Float, Int

from pallas_kernels.hopper import is_available
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
    heads, with `eps`, taken before the rotation. A slot (block * S + offset) of P * S or more is dropped.
    """
    if backend is None:
        backend = "mosaic_gpu" if is_available() and unsupported(heads, k_pool) is None else "reference"
    if backend not in BACKENDS:
        raise ValueError(f"rope_and_cache backend is {backend!r}; choose one of {', '.join(BACKENDS)}")
    with jax.named_scope(f"rope_and_cache_{backend}"):
        return BACKENDS[backend](heads, cos, sin, k_pool, v_pool, slot_mapping, head_scales, eps=eps)
