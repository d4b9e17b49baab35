"""Attention of prompt chunks for Hopper in Mosaic GPU: many query tokens a request, keys read through the block table.

A program holds one tile of query tokens of one request, all query heads of one KV head beside each other, so that they
share what is loaded: row g * tile_tokens + t is head g of token t. One warpgroup loads; the others hold 64 rows each
and take turns on the tensor cores, one multiplying while another does its softmax (Shah et al., arXiv:2407.08608).
Only tiles of keys on the diagonal, at the end of the sequence or at the window's edge are masked.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Float, Int

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
from pallas_kernels.paged_attention.tuning import PrefillTuning


def make_query_tiles(
    query_start_loc: Int[Array, " C"],
    seq_lens: Int[Array, " B"],
    is_taken: Bool[Array, " B"],
    *,
    num_tokens: int,
    tile_tokens: int,
) -> Int[Array, "J 5"]:
    """Cut the requests where `is_taken` into tiles of query tokens, and the padding after the last query.

    Each tile is (request, first token, its position, number of tokens, seq_len), the costliest of a request first. A
    tile of padding has seq_len 0; what is left over has no tokens.
    """
    num_requests = len(seq_lens)
    starts, query_lens = query_start_loc[:-1], query_start_loc[1:] - query_start_loc[:-1]
    starts = jnp.append(starts, query_start_loc[-1])
    query_lens = jnp.append(jnp.where(is_taken, query_lens, 0), num_tokens - query_start_loc[-1])
    lens = jnp.append(seq_lens, 0)
    num_tiles = -(-query_lens // tile_tokens)
    ends = jnp.cumsum(num_tiles, dtype=jnp.int32)
    tile = jnp.arange(num_query_tiles(num_tokens, num_requests, tile_tokens), dtype=jnp.int32)
    request = jnp.minimum(jnp.sum(ends[None, :] <= tile[:, None], axis=1, dtype=jnp.int32), num_requests)
    offset = (ends[request] - 1 - tile) * tile_tokens  # from the last tile of a request to its first
    count = jnp.where(tile < ends[-1], jnp.minimum(query_lens[request] - offset, tile_tokens), 0)
    position = lens[request] - query_lens[request] + offset
    columns = [jnp.minimum(request, num_requests - 1), starts[request] + offset, position, count, lens[request]]
    return jnp.stack(columns, axis=1).astype(jnp.int32)


def num_query_tiles(num_tokens: int, num_requests: int, tile_tokens: int) -> int:
    """Most tiles that any batch of these sizes is cut into."""
    return min(num_tokens, num_tokens // tile_tokens + num_requests + 1)


def prefill(
    q: Float[Array, "T N H"],
    k_pool: Float[Array, "P K S H"],
    v_pool: Float[Array, "P K S H"],
    block_tables: Int[Array, "B M"],
    tiles: Int[Array, "J 5"],
    sinks: Float[Array, "K _"] | None,
    out: Float[Array, "T N H"],
    *,
    tile_tokens: int,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    tuning: PrefillTuning,
) -> Float[Array, "T N H"]:
    """Attend from the tokens of the tiles. Other tokens keep what `out` has; it is updated in place."""
    head_dim = q.shape[2]
    _, num_kv_heads, block_size, _ = k_pool.shape
    group, stages, kv_tile, dtype = q.shape[1] // num_kv_heads, tuning.stages, tuning.kv_tile, q.dtype
    num_rows, interpret = tuning.warpgroups * ROWS, interpretation()
    loaded = plgpu.Barrier(num_arrivals=kv_tile // block_size, num_barriers=stages)
    free = plgpu.Barrier(num_arrivals=tuning.warpgroups, num_barriers=stages)
    all_compute = plgpu.Barrier(num_arrivals=tuning.warpgroups)
    scratch = {
        "staging": plgpu.SMEM((num_rows, head_dim), dtype),
        "q_smem": wgmma_smem((num_rows, head_dim), dtype),
        "k_smem": wgmma_smem((stages, kv_tile, head_dim), dtype),
        "v_smem": wgmma_smem((stages, kv_tile, head_dim), dtype),
        "q_loaded": plgpu.Barrier(num_arrivals=group),
        "k_loaded": loaded, "v_loaded": loaded, "k_free": free, "v_free": free,
        "turn": all_compute, "together": all_compute,
    }  # fmt: skip
    if interpret is not None:
        scratch["p_smem"] = wgmma_smem((num_rows, kv_tile), dtype)
    kernel = plgpu.kernel(
        partial(
            _kernel, group=group, block_size=block_size, tile_tokens=tile_tokens, tuning=tuning,
            scale=scale, window=window, soft_cap=soft_cap, has_sinks=sinks is not None,
        ),
        out_type=(),
        scratch_types=scratch,
        grid=(len(tiles) * num_kv_heads,),
        grid_names=("program",),
        num_threads=tuning.warpgroups + 1,
        thread_name="warpgroup",
        kernel_name="paged_prefill",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        interpret=interpret,
    )  # fmt: skip
    if sinks is None:
        sinks = jnp.zeros((1, num_rows), jnp.float32)
    target = jax.new_ref(out)
    kernel(tiles, block_tables, sinks, q, k_pool, v_pool, target)
    return jax.freeze(target)


def _kernel(
    # scalars, in GMEM
    tiles,  # [J, 5] int32
    block_tables,  # [B, M] int32
    # inputs, in GMEM
    sinks,  # [K, rows] float32, base 2
    q,  # [T, N, H]
    k,  # [P, K, S, H]
    v,  # [P, K, S, H]
    # output, in GMEM
    out,  # [T, N, H]
    *,
    # scratch; rows are those of all compute warpgroups
    staging,  # [rows, H], rows as in GMEM
    q_smem,  # [rows, H]
    k_smem,  # [stages, kv_tile, H]
    v_smem,  # [stages, kv_tile, H]
    q_loaded, k_loaded, v_loaded,  # TMA -> compute
    k_free, v_free,  # compute -> load
    turn,  # between the compute warpgroups: who has the tensor cores
    together,  # all of them have come this far
    p_smem=None,  # [rows, kv_tile], interpret mode only
    # static
    group, block_size, tile_tokens, tuning, scale, window, soft_cap, has_sinks,
):  # fmt: skip
    kv_tile, stages, warpgroups = tuning.kv_tile, tuning.stages, tuning.warpgroups
    num_tokens, _, head_dim = q.shape
    warpgroup, program = lax.axis_index("warpgroup"), lax.axis_index("program")
    tile, head = lax.rem(program, jnp.int32(tiles.shape[0])), lax.div(program, jnp.int32(tiles.shape[0]))
    request, token, position, count, seq_len = (tiles[tile, column] for column in range(5))
    is_padding = seq_len == 0

    # Tiles of keys [begin, end); those of [full_begin, full_end) hide nothing from any query token.
    last = position + count - 1
    begin = jnp.int32(0) if window is None else lax.div(jnp.maximum(position - window + 1, 0), jnp.int32(kv_tile))
    end = jnp.where(is_padding, begin, lax.div(last + kv_tile, jnp.int32(kv_tile)))
    full_end = jnp.clip(lax.div(position + 1, jnp.int32(kv_tile)), begin, end)
    if window is None:
        full_begin = begin
    else:
        full_begin = jnp.clip(lax.div(jnp.maximum(last - window, -1) + kv_tile, jnp.int32(kv_tile)), begin, full_end)

    @pl.when((count > 0) & (warpgroup == warpgroups))
    def load():
        plgpu.set_max_registers(40, action="decrease")
        last_column = block_tables.shape[1] - 1
        first = jnp.minimum(token, num_tokens - tile_tokens)  # never past the end of q
        for g in range(group):
            rows = staging.at[pl.ds(g * tile_tokens, tile_tokens)]
            plgpu.copy_gmem_to_smem(q.at[pl.ds(first, tile_tokens), head * group + g], rows, q_loaded)

        @pl.loop(begin, end)
        def fetch(i):
            slot = lax.rem(i - begin, jnp.int32(stages))
            column = i * (kv_tile // block_size)
            blocks = [block_tables[request, jnp.minimum(column + j, last_column)] for j in range(kv_tile // block_size)]
            for pool, smem, arrived, released in ((k, k_smem, k_loaded, k_free), (v, v_smem, v_loaded, v_free)):
                plgpu.barrier_wait(released.at[slot])
                for j, block in enumerate(blocks):
                    target = smem.at[slot, pl.ds(j * block_size, block_size)]
                    plgpu.copy_gmem_to_smem(pool.at[block, head], target, arrived.at[slot])

        @pl.loop(0, stages)
        def drain(i):  # who waits on a barrier must see all its completions
            plgpu.barrier_wait(k_free.at[i])
            plgpu.barrier_wait(v_free.at[i])

    @pl.when((count > 0) & (warpgroup < warpgroups))
    def compute():
        plgpu.set_max_registers(232, action="increase")  # 2 * 232 + 40 of the 512 that three may have
        own = pl.ds(warpgroup * ROWS, ROWS)

        def meet(barrier):
            if warpgroups > 1:
                plgpu.barrier_arrive(barrier)
                plgpu.barrier_wait(barrier)

        @pl.loop(0, stages)
        def release(i):
            plgpu.barrier_arrive(k_free.at[i])
            plgpu.barrier_arrive(v_free.at[i])

        plgpu.barrier_wait(q_loaded)
        q_smem[own] = load_rows(staging.at[own])
        plgpu.commit_smem()
        pl.when(warpgroup == 1)(lambda: meet(turn))
        shift = token - jnp.minimum(token, num_tokens - tile_tokens)  # rows that a tile at the end of q has before it

        def attend(i, carry, *, is_masked):
            acc, row_max, row_sum = carry
            slot = lax.rem(i - begin, jnp.int32(stages))
            plgpu.barrier_wait(k_loaded.at[slot])
            scores = matmul(q_smem.at[own], k_smem.at[slot].T, (ROWS, kv_tile), lambda: meet(turn))
            plgpu.barrier_arrive(k_free.at[slot])
            if soft_cap is None:
                scores *= scale * LOG2E
            else:
                scores = jnp.tanh(scores * (scale / soft_cap)) * (soft_cap * LOG2E)
            if is_masked:
                key = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=MATRIX) + i * kv_tile
                row = plgpu.broadcasted_iota(jnp.int32, scores.shape, 0, layout=MATRIX) + warpgroup * ROWS
                query = lax.rem(row, jnp.full_like(row, tile_tokens)) + (position - shift)
                seen = key <= query
                if window is not None:
                    seen &= key > query - window
                scores = jnp.where(seen, scores, MASKED)
            new_max = jnp.maximum(row_max, scores.max(axis=1))
            rescale = jnp.exp2(row_max - new_max)
            p = jnp.exp2(scores - lax.broadcast_in_dim(new_max, scores.shape, [0]))
            acc = acc * lax.broadcast_in_dim(rescale, acc.shape, [0])
            row_sum = row_sum * rescale + p.sum(axis=1)
            p = p.astype(q.dtype)
            acc, row_sum, new_max, p = lax.optimization_barrier((acc, row_sum, new_max, p))
            if warpgroups > 1:
                plgpu.barrier_arrive(turn)  # the softmax is done
            plgpu.barrier_wait(v_loaded.at[slot])
            if is_masked:
                _clean(v_smem, slot, i * kv_tile, seq_len, warpgroup, warpgroups, partial(meet, together))
            if warpgroups > 1:
                plgpu.barrier_wait(turn)  # the tensor cores are free
            acc = accumulate(acc, p, v_smem.at[slot], None if p_smem is None else p_smem.at[own])
            plgpu.barrier_arrive(v_free.at[slot])
            return acc, new_max, row_sum

        carry = (
            plgpu.layout_cast(jnp.zeros((ROWS, head_dim), jnp.float32), MATRIX),
            plgpu.layout_cast(jnp.full((ROWS,), MASKED, jnp.float32), PER_ROW),
            plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), PER_ROW),
        )
        if window is not None:
            carry = lax.fori_loop(begin, full_begin, partial(attend, is_masked=True), carry)
        carry = lax.fori_loop(full_begin, full_end, partial(attend, is_masked=False), carry)
        acc, row_max, row_sum = lax.fori_loop(full_end, end, partial(attend, is_masked=True), carry)
        pl.when(warpgroup == 0)(lambda: meet(turn))

        factor = jnp.ones_like(row_sum)
        if has_sinks:
            sink = plgpu.load(sinks.at[head, own], layout=PER_ROW, optimized=False)
            maximum = jnp.maximum(row_max, sink)
            factor = jnp.exp2(row_max - maximum)
            row_sum = row_sum * factor + jnp.exp2(sink - maximum)
        factor /= jnp.maximum(row_sum, 1e-30)  # padding: 0 / tiny is 0
        staging[own] = (acc * lax.broadcast_in_dim(factor, acc.shape, [0])).astype(q.dtype)
        plgpu.commit_smem()
        meet(together)
        pl.when(warpgroup == 0)(lambda: _write(staging, out, head, token, shift, count, group, tile_tokens))


def _clean(v_smem, slot, key, seq_len, warpgroup, warpgroups, meet):
    """Zero the values past the sequence: a weight of 0 times what an unwritten slot holds may be NaN."""
    kv_tile = v_smem.shape[1]

    @pl.when(key + kv_tile > seq_len)
    def clean():
        for first in range(0, kv_tile, ROWS):
            part = pl.ds(first, ROWS)

            @pl.when(lax.rem(jnp.int32(first // ROWS), jnp.int32(warpgroups)) == warpgroup)
            def one(first=first, part=part):
                values = plgpu.load(v_smem.at[slot, part], layout=MATRIX)
                line = plgpu.broadcasted_iota(jnp.int32, values.shape, 0, layout=MATRIX) + (key + first)
                v_smem[slot, part] = jnp.where(line < seq_len, values, jnp.zeros_like(values))

        plgpu.commit_smem()
        meet()


def _write(staging, out, head, token, shift, count, group, tile_tokens):
    """Write the first `count` tokens of every head, in pieces of powers of two, because a copy's size is static."""

    @pl.when(count == tile_tokens)
    def whole():
        for g in range(group):
            rows = staging.at[pl.ds(g * tile_tokens, tile_tokens)]
            plgpu.copy_smem_to_gmem(rows, out.at[pl.ds(token, tile_tokens), head * group + g])

    @pl.when(count < tile_tokens)
    def tail():
        size = 1 << (tile_tokens.bit_length() - 1)
        while size:
            offset = count & ~(2 * size - 1)  # what the larger pieces covered

            @pl.when((count & size) != 0)
            def piece(size=size, offset=offset):
                for g in range(group):
                    rows = staging.at[pl.ds(g * tile_tokens + shift + offset, size)]
                    plgpu.copy_smem_to_gmem(rows, out.at[pl.ds(token + offset, size), head * group + g])

            size //= 2

    plgpu.wait_smem_to_gmem(0)
