"""The shape of a decoder-only model, read from a Hugging Face config.json or GGUF metadata.

Frozen and hashable, so that it can be static under `jax.jit`. Knows nothing of weights or files.
"""

from dataclasses import dataclass
from numbers import Integral
from typing import Any, Literal

from pagedjax.errors import ConfigError

DTYPES = ("float32", "bfloat16", "float16")
ACTIVATIONS = ("silu", "gelu_pytorch_tanh")
SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim",
    "max_position_embeddings",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary embedding of one kind of layer. `scaling` holds a Hugging Face `rope_scaling` dict as sorted pairs."""

    theta: float = 10000.0
    scaling: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """D hidden_size, F intermediate_size, L num_layers, N num_heads, K num_kv_heads, H head_dim, V vocab_size.

    Raises:
        ConfigError: values are out of range or contradict each other.
    """

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

    def __post_init__(self) -> None:
        for name in SIZES:
            if not _is_integer(getattr(self, name), at_least=1):
                raise ConfigError(f"{name} is {getattr(self, name)!r:.80}; it must be an integer, at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_heads is {self.num_heads}; it must be a multiple of num_kv_heads {self.num_kv_heads}"
            )
        for name, kind in (("rope", RopeConfig), ("local_rope", RopeConfig | None)):
            if not isinstance(getattr(self, name), kind):
                raise ConfigError(f"{name} is {getattr(self, name)!r:.80}; it must be a RopeConfig")
        _check_windows(self.layer_windows, self.num_layers)
        for name, known in (("hidden_act", ACTIVATIONS), ("dtype", DTYPES)):
            if getattr(self, name) not in known:
                raise ConfigError(f"{name} is {getattr(self, name)!r:.80}; supported are {', '.join(known)}")
        ids = self.eos_token_ids
        if not isinstance(ids, tuple) or not all(map(_is_integer, ids)):  # one beyond the vocabulary is never sampled
            raise ConfigError(f"eos_token_ids is {ids!r:.80}; it must be a tuple of token ids")

    @property
    def window(self) -> tuple[int | None, ...]:
        """Sliding window of each layer, [L]."""
        return self.layer_windows or (None,) * self.num_layers


def _check_windows(windows: Any, num_layers: int) -> None:
    if not isinstance(windows, tuple) or len(windows) not in (0, num_layers):
        raise ConfigError(
            f"layer_windows is {windows!r:.80}; it must be a tuple of one for each of {num_layers} layers"
        )
    for window in windows:
        if window is not None and not _is_integer(window, at_least=1):
            raise ConfigError(f"layer_windows holds {window!r:.80}; each is an integer, at least 1, or None for full")


def _is_integer(value: Any, *, at_least: int = 0) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= at_least
