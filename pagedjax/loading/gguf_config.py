"""GGUF metadata read as a `ModelConfig` and as generation defaults.

Holds what llama.cpp leaves unsaid: Gemma 3's local rope and layer pattern, and Llama 3's rope scaling, which a file
states only as a tensor of divisors. Reads no weights beyond that tensor; `gguf_file.py` reads the container.
"""

from typing import Any

import numpy as np

from pagedjax.errors import CheckpointError, ConfigError
from pagedjax.loading.gguf_file import GGUFFile
from pagedjax.models.config import ModelConfig, RopeConfig
from pagedjax.models.rope import inverse_frequencies, longest_context

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
}
"""`general.architecture` -> Hugging Face class. Mistral, SmolLM2 and CodeLlama files say "llama"."""

GEMMA3_LOCAL_THETA = 10000.0  # of the layers with a window; no metadata key holds it
GEMMA3_PATTERN = 6  # every sixth layer attends fully
GEMMA3_27B_LAYERS = 62  # the one size whose scores are scaled by hidden_size / num_heads instead of head_dim
LLAMA3_SCALING = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""What every Llama 3.1 to 3.3 uses; the factor itself is the largest value of `rope_freqs.weight`."""

STOP_TOKEN_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
SAMPLING_KEYS = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
"""`general.sampling.*` -> the name in generation_config.json."""

DTYPES = {0: "float32", 1: "float16"}  # GGML type of the weights -> dtype; all others come from bfloat16 models


def read_gguf_config(file: GGUFFile) -> ModelConfig:
    """Translate a file's metadata.

    Raises:
        ConfigError: the architecture or one of its options is not supported.
        CheckpointError: a key that the architecture needs is missing; the message names the file.
    """
    keys = _Keys(file)
    tensors = file.tensors
    is_gemma = keys.architecture == "gemma3"
    num_layers, num_heads = keys.integer("block_count"), keys.integer("attention.head_count")
    head_dim = keys.integer("attention.key_length", keys.integer("embedding_length") // num_heads)
    rope = _rope(keys, head_dim)
    _refuse_unsupported(keys, head_dim)
    return ModelConfig(
        architecture=ARCHITECTURES[keys.architecture],
        vocab_size=keys.tensor("token_embd.weight").shape[0],
        hidden_size=keys.integer("embedding_length"),
        intermediate_size=keys.integer("feed_forward_length"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=keys.integer("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        max_position_embeddings=longest_context(keys.integer("context_length"), rope, is_gemma=is_gemma),
        rms_norm_eps=keys.number("attention.layer_norm_rms_epsilon"),
        rope=rope,
        local_rope=_local_rope(keys) if is_gemma else None,
        layer_windows=_layer_windows(keys, num_layers),
        hidden_act="gelu_pytorch_tanh" if is_gemma else "silu",
        tie_word_embeddings="output.weight" not in tensors,
        attention_bias="blk.0.attn_q.bias" in tensors,
        attention_out_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_down.bias" in tensors,
        qk_norm="blk.0.attn_q_norm.weight" in tensors,
        attention_scale=_attention_scale(keys, num_layers, num_heads, head_dim),
        attn_soft_cap=keys.optional_number("attn_logit_softcapping"),
        final_logit_soft_cap=keys.optional_number("final_logit_softcapping"),
        dtype=DTYPES.get(keys.tensor("blk.0.ffn_down.weight").type_id, "bfloat16"),
        bos_token_id=_token_id(file, "bos_token_id"),
        eos_token_ids=_stop_token_ids(file),
    )


def generation_defaults(file: GGUFFile) -> dict[str, Any]:
    """Return what a generation_config.json would hold: sampling defaults, where the file has any, and token ids."""
    metadata = file.metadata
    sampling = {
        name: _shortest(metadata[f"general.sampling.{key}"])
        for key, name in SAMPLING_KEYS.items()
        if f"general.sampling.{key}" in metadata
    }
    tokens = {
        "bos_token_id": _token_id(file, "bos_token_id"),
        "eos_token_id": list(_stop_token_ids(file)) or None,
        "pad_token_id": _token_id(file, "padding_token_id"),
    }
    return sampling | {name: value for name, value in tokens.items() if value is not None}


class _Keys:
    """The metadata keys of one architecture, without their prefix."""

    def __init__(self, file: GGUFFile):
        self.file = file
        self.architecture = str(file.metadata.get("general.architecture"))
        if self.architecture not in ARCHITECTURES:
            raise ConfigError(
                f"{file.path} has the GGUF architecture {self.architecture!r}; supported are {', '.join(ARCHITECTURES)}"
            )

    def get(self, key: str, default: Any = None) -> Any:
        """Return a value; an array that holds one value per layer counts as that value if all agree."""
        value = self.file.metadata.get(f"{self.architecture}.{key}", default)
        if not isinstance(value, np.ndarray):
            return value
        if value.size == 0 or (value != value[0]).any():
            raise ConfigError(
                f"{self.file.path}: {key} differs between layers ({value.tolist()}), which is not supported"
            )
        return value[0].item()

    def integer(self, key: str, default: int | None = None) -> int:
        """Return a positive count."""
        value = self.get(key, default)
        if value is None:
            raise self._missing(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise CheckpointError(f"{self.file.path}: {self.architecture}.{key} is {value!r}, not a positive integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return a number."""
        value = self.optional_number(key)
        value = default if value is None else value
        if value is None:
            raise self._missing(key)
        return value

    def optional_number(self, key: str) -> float | None:
        """Return a number, None where the file has none."""
        value = self.get(key)
        if value is not None and (not isinstance(value, int | float) or isinstance(value, bool)):
            raise CheckpointError(f"{self.file.path}: {self.architecture}.{key} is {value!r}, not a number")
        return None if value is None else float(_shortest(value))

    def tensor(self, name: str) -> Any:
        """Return the table entry of a tensor that every model has."""
        if name not in self.file.tensors:
            raise CheckpointError(f"{self.file.path} has no tensor {name}; convert the model again")
        return self.file.tensors[name]

    def _missing(self, key: str) -> CheckpointError:
        return CheckpointError(
            f"{self.file.path} has no metadata key {self.architecture}.{key}; convert the model again"
        )


def _refuse_unsupported(keys: _Keys, head_dim: int) -> None:
    rotated, experts = keys.get("rope.dimension_count", head_dim), keys.get("expert_count", 0)
    if rotated != head_dim:
        raise ConfigError(f"{keys.file.path} rotates {rotated} of {head_dim} head dimensions; only all are supported")
    if experts:
        raise ConfigError(f"{keys.file.path} has {experts} experts; only dense models are supported")


def _rope(keys: _Keys, head_dim: int) -> RopeConfig:
    """Rope of layers that attend fully. `scaling` is spelled as in a Hugging Face config."""
    theta = keys.number("rope.freq_base", 10000.0)
    kind = keys.get("rope.scaling.type", "linear" if keys.get("rope.scale_linear") else "none")
    factor = keys.optional_number("rope.scaling.factor") or keys.optional_number("rope.scale_linear")
    if "rope_freqs.weight" in keys.file.tensors:
        scaling = _llama3_scaling(keys, theta, head_dim)
    elif kind == "none" or (kind == "linear" and factor in (None, 1.0)):
        scaling = {}
    elif kind == "linear":
        scaling = {"rope_type": "linear", "factor": factor}
    elif kind == "yarn":
        scaling = _yarn_scaling(keys, factor)
    else:
        raise ConfigError(
            f"{keys.file.path} has the rope scaling type {kind!r}; supported are none, linear, yarn and llama3"
        )
    return RopeConfig(theta=theta, scaling=tuple(sorted(scaling.items())))


def _yarn_scaling(keys: _Keys, factor: float | None) -> dict[str, Any]:
    attention_factor = keys.number("rope.scaling.yarn_attn_factor", 1.0)
    if factor is None or attention_factor != 1:
        raise ConfigError(
            f"{keys.file.path} has YaRN scaling by {factor} with attention factor {attention_factor}; "
            "it must have a factor, and 1 as attention factor"
        )
    scaling = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": keys.integer("rope.scaling.original_context_length"),
        "beta_fast": keys.optional_number("rope.scaling.yarn_beta_fast"),
        "beta_slow": keys.optional_number("rope.scaling.yarn_beta_slow"),
    }
    return {name: value for name, value in scaling.items() if value is not None}


def _llama3_scaling(keys: _Keys, theta: float, head_dim: int) -> dict[str, Any]:
    """Recover Llama 3's scaling from the divisors that llama.cpp made of it, and check that it gives them again."""
    entry = keys.tensor("rope_freqs.weight")
    if entry.type_id != 0 or entry.shape != (head_dim // 2,):
        raise ConfigError(
            f"{keys.file.path}: rope_freqs.weight has the shape {entry.shape} and GGML type {entry.type_id}; "
            f"it must be {head_dim // 2} float32 numbers"
        )
    divisors = keys.file.tensor_bytes(entry, 2 * head_dim).view("<f4").copy()
    scaling = {"rope_type": "llama3", "factor": float(divisors.max()), **LLAMA3_SCALING}
    rope, scaled = RopeConfig(theta=theta), RopeConfig(theta=theta, scaling=tuple(scaling.items()))
    expected = inverse_frequencies(rope, head_dim)[0] / inverse_frequencies(scaled, head_dim)[0]
    if not np.allclose(divisors, expected, rtol=1e-4):
        raise ConfigError(
            f"{keys.file.path}: rope_freqs.weight is not Llama 3's scaling by {scaling['factor']}; "
            "use the model's Hugging Face checkpoint"
        )
    return scaling


def _local_rope(keys: _Keys) -> RopeConfig:
    return RopeConfig(theta=keys.number("rope.freq_base_swa", GEMMA3_LOCAL_THETA))


def _layer_windows(keys: _Keys, num_layers: int) -> tuple[int | None, ...]:
    if not keys.get("attention.sliding_window"):
        return ()
    window = keys.integer("attention.sliding_window")
    if keys.architecture != "gemma3":
        return (window,) * num_layers
    pattern = keys.integer("attention.sliding_window_pattern", GEMMA3_PATTERN)
    return tuple(None if (i + 1) % pattern == 0 else window for i in range(num_layers))


def _attention_scale(keys: _Keys, num_layers: int, num_heads: int, head_dim: int) -> float | None:
    if keys.architecture != "gemma3":
        return keys.optional_number("attention.scale")
    width = keys.integer("embedding_length") / num_heads if num_layers == GEMMA3_27B_LAYERS else head_dim
    return width**-0.5


def _stop_token_ids(file: GGUFFile) -> tuple[int, ...]:
    """Return end of sequence, of turn and of message, as far as the file names them, each once."""
    ids = [_token_id(file, key) for key in STOP_TOKEN_KEYS]
    return tuple(dict.fromkeys(token for token in ids if token is not None))


def _token_id(file: GGUFFile, key: str) -> int | None:
    value = file.metadata.get(f"tokenizer.ggml.{key}")
    if value is not None and (not isinstance(value, int) or value < 0):
        raise CheckpointError(f"{file.path}: tokenizer.ggml.{key} is {value!r}, not a token id; convert it again")
    return value


def _shortest(value: int | float) -> int | float:
    """Return the shortest decimal that names this float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value))) if isinstance(value, float) else value
