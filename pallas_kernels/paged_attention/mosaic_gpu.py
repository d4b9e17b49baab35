"""Paged attention on Hopper GPUs: decides which tokens the decode kernel takes and which the prefill kernel.

as many tokens as requests   every token is a row of its own for the decode kernel: right for any batch
more                         requests of up to SHORT tokens, which decode or verify drafts, go to the decode kernel,
                             still token by token; the others to the prefill kernel, which writes into the same output

A request's own tokens read the same keys at about the same time, mostly out of the L2 cache; and the decode kernel
spreads a long context over the chip, where the prefill kernel would walk it in one program.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.hopper import DTYPES, LOG2E, ROWS
from pallas_kernels.paged_attention.blockwise import locate_tokens
from pallas_kernels.paged_attention.mosaic_decode import decode_parts
from pallas_kernels.paged_attention.mosaic_merge import merge_parts
from pallas_kernels.paged_attention.mosaic_prefill import make_query_tiles, prefill
from pallas_kernels.paged_attention.mosaic_work import make_work_list
from pallas_kernels.paged_attention.tuning import DECODE, PREFILL

BLOCK_SIZES = (16, 32, 64)
SHORT = 8

Pool = Float[Array, "P K S H"]


def unsupported(q: Any, k_pool: Any) -> str | None:
    """Say what the kernels lack for these arrays, or None."""
    _, num_heads, head_dim = q.shape
    _, num_kv_heads, block_size, _ = k_pool.shape
    if q.dtype not in DTYPES or k_pool.dtype != q.dtype:
        return f"q is {q.dtype} and the pool {k_pool.dtype}; built are bfloat16 and float16, the same for both"
    if head_dim not in DECODE:
        return f"head_dim is {head_dim}; built are {', '.join(map(str, DECODE))}"
    if block_size not in BLOCK_SIZES:
        return f"block_size is {block_size}; built are {', '.join(map(str, BLOCK_SIZES))}"
    if num_heads // num_kv_heads > ROWS:
        return f"{num_heads // num_kv_heads} query heads share a KV head; built are up to {ROWS}"
    return None


def mosaic_attention(
    q: Float[Array, "T N H"],
    k_pool: Pool,
    v_pool: Pool,
    block_tables: Int[Array, "B M"],
    query_start_loc: Int[Array, " B+1"],
    seq_lens: Int[Array, " B"],
    sinks: Float[Array, " N"] | None,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> Float[Array, "T N H"]:
    """Compute `paged_attention`. On a CPU the kernels are interpreted: for tests.

    Raises NotImplementedError for what `unsupported` names.
    """
    if (reason := unsupported(q, k_pool)) is not None:
        raise NotImplementedError(f"the mosaic_gpu backend of paged_attention: {reason}")
    num_tokens, num_requests = len(q), len(seq_lens)
    head_sinks = None if sinks is None else LOG2E * sinks.astype(jnp.float32).reshape(k_pool.shape[1], -1)  # [K, G]
    options = {"scale": scale, "window": window, "soft_cap": soft_cap}
    if num_tokens <= num_requests:
        token = jnp.arange(num_tokens, dtype=jnp.int32)
        request, position = locate_tokens(num_tokens, query_start_loc, seq_lens)
        rows = (position + 1, token, request, (position < 0).astype(jnp.int32))
        return _decode(q, k_pool, v_pool, block_tables, rows, head_sinks, **options)

    query_lens = query_start_loc[1:] - query_start_loc[:-1]
    is_short = (query_lens <= SHORT) & (seq_lens > 0)
    rows = (*_rows_of(is_short, query_start_loc, seq_lens, num_tokens), jnp.zeros(1, jnp.int32))
    out = _decode(q, k_pool, v_pool, block_tables, rows, head_sinks, **options)
    tuning = PREFILL[q.shape[2]]
    group, num_rows = q.shape[1] // k_pool.shape[1], tuning.warpgroups * ROWS
    tile_tokens = min(num_rows // group, num_tokens)
    tiles = make_query_tiles(query_start_loc, seq_lens, ~is_short, num_tokens=num_tokens, tile_tokens=tile_tokens)
    row_sinks = None if head_sinks is None else _pad(jnp.repeat(head_sinks, tile_tokens, axis=1), num_rows)
    return prefill(
        q, k_pool, v_pool, block_tables, tiles, row_sinks, out, tile_tokens=tile_tokens, tuning=tuning, **options
    )


def _rows_of(
    is_taken: Bool[Array, " B"], query_start_loc: Int[Array, " C"], seq_lens: Int[Array, " B"], num_tokens: int
) -> tuple[Int[Array, " U"], Int[Array, " U"], Int[Array, " U"]]:
    """Return (seq_len, token, request) of each token of some short requests; what is left over has seq_len 0."""
    starts, query_lens = query_start_loc[:-1], query_start_loc[1:] - query_start_loc[:-1]
    lens = jnp.where(is_taken, query_lens, 0)
    ends = jnp.cumsum(lens, dtype=jnp.int32)
    row = jnp.arange(min(num_tokens, SHORT * len(seq_lens)), dtype=jnp.int32)
    request = jnp.minimum(jnp.sum(ends[None, :] <= row[:, None], axis=1, dtype=jnp.int32), len(seq_lens) - 1)
    offset = row - ends[request] + lens[request]
    seen = jnp.where(row < ends[-1], seq_lens[request] - query_lens[request] + offset + 1, 0)
    return seen, jnp.where(row < ends[-1], starts[request] + offset, 0), request


def _decode(
    q: Float[Array, "T N H"],
    k_pool: Pool,
    v_pool: Pool,
    block_tables: Int[Array, "B M"],
    rows: tuple[Int[Array, " U"], Int[Array, " U"], Int[Array, " U"], Int[Array, " D"]],
    head_sinks: Float[Array, "K G"] | None,
    **options: Any,
) -> Float[Array, "T N H"]:
    """Attend from rows of one query token: (seq_len, token, request), and which of the first D tokens are padding."""
    seq_lens, token, request, is_dead = rows
    num_kv_heads, tuning = k_pool.shape[1], DECODE[q.shape[2]]
    work_list = make_work_list(
        seq_lens, token, request, num_kv_heads=num_kv_heads, tile=tuning.tile, window=options["window"],
        num_workers=tuning.num_programs * tuning.streams, min_tiles=tuning.min_tiles,
    )  # fmt: skip
    sinks = None if head_sinks is None else _pad(head_sinks, ROWS)
    out, part, part_lse = decode_parts(
        q, k_pool, v_pool, block_tables, work_list, is_dead, sinks, tuning=tuning, **options
    )
    return merge_parts(out, part, part_lse, work_list, sinks, group=q.shape[1] // num_kv_heads)


def _pad(x: Float[Array, "K G"], num_rows: int) -> Float[Array, "K rows"]:
    return jnp.pad(x, ((0, 0), (0, num_rows - x.shape[1])))
