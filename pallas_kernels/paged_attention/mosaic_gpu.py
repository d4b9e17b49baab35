"""Paged attention on Hopper GPUs: decides which tokens the decode kernel takes and which the prefill kernel.

    as many tokens as requests   every token is a row of its own for the decode kernel: right for any batch
    more                         requests with one token go to the decode kernel, the others to the prefill kernel,
                                 which writes into the same output
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.paged_attention.blockwise import locate_tokens
from pallas_kernels.paged_attention.mosaic_decode import decode_parts
from pallas_kernels.paged_attention.mosaic_merge import merge_parts
from pallas_kernels.paged_attention.mosaic_parts import LOG2E, ROWS
from pallas_kernels.paged_attention.mosaic_prefill import make_query_tiles, prefill
from pallas_kernels.paged_attention.mosaic_work import make_work_list
from pallas_kernels.paged_attention.tuning import DECODE, PREFILL

BLOCK_SIZES = (16, 32, 64)
DTYPES = (jnp.bfloat16, jnp.float16)
COMPUTE_CAPABILITY = "9.0"
# ptxas of these CUDA releases miscompiles the causal mask of kernels of this kind, as JAX's own says: [first, past last).
BROKEN_CUDA = (12080, 12091)


def is_available() -> bool:
    """Return whether the default device can run the kernels."""
    if jax.default_backend() != "gpu":
        return False
    device = jax.local_devices()[0]
    if getattr(device, "compute_capability", None) != COMPUTE_CAPABILITY:
        return False
    return not BROKEN_CUDA[0] <= cuda_version(device.client.platform_version) < BROKEN_CUDA[1]


def cuda_version(platform_version: str) -> int:
    """Return 13000 for "... cuda 13000", 0 where nothing says."""
    words = platform_version.split()
    return next((int(b) for a, b in zip(words, words[1:], strict=False) if a == "cuda" and b.isdigit()), 0)


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
    """Compute `paged_attention`. On a CPU the kernels are interpreted, with race detection: for tests.

    Raises NotImplementedError for what `unsupported` names.
    """
    if (reason := unsupported(q, k_pool)) is not None:
        raise NotImplementedError(f"the mosaic_gpu backend of paged_attention: {reason}")
    interpret = plgpu.InterpretGPUParams(detect_races=True) if jax.default_backend() == "cpu" else None
    (num_tokens, num_heads, head_dim), num_requests = q.shape, len(seq_lens)
    num_kv_heads = k_pool.shape[1]
    group, decode, tuning = num_heads // num_kv_heads, DECODE[head_dim], PREFILL[head_dim]
    options = {"scale": scale, "window": window, "soft_cap": soft_cap, "interpret": interpret}
    head_sinks = None if sinks is None else sinks.astype(jnp.float32).reshape(num_kv_heads, group) * LOG2E

    is_ragged = num_tokens > num_requests
    if is_ragged:
        query_lens = query_start_loc[1:] - query_start_loc[:-1]
        is_single = (query_lens == 1) & (seq_lens > 0)
        token, request = query_start_loc[:-1], jnp.arange(num_requests, dtype=jnp.int32)
        lens, is_dead = jnp.where(is_single, seq_lens, 0), jnp.zeros(1, jnp.int32)
    else:
        token = jnp.arange(num_tokens, dtype=jnp.int32)
        request, position = locate_tokens(num_tokens, query_start_loc, seq_lens)
        lens = position + 1
        is_dead = (lens == 0).astype(jnp.int32)
    work_list = make_work_list(
        lens, token, request, num_kv_heads=num_kv_heads, tile=decode.tile, window=window,
        num_workers=decode.num_programs * decode.streams, min_tiles=decode.min_tiles,
    )  # fmt: skip
    padding = ((0, 0), (0, ROWS - group))
    row_sinks = None if head_sinks is None else jnp.pad(head_sinks, padding)  # [K, ROWS]
    out, part, part_lse = decode_parts(
        q, k_pool, v_pool, block_tables, work_list, is_dead, row_sinks, tuning=decode, **options
    )
    out = merge_parts(out, part, part_lse, work_list, row_sinks, group=group, interpret=interpret)
    if not is_ragged:
        return out
    num_rows = tuning.warpgroups * ROWS
    tile_tokens = min(num_rows // group, num_tokens)
    tiles = make_query_tiles(
        query_start_loc, seq_lens, ~is_single, num_tokens=num_tokens, tile_tokens=tile_tokens
    )
    if head_sinks is not None:
        used = jnp.repeat(head_sinks, tile_tokens, axis=1)
        row_sinks = jnp.pad(used, ((0, 0), (0, num_rows - used.shape[1])))  # [K, num_rows]
    return prefill(
        q, k_pool, v_pool, block_tables, tiles, row_sinks, out, tile_tokens=tile_tokens, tuning=tuning, **options
    )
