"""Gemma 3, text only: norms around both halves of a layer, scaled embeddings, local and global layers."""

from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from pagedjax.models.attention import CosSin, LayerCache
from pagedjax.models.batch import AttentionBatch
from pagedjax.models.causal_lm import LAYER_WEIGHTS, CausalLM, DecoderLayer, WeightNames
from pagedjax.models.config import ModelConfig

GEMMA_LAYER_WEIGHTS: WeightNames = {
    **LAYER_WEIGHTS,
    "attention_out_norm.scale": ("post_attention_layernorm.weight",),
    "mlp_norm.scale": ("pre_feedforward_layernorm.weight",),
    "mlp_out_norm.scale": ("post_feedforward_layernorm.weight",),
}


class GemmaLayer(DecoderLayer):
    """A layer that also norms what attention and MLP return; norm weights are offsets from 1."""

    norm_unit_offset: ClassVar[bool] = True

    def __init__(self, config: ModelConfig, *, window: int | None, dtype: DTypeLike, rngs: nnx.Rngs):
        super().__init__(config, window=window, dtype=dtype, rngs=rngs)
        self.attention_out_norm = self._norm(config, dtype)
        self.mlp_out_norm = self._norm(config, dtype)

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
            x, normed = self.mlp_norm.add(x, self.attention_out_norm(attended))
            return x, self.mlp_out_norm(self.mlp(normed)), cache


class Gemma3ForCausalLM(CausalLM):
    """Gemma 3 text model."""

    layer_class: ClassVar[type[DecoderLayer]] = GemmaLayer
    layer_weights: ClassVar[WeightNames] = GEMMA_LAYER_WEIGHTS

    def _embed(self, token_ids: Int[Array, " T"]) -> Float[Array, "T D"]:
        embedded = self.embed(token_ids)
        scale = np.float32(self.config.hidden_size**0.5)
        return embedded * jnp.asarray(scale, embedded.dtype)  # the scale is rounded to the weights' type first
