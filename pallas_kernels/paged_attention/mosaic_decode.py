"""Decode attention for Hopper in Mosaic GPU: one query token a row, keys read through the block table by TMA.

A persistent program a multiprocessor holds `streams` pairs of warpgroups; in each, one loads and one computes, joined
by a ring of key and value tiles. The pairs are the workers of the work list: each walks its share of tiles from one
(row, KV head) to the next without draining the ring. The query heads of a KV head are the first of the 64 rows that
wgmma wants. A pair that one worker has whole is written out; parts of others go to `mosaic_merge`.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.hopper import (
    LOG2E,
    MASKED,
    MATRIX,
    PER_ROW,
    ROWS,
    accumulate,
    interpretation,
    load_rows,
    matmul,
    wgmma_smem,
)
from pallas_kernels.paged_attention import mosaic_work as work
from pallas_kernels.paged_attention.tuning import DecodeTuning

COMPUTE = 0  # the first warpgroup of a stream; the other loads


def decode_parts(
    q: Float[Array, "T N H"],
    k_pool: Float[Array, "P K S H"],
    v_pool: Float[Array, "P K S H"],
    block_tables: Int[Array, "B M"],
    work_list: work.WorkList,
    is_dead: Int[Array, " D"],
    sinks: Float[Array, "K 64"] | None,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    tuning: DecodeTuning,
) -> tuple[Float[Array, "T N H"], Float[Array, "2 W R H"], Float[Array, "2 W R H"]]:
    """Attend from the rows of the work list.

    Those of the first D tokens that `is_dead` names come out as zeros; others that no row names are not written.

    Returns:
      The output, right for every pair that one worker holds whole; then, of the first segment of each share [0] and
      of the last [1], the normalised output and the base-2 log-sum-exp repeated along H, written where they are
      parts. R is `part_rows`.
    """
    _, num_heads, head_dim = q.shape
    _, num_kv_heads, block_size, _ = k_pool.shape
    group, streams, stages, tile = num_heads // num_kv_heads, tuning.streams, tuning.stages, tuning.tile
    num_workers = len(work_list.workers)
    dtype, interpret = q.dtype, interpretation()
    loaded = plgpu.Barrier(num_arrivals=tile // block_size, num_barriers=streams * stages)
    free = plgpu.Barrier(num_barriers=streams * stages)
    # One memory under two types, of equal stride a stream; the race detector takes streams of a union for one another.
    staging = [plgpu.SMEM((streams, 2 * ROWS, head_dim), dtype), plgpu.SMEM((streams, ROWS, head_dim), jnp.float32)]
    scratch = {
        "q_smem": wgmma_smem((streams, ROWS, head_dim), dtype),
        "k_smem": wgmma_smem((streams * stages, tile, head_dim), dtype),
        "v_smem": wgmma_smem((streams * stages, tile, head_dim), dtype),
        "staging": plgpu.RefUnion(*staging) if interpret is None else staging,
        "q_loaded": plgpu.Barrier(num_barriers=streams),
        "k_loaded": loaded, "v_loaded": loaded, "k_free": free, "v_free": free,
    }  # fmt: skip
    if interpret is not None:
        scratch["p_smem"] = wgmma_smem((streams, ROWS, tile), dtype)
    body = partial(
        _kernel, group=group, num_kv_heads=num_kv_heads, block_size=block_size, tuning=tuning,
        scale=scale, window=window, soft_cap=soft_cap, has_sinks=sinks is not None, num_workers=num_workers,
    )  # fmt: skip
    kernel = plgpu.kernel(
        body,
        out_type=[
            jax.ShapeDtypeStruct(q.shape, dtype),
            part := jax.ShapeDtypeStruct((2, num_workers, part_rows(group, head_dim), head_dim), jnp.float32),
            part,
        ],
        scratch_types=scratch,
        grid=(num_workers // streams,),
        grid_names=("program",),
        num_threads=2 * streams,
        thread_name="warpgroup",
        kernel_name="paged_decode",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        interpret=interpret,
    )
    if sinks is None:
        sinks = jnp.zeros((1, ROWS), jnp.float32)
    return tuple(kernel(*work_list, is_dead, block_tables, sinks, q, k_pool, v_pool))


def part_rows(group: int, head_dim: int) -> int:
    """Rows of a part: the query heads of a KV head, rounded up so that a warpgroup's threads share them evenly."""
    return -(-group * head_dim // 128) * 128 // head_dim if head_dim < 128 else group


def _kernel(
    # scalars, in GMEM
    rows,  # [U, 8] int32
    workers,  # [W, 4] int32
    is_dead,  # [D] int32
    block_tables,  # [B, M] int32
    # inputs, in GMEM
    sinks,  # [K, 64] float32, base 2
    q,  # [T, N, H]
    k,  # [P, K, S, H]
    v,  # [P, K, S, H]
    # outputs, in GMEM
    out,  # [T, N, H]
    part,  # [2, W, R, H] float32
    part_lse,  # [2, W, R, H] float32
    *,
    # scratch; the leading axis is the stream, or the stream's ring
    q_smem,  # [R, ROWS, H]
    k_smem,  # [R * stages, tile, H]
    v_smem,  # [R * stages, tile, H]
    staging,  # rows as in GMEM: [R, 2 * ROWS, H] of q's type, or the same memory as [R, ROWS, H] float32
    q_loaded, k_loaded, v_loaded,  # TMA -> compute
    k_free, v_free,  # compute -> load
    p_smem=None,  # [R, ROWS, tile], interpret mode only
    # static
    group, num_kv_heads, block_size, tuning, scale, window, soft_cap, has_sinks, num_workers,
):  # fmt: skip
    tile, stages, streams = tuning.tile, tuning.stages, tuning.streams
    head_dim = q.shape[2]
    warpgroup = lax.axis_index("warpgroup")
    stream, role = lax.div(warpgroup, jnp.int32(2)), lax.rem(warpgroup, jnp.int32(2))
    program = lax.axis_index("program")
    # Neighbouring shares go to different multiprocessors, so that a small batch uses as many as it can.
    worker = stream * (num_workers // streams) + program
    begin, end = workers[worker, work.BEGIN], workers[worker, work.END]

    def walk(segment):
        """Call segment(row, head, first tile, number of tiles, position, ring position) for each pair of the share."""

        def step(_, carry):
            row, position, ring = carry
            num_tiles, start = rows[row, work.NUM_TILES], rows[row, work.START]
            local = position - start
            head = lax.div(local, num_tiles)
            first = local - head * num_tiles
            count = jnp.minimum(num_tiles - first, end - position)
            segment(row, head, first, count, position, ring)
            position += count
            row = jnp.where(position - start == num_tiles * num_kv_heads, rows[row, work.NEXT_ROW], row)
            return row, position, ring + count

        first = workers[worker, work.ROW], begin, jnp.int32(0)
        lax.fori_loop(0, workers[worker, work.NUM_SEGMENTS], step, first)

    def slot_of(ring):
        return stream * stages + lax.rem(ring, jnp.int32(stages))

    @pl.when(role != COMPUTE)
    def load():
        plgpu.set_max_registers(56, action="decrease")
        last_column = block_tables.shape[1] - 1

        def segment(row, head, first, count, position, ring):
            request, first_tile = rows[row, work.REQUEST], rows[row, work.FIRST_TILE]

            def fetch(i, _):
                slot = slot_of(ring + i)
                column = (first_tile + first + i) * (tile // block_size)
                blocks = [
                    block_tables[request, jnp.minimum(column + j, last_column)] for j in range(tile // block_size)
                ]
                for pool, smem, arrived, released in ((k, k_smem, k_loaded, k_free), (v, v_smem, v_loaded, v_free)):
                    plgpu.barrier_wait(released.at[slot])
                    for j, block in enumerate(blocks):
                        target = smem.at[slot, pl.ds(j * block_size, block_size)]
                        plgpu.copy_gmem_to_smem(pool.at[block, head], target, arrived.at[slot])

            lax.fori_loop(0, count, fetch, None)

        walk(segment)

        @pl.loop(0, stages)
        def drain(i):  # who waits on a barrier must see all its completions
            plgpu.barrier_wait(k_free.at[stream * stages + i])
            plgpu.barrier_wait(v_free.at[stream * stages + i])

    @pl.when(role == COMPUTE)
    def compute():
        plgpu.set_max_registers(200 if streams == 2 else 232, action="increase")
        own, own32 = staging[0].at[stream, pl.ds(0, ROWS)], staging[1].at[stream]

        @pl.loop(0, stages)
        def release(i):
            plgpu.barrier_arrive(k_free.at[stream * stages + i])
            plgpu.barrier_arrive(v_free.at[stream * stages + i])

        _write_zeros(is_dead, own, out, worker, num_workers)

        def segment(row, head, first, count, position, ring):
            token, seq_len = rows[row, work.TOKEN], rows[row, work.SEQ_LEN]
            first_tile = rows[row, work.FIRST_TILE] + first
            heads = pl.ds(head * group, group)
            plgpu.copy_gmem_to_smem(q.at[token, heads], own.at[pl.ds(0, group)], q_loaded.at[stream])
            plgpu.barrier_wait(q_loaded.at[stream])
            q_smem[stream] = load_rows(own)
            plgpu.commit_smem()

            def attend(i, carry, *, is_masked):
                acc, row_max, row_sum = carry
                slot = slot_of(ring + i)
                plgpu.barrier_wait(k_loaded.at[slot])
                scores = matmul(q_smem.at[stream], k_smem.at[slot].T, (ROWS, tile))
                plgpu.barrier_arrive(k_free.at[slot])
                if soft_cap is None:
                    scores *= scale * LOG2E
                else:
                    scores = jnp.tanh(scores * (scale / soft_cap)) * (soft_cap * LOG2E)
                key = (first_tile + i) * tile
                if is_masked:
                    column = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=MATRIX) + key
                    seen = column < seq_len
                    if window is not None:
                        seen &= column >= seq_len - window
                    scores = jnp.where(seen, scores, MASKED)
                new_max = jnp.maximum(row_max, scores.max(axis=1))
                rescale = jnp.exp2(row_max - new_max)
                p = jnp.exp2(scores - lax.broadcast_in_dim(new_max, scores.shape, [0]))
                row_sum = row_sum * rescale + p.sum(axis=1)
                acc = acc * lax.broadcast_in_dim(rescale, acc.shape, [0])
                plgpu.barrier_wait(v_loaded.at[slot])
                if is_masked:  # a weight of 0 times what an unwritten slot holds may be NaN
                    values = plgpu.load(v_smem.at[slot], layout=MATRIX)
                    line = plgpu.broadcasted_iota(jnp.int32, values.shape, 0, layout=MATRIX) + key
                    v_smem[slot] = jnp.where(line < seq_len, values, jnp.zeros_like(values))
                    plgpu.commit_smem()
                acc = accumulate(acc, p.astype(q.dtype), v_smem.at[slot], None if p_smem is None else p_smem.at[stream])
                plgpu.barrier_arrive(v_free.at[slot])
                return acc, new_max, row_sum

            zeros = plgpu.layout_cast(jnp.zeros((ROWS, head_dim), jnp.float32), MATRIX)
            start_max = plgpu.layout_cast(jnp.full((ROWS,), MASKED, jnp.float32), PER_ROW)
            start_sum = plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), PER_ROW)
            carry = zeros, start_max, start_sum
            num_full = 0  # tiles without a hidden key; with a window all count as having some
            if window is None:
                num_full = jnp.clip(lax.div(seq_len, jnp.int32(tile)) - first_tile, 0, count)
                carry = lax.fori_loop(0, num_full, partial(attend, is_masked=False), carry)
            carry = lax.fori_loop(num_full, count, partial(attend, is_masked=True), carry)
            acc, row_max, row_sum = carry

            is_whole = (first == 0) & (count == rows[row, work.NUM_TILES])

            @pl.when(is_whole)
            def write_output():
                total, shift = row_sum, jnp.ones_like(row_sum)
                if has_sinks:
                    sink = plgpu.load(sinks.at[head], layout=PER_ROW, optimized=False)
                    maximum = jnp.maximum(row_max, sink)
                    shift = jnp.exp2(row_max - maximum)
                    total = row_sum * shift + jnp.exp2(sink - maximum)
                own[...] = (acc * lax.broadcast_in_dim(shift / total, acc.shape, [0])).astype(q.dtype)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(own.at[pl.ds(0, group)], out.at[token, heads])
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)

            @pl.when(jnp.logical_not(is_whole))
            def write_part():
                end_of_share = jnp.where(position == begin, 0, 1)
                lse = row_max + jnp.log2(row_sum)
                for value, target in (
                    (acc / lax.broadcast_in_dim(row_sum, acc.shape, [0]), part),
                    (lax.broadcast_in_dim(lse, acc.shape, [0]), part_lse),
                ):
                    own32[...] = value
                    plgpu.commit_smem()
                    plgpu.copy_smem_to_gmem(own32.at[pl.ds(0, part.shape[2])], target.at[end_of_share, worker])
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        walk(segment)
        plgpu.wait_smem_to_gmem(0)


def _write_zeros(is_dead, staging, out, worker, num_workers):
    """Zero the output of dead tokens, each worker every W-th token."""
    num_tokens, num_heads = is_dead.shape[0], out.shape[1]
    staging[...] = plgpu.layout_cast(jnp.zeros(staging.shape, out.dtype), MATRIX)
    plgpu.commit_smem()

    @pl.loop(0, -(-num_tokens // num_workers))
    def zero(i):
        token = i * num_workers + worker

        @pl.when(token < num_tokens)
        def check():
            @pl.when(is_dead[token] != 0)
            def write():
                for first in range(0, num_heads, ROWS):
                    count = min(ROWS, num_heads - first)
                    plgpu.copy_smem_to_gmem(staging.at[pl.ds(0, count)], out.at[token, pl.ds(first, count)])

    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
