"""The op for Hopper in Mosaic GPU: a tile of the product a program, the sum's steps through a ring in shared memory.

One warpgroup keeps the ring full by TMA; the others multiply, each 64 rows of the tile. Programs of the same columns
are neighbours, so that the weights are read from memory once.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.hopper import ROWS, interpretation, unfit, wgmma_smem
from pallas_kernels.matmul.tuning import COLUMNS, DEPTH, Tile, is_faster, tile_for

REGISTERS = {1: 240, 2: 232}  # of a thread that multiplies, by the number of warpgroups that do


_unfit = partial(unfit, depth=DEPTH, columns=COLUMNS)


def unsupported(x: Any, w: Any) -> str | None:
    """Say why the kernel is not for these arrays, or None."""
    (num_rows, depth), width = x.shape, w.shape[1]
    if (reason := _unfit(x, w)) is not None:
        return reason
    if not is_faster(num_rows, depth, width):
        return f"XLA is faster for [{num_rows}, {depth}] x [{depth}, {width}]"
    return None


@partial(jax.jit, static_argnames="tile")
def mosaic_matmul(x: Float[Array, "T I"], w: Float[Array, "I O"], *, tile: Tile | None = None) -> Float[Array, "T O"]:
    """Compute `matmul`. On a CPU the kernel is interpreted: for tests."""
    if (reason := _unfit(x, w)) is not None:
        raise NotImplementedError(f"the mosaic_gpu backend of matmul: {reason}")
    (num_rows, depth), width = x.shape, w.shape[1]
    tile = tile or tile_for(num_rows, depth, width)
    groups = tile.rows // ROWS
    kernel = plgpu.kernel(
        partial(_kernel, tile=tile, groups=groups),
        out_type=[jax.ShapeDtypeStruct((num_rows, width), x.dtype)],
        scratch_types={
            "x_smem": wgmma_smem((tile.stages, tile.rows, tile.depth), x.dtype),
            "w_smem": wgmma_smem((tile.stages, tile.depth, tile.columns), x.dtype),
            "y_smem": wgmma_smem((groups, ROWS, tile.columns), x.dtype),
            "loaded": plgpu.Barrier(num_arrivals=2, num_barriers=tile.stages),
            "free": plgpu.Barrier(num_arrivals=groups, num_barriers=tile.stages),
        },
        grid=(width // tile.columns, -(-num_rows // tile.rows)),
        grid_names=("column", "row"),
        num_threads=groups + 1,
        thread_name="warpgroup",
        kernel_name="matmul",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpretation(),
    )
    (y,) = kernel(x, w)
    return y


def _kernel(
    # inputs, in GMEM
    x,  # [T, I]
    w,  # [I, O]
    # output, in GMEM
    y,  # [T, O]
    *,
    # scratch; the leading axis is the ring, or the warpgroup
    x_smem,  # [R, rows, depth]
    w_smem,  # [R, depth, columns]
    y_smem,  # [groups, ROWS, columns]
    loaded,  # TMA -> compute
    free,  # compute -> load
    # static
    tile, groups,
):  # fmt: skip
    warpgroup = lax.axis_index("warpgroup")
    row = lax.axis_index("row") * tile.rows
    columns = pl.ds(lax.axis_index("column") * tile.columns, tile.columns)
    num_steps, stages = x.shape[1] // tile.depth, jnp.int32(tile.stages)

    @pl.when(warpgroup == groups)
    def load():
        plgpu.set_max_registers(40, action="decrease")

        @pl.loop(0, num_steps)
        def fetch(i):
            i = jnp.int32(i)  # 64 bits wide where JAX's integers are
            slot, inner = lax.rem(i, stages), pl.ds(i * tile.depth, tile.depth)

            @pl.when(i >= stages)
            def wait():
                plgpu.barrier_wait(free.at[slot])

            plgpu.copy_gmem_to_smem(w.at[inner, columns], w_smem.at[slot], loaded.at[slot])
            # rows past the last are zeros
            plgpu.copy_gmem_to_smem(x.at[pl.ds(row, tile.rows), inner], x_smem.at[slot], loaded.at[slot])

        @pl.loop(max(num_steps - tile.stages, 0), num_steps)
        def drain(i):  # who waits on a barrier must see all its completions
            plgpu.barrier_wait(free.at[lax.rem(jnp.int32(i), stages)])

    @pl.when(warpgroup < groups)
    def compute():
        plgpu.set_max_registers(REGISTERS[groups], action="increase")
        own = pl.ds(warpgroup * ROWS, ROWS)

        def multiply(total):
            @pl.loop(0, num_steps)
            def step(i):
                i = jnp.int32(i)
                slot = lax.rem(i, stages)
                plgpu.barrier_wait(loaded.at[slot])
                plgpu.wgmma(total, x_smem.at[slot, own], w_smem.at[slot])
                plgpu.wgmma_wait(1)

                @pl.when(i > 0)  # the product before this one is done
                def release():
                    plgpu.barrier_arrive(free.at[lax.rem(i + stages - 1, stages)])

            return total[...]

        total = pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((ROWS, tile.columns), jnp.float32))
        plgpu.barrier_arrive(free.at[(num_steps - 1) % tile.stages])
        y_smem[warpgroup] = total.astype(y.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(y_smem.at[warpgroup], y.at[pl.ds(row + warpgroup * ROWS, ROWS), columns])
        plgpu.wait_smem_to_gmem(0)
