"""Merge the parts of pairs that a border between workers cut, after `mosaic_decode`, into the same output.

The worker whose share ends a pair that began in an earlier one names the pair: it has one program here, and the parts
are those of the workers from the pair's beginning to it. Others do nothing. Parts are always added in that order.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.hopper import MASKED, interpretation
from pallas_kernels.paged_attention import mosaic_work as work

AT_ONCE = 8  # parts whose loads are under way together


def merge_parts(
    out: Float[Array, "T N H"],
    part: Float[Array, "2 W R H"],
    part_lse: Float[Array, "2 W R H"],
    work_list: work.WorkList,
    sinks: Float[Array, "K 64"] | None,
    *,
    group: int,
) -> Float[Array, "T N H"]:
    """Return `out`, updated in place, with the output of every cut pair."""
    num_workers, num_rows, head_dim = part.shape[1:]
    if sinks is not None:
        sinks = jnp.broadcast_to(sinks[:, :num_rows, None], (len(sinks), num_rows, head_dim))
    kernel = plgpu.kernel(
        partial(_kernel, group=group, has_sinks=sinks is not None),
        out_type=(),
        scratch_types={"smem": plgpu.SMEM((num_rows, head_dim), out.dtype)},
        grid=(num_workers,),
        grid_names=("worker",),
        num_threads=1,
        thread_name="warpgroup",
        kernel_name="paged_decode_merge",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpretation(),
    )
    target = jax.new_ref(out)
    kernel(*work_list, part, part_lse, part_lse if sinks is None else sinks, target)
    return jax.freeze(target)


def _kernel(
    # scalars, in GMEM
    rows,  # [U, 8] int32
    workers,  # [W, 4] int32
    # inputs, in GMEM
    part,  # [2, W, R, H] float32
    part_lse,  # [2, W, R, H] float32, base 2
    sinks,  # [K, R, H] float32, base 2
    # updated, in GMEM
    out,  # [T, N, H]
    *,
    # scratch
    smem,  # [R, H]
    # static
    group, has_sinks,
):  # fmt: skip
    shape = smem.shape
    layout = plgpu.Layout.WG_STRIDED(shape, vec_size=math.gcd(4, math.prod(shape) // 128))
    worker = lax.axis_index("worker")
    row, begin, end = (workers[worker, column] for column in (work.ROW, work.BEGIN, work.END))
    share = workers[0, work.END]
    num_tiles, start = rows[row, work.NUM_TILES], rows[row, work.START]
    head = lax.div(begin - start, jnp.maximum(num_tiles, 1))
    pair = start + head * num_tiles

    @pl.when((pair < begin) & (begin < end) & (pair + num_tiles <= end))
    def merge():
        first = lax.div(pair, share)

        def load(ref, *index):
            return plgpu.load(ref.at[index], layout=layout, optimized=False)

        def full(value):
            return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)

        def add(step, carry):
            maximum, total, acc = carry
            workers_ = [first + step * AT_ONCE + i for i in range(AT_ONCE)]
            index = [jnp.minimum(i, worker) for i in workers_]
            side = [jnp.where((i == first) & (pair != first * share), 1, 0) for i in index]
            lses = [load(part_lse, s, i) for s, i in zip(side, index, strict=True)]
            values = [load(part, s, i) for s, i in zip(side, index, strict=True)]
            for i, lse, value in zip(workers_, lses, values, strict=True):
                lse += jnp.where(i <= worker, 0.0, MASKED)  # a scalar: the part past the last is the last again
                new_maximum = jnp.maximum(maximum, lse)
                decay, weight = jnp.exp2(maximum - new_maximum), jnp.exp2(lse - new_maximum)
                maximum, total, acc = new_maximum, total * decay + weight, acc * decay + weight * value
            return maximum, total, acc

        carry = (load(sinks, head), full(1.0), full(0.0)) if has_sinks else (full(MASKED), full(0.0), full(0.0))
        num_steps = lax.div(worker - first + AT_ONCE, jnp.int32(AT_ONCE))
        _, total, acc = lax.fori_loop(0, num_steps, add, carry)
        smem[...] = (acc / total).astype(smem.dtype)
        plgpu.commit_smem()
        heads = pl.ds(head * group, group)
        plgpu.copy_smem_to_gmem(smem.at[pl.ds(0, group)], out.at[rows[row, work.TOKEN], heads])
        plgpu.wait_smem_to_gmem(0)
