"""The shape of a decoder-only model, read from a Hugging Face config.json or GGUF metadata.

Frozen and hashable, so that it can be static under `jax.jit`. Knows nothing of weights or files.
"""

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary embedding of one kind of layer. `scaling` holds a Hugging Face `rope_scaling` dict as sorted pairs."""

    theta: float = 10000.0
    scaling: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """D hidden_size, F intermediate_size, L num_layers, N num_heads, K num_kv_heads, H head_dim, V vocab_size."""

    architecture: str  # Hugging Face class name, for example LlamaForCausalLM
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    local_rope: RopeConfig | None = None  # of layers with a window, where it differs (Gemma 3)
    layer_windows: tuple[int | None, ...] = ()  # sliding window per layer, None is full attention; () is all full
    hidden_act: Literal["silu", "gelu_pytorch_tanh"] = "silu"
    tie_word_embeddings: bool = False
    attention_bias: bool = False  # on q, k, v
    attention_out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # RMSNorm over head_dim on q and k
    attention_scale: float | None = None  # head_dim ** -0.5 if None
    attn_soft_cap: float | None = None
    final_logit_soft_cap: float | None = None
    dtype: str = "bfloat16"  # of the checkpoint
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @property
    def window(self) -> tuple[int | None, ...]:
        """Sliding window of each layer, [L]."""
        return self.layer_windows or (None,) * self.num_layers
