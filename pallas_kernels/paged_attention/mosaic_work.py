"""The work list of the Mosaic decode kernel: equal, contiguous shares of all key tiles for persistent workers.

    rows      u0             u1       u2                 a row is one query with its visible keys, cut into tiles
    heads     h0   h1   h2   h0 h1 h2 h0  h1  h2         each row once a KV head: a pair
    tiles     |----|----|----|--|--|--|---|---|---|
    workers   |  w0   |  w1   |  w2   |  w3   |  w4      a pair that a border cuts is merged afterwards

Computed inside the step from the device's own lengths; the same for all layers with one window, so that XLA keeps one.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

# Columns of WorkList.rows
NUM_TILES, FIRST_TILE, SEQ_LEN, TOKEN, REQUEST, NEXT_ROW, START = range(7)
# Columns of WorkList.workers
ROW, BEGIN, END, NUM_SEGMENTS = range(4)


class WorkList(NamedTuple):
    """Int32 tables that the kernel reads as scalars.

    rows: [U, 8]. Tiles of keys, the first tile with a visible key, number of keys up to the query's own, query token,
      row of the block table, next row that has tiles, and the position of its first tile in the order of all.
    workers: [W, 4]. First row, half-open range of tile positions, and how many pairs that range touches.
    """

    rows: Int[Array, "U 8"]
    workers: Int[Array, "W 4"]


def make_work_list(
    seq_lens: Int[Array, " U"],
    token: Int[Array, " U"],
    request: Int[Array, " U"],
    *,
    num_kv_heads: int,
    tile: int,
    window: int | None,
    num_workers: int,
    min_tiles: int,
) -> WorkList:
    """Share the tiles out. A row with seq_len 0 has none; a share is never below `min_tiles`."""
    num_rows = len(seq_lens)
    first = jnp.zeros_like(seq_lens) if window is None else jnp.maximum(seq_lens - window, 0) // tile
    num_tiles = -(-seq_lens // tile) - first
    ends = jnp.cumsum(num_tiles, dtype=jnp.int32) * num_kv_heads
    starts = ends - num_tiles * num_kv_heads
    index = jnp.arange(num_rows, dtype=jnp.int32)
    live = jnp.where(num_tiles > 0, index, num_rows)
    following = jnp.append(live[1:], num_rows).astype(jnp.int32)
    next_row = jnp.minimum(lax.cummin(following, reverse=True), num_rows - 1)
    rows = jnp.stack([num_tiles, first, seq_lens, token, request, next_row, starts, jnp.zeros_like(starts)], axis=1)

    total = ends[-1]
    share = jnp.maximum(-(-total // num_workers), min_tiles)
    begin = jnp.minimum(jnp.arange(num_workers, dtype=jnp.int32) * share, total)
    end = jnp.minimum(begin + share, total)
    first_row, first_pair = _locate(begin, ends, starts, num_tiles, num_kv_heads)
    _, last_pair = _locate(jnp.maximum(end - 1, 0), ends, starts, num_tiles, num_kv_heads)
    num_segments = jnp.where(end > begin, last_pair - first_pair + 1, 0)
    return WorkList(rows, jnp.stack([first_row, begin, end, num_segments], axis=1))


def _locate(
    position: Int[Array, " W"],
    ends: Int[Array, " U"],
    starts: Int[Array, " U"],
    num_tiles: Int[Array, " U"],
    num_kv_heads: int,
) -> tuple[Int[Array, " W"], Int[Array, " W"]]:
    """Row that holds each tile position, and the number of the pair among the pairs of rows that have tiles."""
    row = jnp.sum(ends[None, :] <= position[:, None], axis=1, dtype=jnp.int32)
    row = jnp.minimum(row, len(ends) - 1)
    rank = jnp.cumsum(num_tiles > 0, dtype=jnp.int32) - 1
    head = (position - starts[row]) // jnp.maximum(num_tiles[row], 1)
    return row, rank[row] * num_kv_heads + head
