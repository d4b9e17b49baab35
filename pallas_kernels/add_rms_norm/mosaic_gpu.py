"""The op for Hopper in Mosaic GPU: one warpgroup a token, each thread holding its share of the row in registers."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.hopper import DTYPES, interpretation

THREADS = 128
MAX_DIM = 8192  # 64 values a thread, twice


def unsupported(x: Any) -> str | None:
    """Say what the kernel lacks for this array, or None."""
    if x.dtype not in DTYPES:
        return f"x is {x.dtype}; built are bfloat16 and float16"
    if x.shape[1] % (2 * THREADS) or x.shape[1] > MAX_DIM:
        return f"rows have {x.shape[1]} values; built are multiples of {2 * THREADS} up to {MAX_DIM}"
    return None


@partial(jax.jit, static_argnames="eps")
def mosaic_add_rms_norm(
    x: Float[Array, "T D"], delta: Float[Array, "T D"], scale: Float[Array, " D"], *, eps: float
) -> tuple[Float[Array, "T D"], Float[Array, "T D"]]:
    """Compute `add_rms_norm`. On a CPU the kernel is interpreted: for tests."""
    if (reason := unsupported(x)) is not None:
        raise NotImplementedError(f"the mosaic_gpu backend of add_rms_norm: {reason}")
    num_tokens = len(x)
    kernel = plgpu.kernel(
        partial(_kernel, eps=eps),
        out_type=[jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct(x.shape, x.dtype)],
        grid=(num_tokens,),
        grid_names=("token",),
        num_threads=1,
        thread_name="warpgroup",
        kernel_name="add_rms_norm",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpretation(),
    )
    total, normed = kernel(x, delta, scale)
    return total, normed


def _kernel(
    # inputs, in GMEM
    x,  # [T, D]
    delta,  # [T, D]
    scale,  # [D]
    # outputs, in GMEM
    total,  # [T, D]
    normed,  # [T, D]
    *,
    # static
    eps,
):  # fmt: skip
    token, (_, dim) = lax.axis_index("token"), x.shape
    vector = next(size for size in (8, 4, 2) if dim % (THREADS * size) == 0)
    layout = plgpu.Layout.WG_STRIDED((dim,), vec_size=vector)

    def load(ref):
        return plgpu.load(ref, layout=layout, optimized=False)

    row = load(x.at[token]) + load(delta.at[token])
    weights = load(scale)
    total[token] = row
    row32 = row.astype(jnp.float32)
    factor = lax.rsqrt(jnp.sum(row32 * row32) / dim + eps)
    normed[token] = (row32 * factor).astype(row.dtype) * weights
