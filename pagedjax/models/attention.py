"""Self-attention over the paged KV pool: project, rotate, write this step's keys and values, attend.

The pool is updated functionally; inside the step, which donates it, that happens in place.
"""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pagedjax.models.batch import AttentionBatch
from pagedjax.models.config import ModelConfig
from pagedjax.models.layers import Linear, RMSNorm
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.rope_and_cache import rope_and_cache

LayerCache = tuple[Float[Array, "P K S H"], Float[Array, "P K S H"]]
CosSin = tuple[Float[Array, "T half"], Float[Array, "T half"]]


class Attention(nnx.Module):
    """Grouped-query attention of one layer; q, k and v share one kernel [D, (N + 2K) H]."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        window: int | None,
        norm_unit_offset: bool = False,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
    ):
        num_heads, num_kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        qkv_dim = (num_heads + 2 * num_kv_heads) * head_dim
        self.qkv = Linear(config.hidden_size, qkv_dim, use_bias=config.attention_bias, dtype=dtype, rngs=rngs)
        self.out = Linear(
            num_heads * head_dim, config.hidden_size, use_bias=config.attention_out_bias, dtype=dtype, rngs=rngs
        )
        head_norm = partial(RMSNorm, head_dim, eps=config.rms_norm_eps, unit_offset=norm_unit_offset, dtype=dtype)
        self.q_norm = head_norm() if config.qk_norm else None
        self.k_norm = head_norm() if config.qk_norm else None
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.scale = head_dim**-0.5 if config.attention_scale is None else config.attention_scale
        self.window = window
        self.soft_cap = config.attn_soft_cap

    def __call__(
        self, x: Float[Array, "T D"], cos_sin: CosSin, batch: AttentionBatch, cache: LayerCache
    ) -> tuple[Float[Array, "T D"], LayerCache]:
        """Attend over the cached context and this step's tokens; return the output and the written cache."""
        heads, scales = self._project(x)
        q, k_pool, v_pool = rope_and_cache(
            heads, *cos_sin, *cache, batch.slot_mapping, scales, eps=0.0 if self.q_norm is None else self.q_norm.eps
        )
        with jax.named_scope("paged_attention"):
            attended = paged_attention(
                q,
                k_pool,
                v_pool,
                batch.block_tables,
                batch.query_start_loc,
                batch.seq_lens,
                scale=self.scale,
                window=self.window,
                soft_cap=self.soft_cap,
            )
        return self.out(attended.reshape(x.shape[0], -1)), (k_pool, v_pool)

    def _project(
        self, x: Float[Array, "T D"]
    ) -> tuple[Float[Array, "T R H"], tuple[Float[Array, " H"], Float[Array, " H"]] | None]:
        """Return queries, keys and values beside each other, and the weights of the norms that they still need."""
        heads = self.qkv(x).reshape(x.shape[0], -1, self.head_dim)  # [T, N + 2K, H]
        if self.q_norm is None or self.k_norm is None:
            return heads, None
        if not self.q_norm.unit_offset:
            return heads, (self.q_norm.scale[...], self.k_norm.scale[...])
        q, k, v = jnp.split(heads, (self.num_heads, self.num_heads + self.num_kv_heads), axis=1)
        return jnp.concatenate([self.q_norm(q), self.k_norm(k), v], axis=1), None
