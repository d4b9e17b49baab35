"""The decoder-only language model that every family is a variant of, behind the one forward contract.

Layers are unrolled. The layer function is jitted with its structure static and its leaves as arguments, so
layers of one kind are traced, lowered and (after inlining) scheduled from one function.
"""

from functools import partial
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PyTree

from pagedjax.models.attention import Attention, CosSin, LayerCache
from pagedjax.models.batch import AttentionBatch, KVCache
from pagedjax.models.config import ModelConfig
from pagedjax.models.layers import Embedding, GatedMLP, OutputHead, RMSNorm, soft_cap
from pagedjax.models.rope import inverse_frequencies, rope_cos_sin

WeightNames = dict[str, tuple[str, ...]]  # parameter path -> Hugging Face tensors joined along the output axis

MODEL_WEIGHTS: WeightNames = {
    "embed.embedding": ("model.embed_tokens.weight",),
    "norm.scale": ("model.norm.weight",),
    "head.kernel": ("lm_head.weight",),
}
"""Weights outside the layers. Kernels are stored transposed, see `loading.weights`."""

LAYER_WEIGHTS: WeightNames = {
    "attention.qkv.kernel": ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
    "attention.qkv.bias": ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"),
    "attention.out.kernel": ("self_attn.o_proj.weight",),
    "attention.out.bias": ("self_attn.o_proj.bias",),
    "attention.q_norm.scale": ("self_attn.q_norm.weight",),
    "attention.k_norm.scale": ("self_attn.k_norm.weight",),
    "mlp.gate_up.kernel": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.gate_up.bias": ("mlp.gate_proj.bias", "mlp.up_proj.bias"),
    "mlp.down.kernel": ("mlp.down_proj.weight",),
    "mlp.down.bias": ("mlp.down_proj.bias",),
    "attention_norm.scale": ("input_layernorm.weight",),
    "mlp_norm.scale": ("post_attention_layernorm.weight",),
}
"""Weights of one layer, below `model.layers.N.`; a model uses those whose parameters it has."""

IGNORED_WEIGHTS = ("rotary_emb.inv_freq",)
"""Endings of tensors that old checkpoints hold and no model reads."""


class DecoderLayer(nnx.Module):
    """One pre-norm layer: attention, then gated MLP, each added to the residual."""

    norm_unit_offset: ClassVar[bool] = False

    def __init__(self, config: ModelConfig, *, window: int | None, dtype: DTypeLike, rngs: nnx.Rngs):
        self.attention = Attention(
            config, window=window, norm_unit_offset=self.norm_unit_offset, dtype=dtype, rngs=rngs
        )
        self.mlp = GatedMLP(
            config.hidden_size,
            config.intermediate_size,
            act=config.hidden_act,
            use_bias=config.mlp_bias,
            dtype=dtype,
            rngs=rngs,
        )
        self.attention_norm = self._norm(config, dtype)
        self.mlp_norm = self._norm(config, dtype)

    def __call__(
        self,
        x: Float[Array, "T D"],
        delta: Float[Array, "T D"],
        cos_sin: CosSin,
        batch: AttentionBatch,
        cache: LayerCache,
    ) -> tuple[Float[Array, "T D"], Float[Array, "T D"], LayerCache]:
        """Run the layer on the residual x + delta; return the next residual's two terms, and the cache."""
        with jax.named_scope("attention"):
            x, normed = self.attention_norm.add(x, delta)
            attended, cache = self.attention(normed, cos_sin, batch, cache)
        with jax.named_scope("mlp"):
            x, normed = self.mlp_norm.add(x, attended)
            return x, self.mlp(normed), cache

    def _norm(self, config: ModelConfig, dtype: DTypeLike) -> RMSNorm:
        return RMSNorm(config.hidden_size, eps=config.rms_norm_eps, unit_offset=self.norm_unit_offset, dtype=dtype)


class CausalLM(nnx.Module):
    """Embedding, layers, final norm and head. Families override the class attributes."""

    layer_class: ClassVar[type[DecoderLayer]] = DecoderLayer
    layer_weights: ClassVar[WeightNames] = LAYER_WEIGHTS

    def __init__(self, config: ModelConfig, *, dtype: DTypeLike, rngs: nnx.Rngs):
        dtype = jnp.dtype(dtype)
        for rope in (config.rope, config.local_rope):
            if rope is not None:
                inverse_frequencies(rope, config.head_dim)  # raises for what cannot be computed
        self.embed = Embedding(config.vocab_size, config.hidden_size, dtype=dtype, rngs=rngs)
        self.layers = nnx.List(
            [self.layer_class(config, window=window, dtype=dtype, rngs=rngs) for window in config.window]
        )
        self.norm = RMSNorm(
            config.hidden_size, eps=config.rms_norm_eps, unit_offset=self.layer_class.norm_unit_offset, dtype=dtype
        )
        head = (
            None
            if config.tie_word_embeddings
            else OutputHead(config.hidden_size, config.vocab_size, dtype=dtype, rngs=rngs)
        )
        self.head = head
        self.config = config

    def __call__(
        self, token_ids: Int[Array, " T"], batch: AttentionBatch, kv_cache: KVCache
    ) -> tuple[Float[Array, "T D"], KVCache]:
        """Write the tokens' keys and values to the cache; return hidden states after the final norm, and the cache."""
        with jax.named_scope("embed"):
            x = self._embed(token_ids)
        tables = self._rope_tables(batch.positions)
        delta = jnp.zeros_like(x)  # what a layer adds is added where the next one normalises, in one pass
        new_cache: KVCache = []
        for layer, cos_sin, cache in zip(self.layers, tables, kv_cache, strict=True):
            graphdef, state = nnx.split(layer)
            x, delta, cache = _run_layer(graphdef, state, x, delta, cos_sin, batch, cache)
            new_cache.append(cache)
        return self.norm.add(x, delta)[1], new_cache

    def compute_logits(self, hidden: Float[Array, "B D"]) -> Float[Array, "B V"]:
        """Return float32 logits of final hidden states."""
        with jax.named_scope("logits"):
            logits = self.embed.logits(hidden) if self.head is None else self.head.logits(hidden)
            return soft_cap(logits, self.config.final_logit_soft_cap)

    @classmethod
    def weight_names(cls, num_layers: int) -> WeightNames:
        """Return for every possible parameter path the checkpoint tensors that make it."""
        names = dict(MODEL_WEIGHTS)
        for i in range(num_layers):
            for path, tensors in cls.layer_weights.items():
                names[f"layers.{i}.{path}"] = tuple(f"model.layers.{i}.{tensor}" for tensor in tensors)
        return names

    def _embed(self, token_ids: Int[Array, " T"]) -> Float[Array, "T D"]:
        return self.embed(token_ids)

    def _rope_tables(self, positions: Int[Array, " T"]) -> list[CosSin]:
        """Return cos and sin for each layer, computed once a kind of layer."""
        with jax.named_scope("rope"):
            full = rope_cos_sin(positions, self.config.rope, self.config.head_dim)
            if self.config.local_rope is None:
                return [full] * self.config.num_layers
            local = rope_cos_sin(positions, self.config.local_rope, self.config.head_dim)
        return [full if window is None else local for window in self.config.window]


@partial(jax.jit, static_argnames="graphdef")
def _run_layer(
    graphdef: nnx.GraphDef,
    state: PyTree[Array],
    x: Float[Array, "T D"],
    delta: Float[Array, "T D"],
    cos_sin: CosSin,
    batch: AttentionBatch,
    cache: LayerCache,
) -> tuple[Float[Array, "T D"], Float[Array, "T D"], LayerCache]:
    return nnx.merge(graphdef, state)(x, delta, cos_sin, batch, cache)
