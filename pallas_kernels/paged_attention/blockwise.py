"""Paged attention in plain jnp: an online softmax over chunks of blocks. For CPUs, and GPUs without a kernel here.

Work is done in groups of equal shape: R rows of Q query tokens, each row of one request. The loop over a group's chunks
ends at the longest sequence in it, and only groups with live tokens run, so cost follows the tokens present, never the
width of the block table nor padding. Chunks start at the same positions whatever else is in the batch, so a request's
sums are taken in the same order alone, batched, chunked or decoding. JAX has no reverse-mode gradient of such a loop:
that needs backend="reference".
"""

from collections.abc import Callable
from functools import partial

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.paged_attention.tuning import tiling

FEW = 8  # query vectors of one KV head up to which XLA's CPU matmul, in large batches, loses to multiply and sum
MASKED = -1e30  # finite, so that a row with no key in a chunk keeps a finite maximum

# Attend from q at positions (-1 is dead) of the given requests: [R, Q, N, H].
Attend = Callable[[Float[Array, "R Q N H"], Int[Array, " R"], Int[Array, "R Q"]], Float[Array, "R Q N H"]]


def blockwise_attention(
    q: Float[Array, "T N H"],
    k_pool: Float[Array, "P K S H"],
    v_pool: Float[Array, "P K S H"],
    block_tables: Int[Array, "B M"],
    query_start_loc: Int[Array, " B+1"],
    seq_lens: Int[Array, " B"],
    sinks: Float[Array, " N"] | None,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> Float[Array, "T N H"]:
    """Compute `paged_attention` without ever holding the scores or the gathered keys of more than a group's chunk.

    A batch with as many tokens as requests is taken to be decoding: every token is a row of its own, which is right for
    any batch and fast where a request has one token. Otherwise requests with one token are such rows, and those with
    more are cut into tiles.
    """
    num_tokens, num_requests = q.shape[0], seq_lens.shape[0]
    attend = partial(
        _attend, k_pool=k_pool, v_pool=v_pool, block_tables=block_tables, sinks=sinks,
        scale=scale, window=window, soft_cap=soft_cap,
    )  # fmt: skip
    request, position = locate_tokens(num_tokens, query_start_loc, seq_lens)
    if num_tokens == num_requests:
        return _attend_rows(attend, q, request, position)
    is_single = query_start_loc[1:] - query_start_loc[:-1] == 1
    rows = _attend_rows(
        attend,
        q.at[query_start_loc[:-1]].get(mode="clip"),
        jnp.arange(num_requests, dtype=jnp.int32),
        jnp.where(is_single, seq_lens - 1, -1),
    )  # [B, N, H]
    tiles = _attend_tiles(attend, q, query_start_loc, seq_lens)  # [T, N, H]
    from_row = (is_single[request] & (position >= 0))[:, None, None]
    return jnp.where(from_row, rows[request], tiles)


def locate_tokens(
    num_tokens: int, query_start_loc: Int[Array, " C"], seq_lens: Int[Array, " B"]
) -> tuple[Int[Array, " T"], Int[Array, " T"]]:
    """Return request and position of each token; a padding token gets the last request and position -1."""
    tokens = jnp.arange(num_tokens, dtype=jnp.int32)
    request = jnp.sum(query_start_loc[None, 1:] <= tokens[:, None], axis=1, dtype=jnp.int32)
    request = jnp.minimum(request, len(seq_lens) - 1)
    position = seq_lens[request] - query_start_loc[request + 1] + tokens
    return request, jnp.where(tokens < query_start_loc[-1], position, -1)


def _attend_rows(
    attend: Attend, q: Float[Array, "U N H"], request: Int[Array, " U"], position: Int[Array, " U"]
) -> Float[Array, "U N H"]:
    """Attend from single tokens, a group at a time, longest first, so that groups are even and dead rows come last."""
    num_rows, group_size = q.shape[0], tiling().rows
    if num_rows <= group_size:
        return attend(q[:, None], request, position[:, None])[:, 0]
    order = jnp.argsort(position, descending=True).astype(jnp.int32)
    padding = (0, -num_rows % group_size)
    row = jnp.pad(order, padding)
    row_position = jnp.pad(position[order], padding, constant_values=-1)

    def attend_group(i: Int[Array, ""], out: Float[Array, "W N H"]) -> Float[Array, "W N H"]:
        ids = lax.dynamic_slice_in_dim(row, i * group_size, group_size)
        positions = lax.dynamic_slice_in_dim(row_position, i * group_size, group_size)
        group = attend(q[ids][:, None], request[ids], positions[:, None])[:, 0]  # [group_size, N, H]
        return lax.dynamic_update_slice_in_dim(out, group, i * group_size, axis=0)

    num_groups = -(-jnp.sum(position >= 0, dtype=jnp.int32) // group_size)
    out = lax.fori_loop(jnp.int32(0), num_groups, attend_group, jnp.zeros((len(row), *q.shape[1:]), q.dtype))
    return out[jnp.argsort(order)]


def _attend_tiles(
    attend: Attend, q: Float[Array, "T N H"], query_start_loc: Int[Array, " C"], seq_lens: Int[Array, " B"]
) -> Float[Array, "T N H"]:
    """Attend from the tokens of requests that have several, a tile at a time; zeros elsewhere.

    Tiles go up in token order: what spills past a request's end is zeros, or is overwritten by the next one's tile.
    """
    tile_size = tiling().queries
    query_lens = query_start_loc[1:] - query_start_loc[:-1]
    num_tiles = jnp.where(query_lens > 1, -(-query_lens // tile_size), 0)
    tile_ends = jnp.cumsum(num_tiles, dtype=jnp.int32)
    offsets = jnp.arange(tile_size, dtype=jnp.int32)

    def attend_tile(i: Int[Array, ""], out: Float[Array, "W N H"]) -> Float[Array, "W N H"]:
        request = jnp.sum(tile_ends <= i, dtype=jnp.int32)
        offset = (i - tile_ends[request] + num_tiles[request]) * tile_size  # of the tile in the request's tokens
        first = query_start_loc[request] + offset
        position = seq_lens[request] - query_lens[request] + offset + offsets
        position = jnp.where(offset + offsets < query_lens[request], position, -1)
        tile = attend(q.at[first + offsets].get(mode="clip")[None], request[None], position[None])[0]
        return lax.dynamic_update_slice_in_dim(out, tile, first, axis=0)

    out = jnp.zeros((q.shape[0] + tile_size, *q.shape[1:]), q.dtype)
    return lax.fori_loop(jnp.int32(0), tile_ends[-1], attend_tile, out)[: q.shape[0]]


def _attend(
    q: Float[Array, "R Q N H"],
    request: Int[Array, " R"],
    position: Int[Array, "R Q"],
    *,
    k_pool: Float[Array, "P K S H"],
    v_pool: Float[Array, "P K S H"],
    block_tables: Int[Array, "B M"],
    sinks: Float[Array, " N"] | None,
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> Float[Array, "R Q N H"]:
    """Online softmax (Milakov and Gimelshein, arXiv:1805.02867) of one group over its chunks, in float32.

    The query tokens and the query heads of one KV head fold into one axis X = Q * G.
    """
    num_rows, num_queries, num_heads, head_dim = q.shape
    _, num_kv_heads, block_size, _ = k_pool.shape
    group = num_heads // num_kv_heads
    queries = q.reshape(num_rows, num_queries, num_kv_heads, group, head_dim).swapaxes(1, 2)
    queries = queries.reshape(num_rows, num_kv_heads, -1, head_dim).astype(k_pool.dtype)  # [R, K, X, H]
    query_position = jnp.repeat(position, group, axis=1)  # [R, X]
    blocks_per_chunk = max(tiling().chunk_tokens // block_size, 1)
    chunk_size = blocks_per_chunk * block_size
    first, last = _keys_used(position, window)

    def attend_chunk(i: Int[Array, ""], state: tuple) -> tuple:
        column = i * blocks_per_chunk + jnp.arange(blocks_per_chunk, dtype=jnp.int32)
        blocks = block_tables.at[request[:, None], column[None, :]].get(mode="clip")  # [R, blocks_per_chunk]
        key = (i * chunk_size + jnp.arange(chunk_size, dtype=jnp.int32))[None]
        used = (key >= first[:, None]) & (key <= last[:, None])
        v = jnp.where(used[:, None, :, None], _read(v_pool, blocks), 0)  # a weight of 0 times inf would be NaN
        seen = key[None] <= query_position[..., None]  # [R, X, C]
        if window is not None:
            seen &= key[None] > query_position[..., None] - window
        return _accumulate(state, queries, _read(k_pool, blocks), v, seen[:, None], scale=scale, soft_cap=soft_cap)

    shape = (num_rows, num_kv_heads, num_queries * group)
    state = (*_initial(shape, sinks), jnp.zeros((*shape, head_dim), jnp.float32))
    start, stop = jnp.min(first) // chunk_size, (jnp.max(last) + chunk_size) // chunk_size
    _, total, out = lax.fori_loop(start, stop, attend_chunk, state)
    out = jnp.where((query_position >= 0)[:, None, :, None], out / total[..., None], 0)
    out = out.reshape(num_rows, num_kv_heads, num_queries, group, head_dim).swapaxes(1, 2)
    return out.reshape(q.shape).astype(q.dtype)


def _keys_used(position: Int[Array, "R Q"], window: int | None) -> tuple[Int[Array, " R"], Int[Array, " R"]]:
    """First and last key position that any query of a row sees; the last is -1 in a dead row."""
    last = jnp.max(position, axis=1)
    if window is None:
        return jnp.zeros_like(last), last
    first = jnp.min(jnp.where(position < 0, jnp.iinfo(jnp.int32).max, position - window + 1), axis=1)
    return jnp.maximum(first, 0), last


def _initial(
    shape: tuple[int, int, int], sinks: Float[Array, " N"] | None
) -> tuple[Float[Array, "R K X"], Float[Array, "R K X"]]:
    """Maximum and total of the softmax before any key: a sink counts as a key without a value."""
    if sinks is None:
        return jnp.full(shape, MASKED, jnp.float32), jnp.zeros(shape, jnp.float32)
    _, num_kv_heads, num_queries = shape
    sink = sinks.astype(jnp.float32).reshape(num_kv_heads, -1)  # [K, G]
    sink = jnp.tile(sink, (1, num_queries // sink.shape[1]))  # [K, X]
    return jnp.broadcast_to(sink[None], shape), jnp.ones(shape, jnp.float32)


def _read(pool: Float[Array, "P K S H"], blocks: Int[Array, "R C"]) -> Float[Array, "R K D H"]:
    """The cached vectors in the given blocks, KV head first: a row gather, which XLA does at memory speed on a CPU."""
    num_blocks, num_kv_heads, _, head_dim = pool.shape
    head = jnp.arange(num_kv_heads, dtype=jnp.int32)
    index = jnp.clip(blocks, 0, num_blocks - 1)[:, None, :] * num_kv_heads + head[None, :, None]  # [R, K, blocks]
    rows = pool.reshape(num_blocks * num_kv_heads, -1).at[index].get(mode="promise_in_bounds")
    return rows.reshape(len(blocks), num_kv_heads, -1, head_dim)


def _accumulate(
    state: tuple,
    q: Float[Array, "R K X H"],
    k: Float[Array, "R K C H"],
    v: Float[Array, "R K C H"],
    seen: Bool[Array, "R 1 X C"],
    *,
    scale: float,
    soft_cap: float | None,
) -> tuple:
    """Fold one chunk into (maximum [R, K, X], total [R, K, X], weighted sum of values [R, K, X, H]).

    Until a query has seen a key its maximum is MASKED and its sums are finite nonsense; its first key decays them to 0.
    """
    maximum, total, out = state
    scores = scale * _scores(q, k)
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    scores = jnp.where(seen, scores, MASKED)
    new_maximum = jnp.maximum(maximum, jnp.max(scores, axis=-1))
    weights = jnp.exp(scores - new_maximum[..., None])
    decay = jnp.exp(maximum - new_maximum)
    total = total * decay + jnp.sum(weights, axis=-1)
    out = out * decay[..., None] + _weighted_sum(weights, v)
    return new_maximum, total, out


def _scores(q: Float[Array, "R K X H"], k: Float[Array, "R K C H"]) -> Float[Array, "R K X C"]:
    if _is_few(q):
        return jnp.sum(q[:, :, :, None] * k[:, :, None], axis=-1)
    return jnp.einsum("rkxh,rkch->rkxc", q, k, precision=_precision(k), preferred_element_type=jnp.float32)


def _weighted_sum(weights: Float[Array, "R K X C"], v: Float[Array, "R K C H"]) -> Float[Array, "R K X H"]:
    weights = weights.astype(v.dtype)
    if _is_few(weights):
        return jnp.sum(weights[..., None] * v[:, :, None], axis=3)
    return jnp.einsum("rkxc,rkch->rkxh", weights, v, precision=_precision(v), preferred_element_type=jnp.float32)


def _is_few(x: Float[Array, "R K X J"]) -> bool:
    return x.dtype == jnp.float32 and x.shape[2] <= FEW


def _precision(x: Float[Array, "R K C H"]) -> lax.Precision | None:
    return lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
