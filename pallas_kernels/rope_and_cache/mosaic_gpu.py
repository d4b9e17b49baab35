"""The op for Hopper in Mosaic GPU: one warpgroup a token.

The halves of the query and key heads lie in shared memory as two matrices of one row a head, are rotated against each
other in place, and go out by TMA: queries to the output, keys and values to their slot. The pools are updated in place.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.hopper import DTYPES, MATRIX, PER_COLUMN, ROWS, interpretation

SMEM_ALIGNMENT = 128  # bytes, of what TMA reads

Pool = Float[Array, "P K S H"]


def unsupported(heads: Any, k_pool: Any) -> str | None:
    """Say what the kernel lacks for these arrays, or None."""
    _, num_kv_heads, _, head_dim = k_pool.shape
    num_heads = heads.shape[1] - 2 * num_kv_heads
    if heads.dtype not in DTYPES or k_pool.dtype != heads.dtype:
        return f"heads are {heads.dtype} and the pool {k_pool.dtype}; built are bfloat16 and float16, the same for both"
    if head_dim % 32:
        return f"head_dim is {head_dim}; built are multiples of 32"
    if num_heads * head_dim % SMEM_ALIGNMENT:
        return f"{num_heads} query heads of {head_dim} are no multiple of {SMEM_ALIGNMENT} values"
    return None


@partial(jax.jit, static_argnames="eps")
def mosaic_rope_and_cache(
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
    """Compute `rope_and_cache`. On a CPU the kernel is interpreted: for tests."""
    if (reason := unsupported(heads, k_pool)) is not None:
        raise NotImplementedError(f"the mosaic_gpu backend of rope_and_cache: {reason}")
    num_tokens, num_rows, head_dim = heads.shape
    num_kv_heads = k_pool.shape[1]
    num_heads = num_rows - 2 * num_kv_heads
    padded = -(-(num_heads + num_kv_heads) // ROWS) * ROWS
    kernel = plgpu.kernel(
        partial(_kernel, num_kv_heads=num_kv_heads, has_norm=head_scales is not None, eps=eps),
        out_type=[jax.ShapeDtypeStruct((num_tokens, num_heads, head_dim), heads.dtype)],
        scratch_types={
            "halves": plgpu.SMEM((2, padded, head_dim // 2), heads.dtype),
            "values": plgpu.SMEM((num_kv_heads, head_dim), heads.dtype),
            "loaded": plgpu.Barrier(num_arrivals=2),
            "values_loaded": plgpu.Barrier(),
        },
        grid=(num_tokens,),
        grid_names=("token",),
        num_threads=1,
        thread_name="warpgroup",
        kernel_name="rope_and_cache",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpretation(),
    )
    scales = head_scales or (heads[0, 0], heads[0, 0])
    k_ref, v_ref = jax.new_ref(k_pool), jax.new_ref(v_pool)
    (q,) = kernel(slot_mapping, heads, cos, sin, *scales, k_ref, v_ref)
    return q, jax.freeze(k_ref), jax.freeze(v_ref)


def _kernel(
    # scalars, in GMEM
    slot_mapping,  # [T] int32
    # inputs, in GMEM
    heads,  # [T, N + 2 K, H]
    cos,  # [T, half] float32
    sin,  # [T, half] float32
    q_scale,  # [H]
    k_scale,  # [H]
    # updated, in GMEM
    k_pool,  # [P, K, S, H]
    v_pool,  # [P, K, S, H]
    # output, in GMEM
    q,  # [T, N, H]
    *,
    # scratch
    halves,  # [2, rows, half]
    values,  # [K, H]
    loaded, values_loaded,
    # static
    num_kv_heads, has_norm, eps,
):  # fmt: skip
    token = lax.axis_index("token")
    num_blocks, _, block_size, head_dim = k_pool.shape
    num_heads, half = q.shape[1], head_dim // 2
    rotated = num_heads + num_kv_heads
    sides = [pl.ds(0, half), pl.ds(half, half)]
    for i, side in enumerate(sides):
        plgpu.copy_gmem_to_smem(heads.at[token, pl.ds(0, rotated), side], halves.at[i, pl.ds(0, rotated)], loaded)
    plgpu.copy_gmem_to_smem(heads.at[token, pl.ds(rotated, num_kv_heads)], values, values_loaded)
    slot = slot_mapping[token]

    def load_row(ref):
        return plgpu.load(ref, layout=PER_COLUMN, optimized=False)

    tables = [load_row(table.at[token]) for table in (cos, sin)]
    plgpu.barrier_wait(loaded)
    for first in range(0, halves.shape[1], ROWS):
        rows = pl.ds(first, ROWS)
        shape = (ROWS, half)

        def spread(row, shape=shape):
            return lax.broadcast_in_dim(row, shape, [1])

        pair = [plgpu.load(halves.at[i, rows], layout=MATRIX).astype(jnp.float32) for i in range(2)]
        if has_norm:
            squares = sum(jnp.sum(x * x, axis=1) for x in pair)
            factor = lax.broadcast_in_dim(lax.rsqrt(squares / head_dim + eps), shape, [0])
            is_query = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=MATRIX) + first < num_heads
            scales = [
                jnp.where(is_query, *(spread(load_row(s.at[side])) for s in (q_scale, k_scale))) for side in sides
            ]
            pair = [
                ((x * factor).astype(halves.dtype) * scale).astype(jnp.float32)
                for x, scale in zip(pair, scales, strict=True)
            ]
        cos_row, sin_row = (spread(table) for table in tables)
        halves[0, rows] = (pair[0] * cos_row - pair[1] * sin_row).astype(halves.dtype)
        halves[1, rows] = (pair[1] * cos_row + pair[0] * sin_row).astype(halves.dtype)
    plgpu.commit_smem()
    for i, side in enumerate(sides):
        plgpu.copy_smem_to_gmem(halves.at[i, pl.ds(0, num_heads)], q.at[token, :, side])
    plgpu.barrier_wait(values_loaded)

    @pl.when(slot < num_blocks * block_size)
    def write():
        block, offset = lax.div(slot, jnp.int32(block_size)), lax.rem(slot, jnp.int32(block_size))
        for i, side in enumerate(sides):
            keys = halves.at[i, pl.ds(num_heads, num_kv_heads)]
            plgpu.copy_smem_to_gmem(keys, k_pool.at[block, :, offset, side])
        plgpu.copy_smem_to_gmem(values, v_pool.at[block, :, offset])

    plgpu.wait_smem_to_gmem(0)
