"""The op in plain jnp: the oracle, and what runs where there is no kernel."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.add_rms_norm.reference import rms_norm

Pool = Float[Array, "P K S H"]


def reference_rope_and_cache(
    heads: Float[Array, "T R H"],
    cos: Float[Array, "T half"],
    sin: Float[Array, "T half"],
    k_pool: Pool,
    v_pool: Pool,
    slot_mapping: Int[Array, " T"],
    head_scales: tuple[Float[Array, " H"], Float[Array, " H"]] | None,
    *,
    eps: float,
) -> tuple[Float[Array, "T N H"], Pool, Pool]:
    """Compute `rope_and_cache`."""
    num_kv_heads = k_pool.shape[1]
    num_heads = heads.shape[1] - 2 * num_kv_heads
    q, k, v = jnp.split(heads, (num_heads, num_heads + num_kv_heads), axis=1)
    if head_scales is not None:
        q, k = (rms_norm(x, scale, eps) for x, scale in zip((q, k), head_scales, strict=True))
    q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    return q, write_slots(k_pool, k, slot_mapping), write_slots(v_pool, v, slot_mapping)


def rotate(x: Float[Array, "T N H"], cos: Float[Array, "T half"], sin: Float[Array, "T half"]) -> Float[Array, "T N H"]:
    """Rotate the first half of each head against the second, in float32, and cast back."""
    cos, sin = cos[:, None, :], sin[:, None, :]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)


def write_slots(pool: Pool, new: Float[Array, "T K H"], slot_mapping: Int[Array, " T"]) -> Pool:
    """Write each token's heads at its slot; a slot of P * S or more is dropped, none may be negative."""
    num_kv_heads, block_size, head_dim = pool.shape[1:]
    block_ids, offsets = slot_mapping // block_size, slot_mapping % block_size
    if len(slot_mapping) == 1:  # the same write as rows of one axis: XLA compiles a single token's scatter slowly
        heads = jnp.arange(num_kv_heads, dtype=jnp.int32)
        rows = (block_ids[:, None] * num_kv_heads + heads[None, :]) * block_size + offsets[:, None]  # [1, K]
        flat = pool.reshape(-1, head_dim).at[rows].set(new.astype(pool.dtype), mode="drop")
        return flat.reshape(pool.shape)
    return pool.at[block_ids, :, offsets].set(new.astype(pool.dtype), mode="drop")
