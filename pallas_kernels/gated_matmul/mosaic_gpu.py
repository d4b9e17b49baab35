"""The op for Hopper in Mosaic GPU: persistent programs, each walking tiles of the output of 128 x 128.

One warpgroup keeps a ring of steps of the sum full by TMA, across the borders of tiles; two multiply, 64 rows each, the
same x by columns of gate and of up, and combine them in registers. In a cluster of two, programs of neighbouring rows
share the columns: each loads half of them for both.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.gated_matmul.reference import Activation, activate
from pallas_kernels.gated_matmul.tuning import COLUMNS, DEPTH, ROWS, STAGES, TILES_WIDE, Cut, cut_for, is_faster
from pallas_kernels.hopper import ROWS as WARPGROUP_ROWS
from pallas_kernels.hopper import interpretation, unfit, wgmma_smem

WARPGROUPS = ROWS // WARPGROUP_ROWS  # that multiply

_unfit = partial(unfit, depth=DEPTH, columns=2 * COLUMNS)


def unsupported(x: Any, w: Any) -> str | None:
    """Say why the kernel is not for these arrays, or None."""
    (num_rows, depth), width = x.shape, w.shape[1]
    if (reason := _unfit(x, w)) is not None:
        return reason
    if not is_faster(num_rows, width // 2):
        return f"XLA is faster for [{num_rows}, {depth}] x [{depth}, {width}]"
    return None


@partial(jax.jit, static_argnames=("act", "cut"))
def mosaic_gated_matmul(
    x: Float[Array, "T I"], w: Float[Array, "I twoF"], *, act: Activation, cut: Cut | None = None
) -> Float[Array, "T F"]:
    """Compute `gated_matmul`. On a CPU the kernel is interpreted: for tests."""
    if (reason := _unfit(x, w)) is not None:
        raise NotImplementedError(f"the mosaic_gpu backend of gated_matmul: {reason}")
    (num_rows, _), width, dtype = x.shape, w.shape[1] // 2, x.dtype
    cut = cut or cut_for(num_rows, width)
    in_cluster: dict[str, Any] = {"cluster": (cut.cluster,), "cluster_names": ("cluster",)} if cut.cluster > 1 else {}
    arrivals: dict[str, Any] = {"num_arrivals": WARPGROUPS, "num_barriers": STAGES}
    kernel = plgpu.kernel(
        partial(_kernel, act=act, cut=cut),
        out_type=[jax.ShapeDtypeStruct((num_rows, width), dtype)],
        scratch_types={
            "x_smem": wgmma_smem((STAGES, ROWS, DEPTH), dtype),
            "gate_smem": wgmma_smem((STAGES, DEPTH, COLUMNS), dtype),
            "up_smem": wgmma_smem((STAGES, DEPTH, COLUMNS), dtype),
            "y_smem": wgmma_smem((WARPGROUPS, WARPGROUP_ROWS, COLUMNS), dtype),
            "loaded": plgpu.Barrier(num_arrivals=3, num_barriers=STAGES),
            # who loads for its neighbour waits for the neighbour's warpgroups as well
            "free": plgpu.ClusterBarrier(collective_axes=("cluster",), **arrivals)
            if in_cluster
            else plgpu.Barrier(**arrivals),
        },
        grid=(cut.num_programs // cut.cluster,),
        grid_names=("program",),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        kernel_name="gated_matmul",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpretation(),
        **in_cluster,
    )
    (y,) = kernel(x, w)
    return y


def _kernel(
    # inputs, in GMEM
    x,  # [T, I]
    w,  # [I, 2 F]
    # output, in GMEM
    y,  # [T, F]
    *,
    # scratch; the leading axis is the ring, or the warpgroup
    x_smem,  # [stages, ROWS, DEPTH]
    gate_smem,  # [stages, DEPTH, COLUMNS]
    up_smem,  # [stages, DEPTH, COLUMNS]
    y_smem,  # [warpgroups, rows, COLUMNS]
    loaded,  # TMA -> compute
    free,  # compute -> load
    # static
    act, cut,
):  # fmt: skip
    warpgroup, program = lax.axis_index("warpgroup"), lax.axis_index("program")
    (num_rows, depth), width = x.shape, y.shape[1]
    num_steps, stages = depth // DEPTH, jnp.int32(STAGES)
    across, down = width // COLUMNS, -(-num_rows // (ROWS * cut.cluster))
    num_walkers = cut.num_programs // cut.cluster
    num_tiles = lax.div(across * down - program + num_walkers - 1, jnp.int32(num_walkers))  # of this program
    shared: dict[str, Any] = {"collective_axes": "cluster"} if cut.cluster > 1 else {}

    def corner(i):
        """Return the first row and column of this program's tile number i."""
        row, column = plgpu.planar_snake(program + i * num_walkers, (down, across), 0, min(TILES_WIDE, down))
        if cut.cluster > 1:
            row = row * cut.cluster + lax.axis_index("cluster")
        return row * ROWS, column * COLUMNS

    @pl.when(warpgroup == WARPGROUPS)
    def load():
        plgpu.set_max_registers(40, action="decrease")

        @pl.loop(0, num_tiles)
        def tile(i):
            row, column = corner(i)

            @pl.loop(0, num_steps)
            def fetch(step):
                ring = i * num_steps + step
                slot, inner = lax.rem(ring, stages), pl.ds(step * DEPTH, DEPTH)

                @pl.when(ring >= stages)
                def wait():
                    plgpu.barrier_wait(free.at[slot])

                # rows past the last are zeros
                plgpu.copy_gmem_to_smem(x.at[pl.ds(row, ROWS), inner], x_smem.at[slot], loaded.at[slot])
                for first, smem in ((column, gate_smem), (width + column, up_smem)):
                    source = w.at[inner, pl.ds(first, COLUMNS)]
                    plgpu.copy_gmem_to_smem(source, smem.at[slot], loaded.at[slot], **shared)

        last = num_tiles * num_steps

        @pl.loop(jnp.maximum(last - stages, 0), last)
        def drain(ring):  # who waits on a barrier must see all its completions
            plgpu.barrier_wait(free.at[lax.rem(ring, stages)])

    @pl.when(warpgroup < WARPGROUPS)
    def compute():
        plgpu.set_max_registers(232, action="increase")
        own = pl.ds(warpgroup * WARPGROUP_ROWS, WARPGROUP_ROWS)

        @pl.loop(0, num_tiles)
        def tile(i):
            row, column = corner(i)
            first = i * num_steps

            def multiply(gate, up):
                @pl.loop(0, num_steps)
                def step(j):
                    slot = lax.rem(first + j, stages)
                    plgpu.barrier_wait(loaded.at[slot])
                    plgpu.wgmma(gate, x_smem.at[slot, own], gate_smem.at[slot])
                    plgpu.wgmma(up, x_smem.at[slot, own], up_smem.at[slot])
                    plgpu.wgmma_wait(2)

                    @pl.when(j > 0)  # the products before these are done
                    def release():
                        plgpu.barrier_arrive(free.at[lax.rem(first + j + stages - 1, stages)])

                return gate[...], up[...]

            sums = plgpu.WGMMAAccumulatorRef((WARPGROUP_ROWS, COLUMNS), jnp.float32)
            gate, up = pl.run_scoped(multiply, sums, sums)
            plgpu.barrier_arrive(free.at[lax.rem(first + num_steps - 1, stages)])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the tile before this one
            y_smem[warpgroup] = (activate(gate, act) * up).astype(y.dtype)
            plgpu.commit_smem()
            rows = pl.ds(row + warpgroup * WARPGROUP_ROWS, WARPGROUP_ROWS)
            plgpu.copy_smem_to_gmem(y_smem.at[warpgroup], y.at[rows, pl.ds(column, COLUMNS)])

        plgpu.wait_smem_to_gmem(0)
