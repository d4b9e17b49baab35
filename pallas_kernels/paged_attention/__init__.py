"""Causal attention of a ragged batch of queries over a paged KV cache: checks the arguments, then runs one backend.

A backend is a function of the same arguments; adding one is a line in BACKENDS. Knows nothing of how blocks are
allocated: it reads the slots that block_tables and seq_lens name, and never depends on the contents of any other.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.hopper import unavailable
from pallas_kernels.paged_attention.blockwise import blockwise_attention
from pallas_kernels.paged_attention.mosaic_gpu import mosaic_attention, unsupported
from pallas_kernels.paged_attention.reference import reference_attention

BACKENDS = {"mosaic_gpu": mosaic_attention, "blockwise": blockwise_attention, "reference": reference_attention}
DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)


def paged_attention(
    q: Float[Array, "T N H"],
    k_pool: Float[Array, "P K S H"],
    v_pool: Float[Array, "P K S H"],
    block_tables: Int[Array, "B M"],
    query_start_loc: Int[Array, " B+1"],
    seq_lens: Int[Array, " B"],
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    backend: str | None = None,
) -> Float[Array, "T N H"]:
    """Attend from each token to the cached tokens of its own request at or before its position.

    Token t of request b is at position seq_lens[b] - query_len[b] + t - query_start_loc[b], and its own key and value
    are already in the pool. With a window it sees positions (position - window, position]. Scores are
    soft_cap * tanh(scale * q.k / soft_cap) where a cap is given; sinks are logits, one a head, that join the softmax's
    denominator only. Tokens at or past query_start_loc[B] are padding and come out as zeros, as does everything of a
    request whose seq_len is 0. Softmax and sums are float32; the result has the type of q.

    Only backend="reference" can be differentiated in reverse, which holds the whole score matrix: the others loop as
    often as the lengths ask for, and have no rule for a gradient.

    Raises ValueError for arguments that contradict each other, NotImplementedError for types that no backend has.
    """
    if backend is not None and backend not in BACKENDS:
        raise ValueError(f"paged_attention backend is {backend!r}; choose one of {', '.join(BACKENDS)}")
    _check_shapes(q, k_pool, v_pool, block_tables, query_start_loc, seq_lens, sinks)
    _check_types(q, k_pool, v_pool, block_tables, query_start_loc, seq_lens, sinks)
    _check_options(scale, window, soft_cap)
    if backend is None:
        backend, _ = default_backend(q, k_pool)
    return _run(
        q, k_pool, v_pool, block_tables, query_start_loc, seq_lens, sinks,
        scale=float(scale), window=window, soft_cap=soft_cap, backend=backend,
    )  # fmt: skip


def default_backend(q: Any, k_pool: Any) -> tuple[str, str]:
    """Return the backend that runs for arrays of these shapes and types on the default device, and why."""
    reason = unavailable() or unsupported(q, k_pool)
    return ("mosaic_gpu", "the kernels for Hopper GPUs") if reason is None else ("blockwise", reason)


@partial(jax.jit, static_argnames=("scale", "window", "soft_cap", "backend"))
def _run(*arrays: Any, backend: str, **options: Any) -> Float[Array, "T N H"]:
    with jax.named_scope(f"paged_attention_{backend}"):
        return BACKENDS[backend](*arrays, **options)


def _check_shapes(
    q: Any, k_pool: Any, v_pool: Any, block_tables: Any, query_start_loc: Any, seq_lens: Any, sinks: Any
) -> None:
    ranks = {"q": (q, 3), "k_pool": (k_pool, 4), "block_tables": (block_tables, 2), "seq_lens": (seq_lens, 1)}
    for name, (array, rank) in ranks.items():
        if array.ndim != rank:
            raise ValueError(f"{name} has shape {array.shape}; it must have {rank} axes")
        if 0 in array.shape:
            raise ValueError(f"{name} has shape {array.shape}; each axis must be at least 1")
    num_heads, head_dim = q.shape[1:]
    num_kv_heads = k_pool.shape[1]
    num_requests = seq_lens.shape[0]
    expected = {
        "k_pool": (k_pool, (*k_pool.shape[:3], head_dim)),
        "v_pool": (v_pool, k_pool.shape),
        "block_tables": (block_tables, (num_requests, block_tables.shape[1])),
        "query_start_loc": (query_start_loc, (num_requests + 1,)),
        "sinks": (sinks, (num_heads,)),
    }
    for name, (array, shape) in expected.items():
        if array is not None and array.shape != shape:
            raise ValueError(f"{name} has shape {array.shape}; beside q {q.shape} and seq_lens {seq_lens.shape} "
                             f"it must be {shape}")  # fmt: skip
    if num_heads % num_kv_heads:
        raise ValueError(f"q has {num_heads} heads and the pool {num_kv_heads}; the first must be a multiple")


def _check_types(
    q: Any, k_pool: Any, v_pool: Any, block_tables: Any, query_start_loc: Any, seq_lens: Any, sinks: Any
) -> None:
    for name, array in {"q": q, "k_pool": k_pool, "v_pool": v_pool, "sinks": sinks}.items():
        if array is not None and array.dtype not in DTYPES:
            names = ", ".join(jnp.dtype(dtype).name for dtype in DTYPES)
            raise NotImplementedError(f"{name} is {array.dtype}; built are {names}")
    if k_pool.dtype != v_pool.dtype:
        raise NotImplementedError(f"k_pool is {k_pool.dtype} and v_pool {v_pool.dtype}; they must be of one type")
    integers = {"block_tables": block_tables, "query_start_loc": query_start_loc, "seq_lens": seq_lens}
    for name, array in integers.items():
        if array.dtype != jnp.int32:
            raise ValueError(f"{name} is {array.dtype}; it must be int32")


def _check_options(scale: float, window: int | None, soft_cap: float | None) -> None:
    if not scale > 0:
        raise ValueError(f"scale is {scale}; it must be above 0, usually head_dim ** -0.5")
    if window is not None and window < 1:
        raise ValueError(f"window is {window}; it must be at least 1, or None for full attention")
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(f"soft_cap is {soft_cap}; it must be above 0, or None for no cap")
