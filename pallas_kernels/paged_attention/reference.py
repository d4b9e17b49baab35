"""Dense attention in float32: the oracle that every other backend is tested against.

Gathers the whole block table of every token, so it is for tests only.
"""

import jax.numpy as jnp
from jax import lax, nn
from jaxtyping import Array, Float, Int


def reference_attention(
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
    """Compute `paged_attention` with the whole score matrix."""
    num_tokens, num_heads, _ = q.shape
    tokens = jnp.arange(num_tokens, dtype=jnp.int32)
    request = jnp.sum(tokens[:, None] >= query_start_loc[None, 1:], axis=1, dtype=jnp.int32)  # [T], B for padding
    position = seq_lens.at[request].get(mode="clip") - query_start_loc.at[request + 1].get(mode="clip") + tokens
    k, v = (_keys(pool, block_tables.at[request].get(mode="clip"), num_heads) for pool in (k_pool, v_pool))
    scores = scale * jnp.einsum("tnh,tcnh->tnc", q.astype(jnp.float32), k, precision=lax.Precision.HIGHEST)
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    key_position = jnp.arange(k.shape[1], dtype=jnp.int32)[None, :]
    seen = (key_position <= position[:, None]) & (request < len(seq_lens))[:, None]  # [T, C]
    if window is not None:
        seen &= key_position > position[:, None] - window
    scores = jnp.where(seen[:, None, :], scores, -jnp.inf)
    sink = jnp.full((num_heads,), -jnp.inf, jnp.float32) if sinks is None else sinks.astype(jnp.float32)
    scores = jnp.concatenate([scores, jnp.broadcast_to(sink[None, :, None], (num_tokens, num_heads, 1))], axis=-1)
    weights = nn.softmax(scores, axis=-1)[..., :-1]
    weights, v = jnp.where(seen[:, None, :], weights, 0), jnp.where(seen[:, :, None, None], v, 0)
    return jnp.einsum("tnc,tcnh->tnh", weights, v, precision=lax.Precision.HIGHEST).astype(q.dtype)


def _keys(pool: Float[Array, "P K S H"], blocks: Int[Array, "T M"], num_heads: int) -> Float[Array, "T C N H"]:
    """The cached vectors of each token's request, one for each query head, C = M * S."""
    gathered = jnp.moveaxis(pool.at[blocks].get(mode="clip"), 2, 3).astype(jnp.float32)  # [T, M, S, K, H]
    gathered = jnp.repeat(gathered, num_heads // pool.shape[1], axis=3)  # [T, M, S, N, H]
    return gathered.reshape(len(blocks), -1, *gathered.shape[3:])  # [T, C, N, H]
