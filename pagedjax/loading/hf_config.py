"""Reads a Hugging Face config.json into a `ModelConfig`.

Knows the keys and defaults of the supported families, in old (`rope_theta`, `rope_scaling`, `torch_dtype`) and new
(`rope_parameters`, `dtype`) spelling. Opens no weights and runs no code from the model directory.
"""

import json
from pathlib import Path
from typing import Any

from pagedjax.errors import ConfigError
from pagedjax.loading.hf_values import check_values
from pagedjax.models import model_class
from pagedjax.models.config import ACTIVATIONS, DTYPES, ModelConfig, RopeConfig
from pagedjax.models.rope import inverse_frequencies, longest_context

HFConfig = dict[str, Any]

ARCHITECTURE_OF_MODEL_TYPE = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
}
"""For a config.json that has no `architectures`."""

FAMILY_DEFAULTS: dict[str, HFConfig] = {
    "LlamaForCausalLM": {"max_position_embeddings": 2048},
    "MistralForCausalLM": {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
    "Qwen2ForCausalLM": {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28},
    "Qwen3ForCausalLM": {
        "num_key_value_heads": 32,
        "head_dim": 128,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    "Gemma3ForCausalLM": {
        "vocab_size": 262208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "rope_theta": 1e6,
        "sliding_window": 4096,
        "tie_word_embeddings": True,
        "hidden_act": "gelu_pytorch_tanh",
        "eos_token_id": 1,
        "bos_token_id": 2,
    },
}
"""What transformers assumes where config.json is silent; keys without a default here or in the reader are required."""


def read_model_config(directory: Path) -> ModelConfig:
    """Read `directory`/config.json.

    Raises:
        ConfigError: it is missing, unreadable, of an unsupported architecture, or asks for remote code.
    """
    path = directory / "config.json"
    try:
        hf = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"{path} does not exist; --model must be a directory with a Hugging Face config.json"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}; download it again") from error
    if not isinstance(hf, dict):
        raise ConfigError(f"{path} holds a JSON {type(hf).__name__}, not an object; download it again")
    try:
        return model_config_from_hf(hf)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def model_config_from_hf(hf: HFConfig) -> ModelConfig:
    """Translate the content of a config.json.

    Raises:
        ConfigError: a key is missing or has a value that is not supported.
    """
    architecture = _architecture(hf)
    check_values(hf)
    _refuse_unsupported(hf)
    reader = _Reader(
        {**FAMILY_DEFAULTS[architecture], **{key: value for key, value in hf.items() if value is not None}}
    )
    num_heads = reader.positive("num_attention_heads")
    hidden_size = reader.positive("hidden_size")
    num_layers = reader.positive("num_hidden_layers")
    windows = _layer_windows(architecture, hf, reader, num_layers)
    rope, local_rope = _ropes(architecture, reader)
    is_gemma = architecture == "Gemma3ForCausalLM"
    attention_bias = bool(reader.get("attention_bias", False))
    config = ModelConfig(
        architecture=architecture,
        vocab_size=reader.positive("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=reader.positive("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=reader.positive("num_key_value_heads", num_heads),
        head_dim=reader.positive("head_dim", hidden_size // num_heads),
        max_position_embeddings=longest_context(
            reader.positive("max_position_embeddings", 32768), rope, is_gemma=is_gemma
        ),
        rms_norm_eps=float(reader.get("rms_norm_eps", 1e-6)),
        rope=rope,
        local_rope=local_rope,
        layer_windows=windows,
        hidden_act=_activation(reader, is_gemma),
        tie_word_embeddings=bool(reader.get("tie_word_embeddings", False)),
        attention_bias=attention_bias or architecture == "Qwen2ForCausalLM",
        attention_out_bias=attention_bias,
        mlp_bias=bool(reader.get("mlp_bias", False)),
        qk_norm=architecture in ("Qwen3ForCausalLM", "Gemma3ForCausalLM"),
        attention_scale=float(reader.get("query_pre_attn_scalar", 256)) ** -0.5 if is_gemma else None,
        attn_soft_cap=reader.get("attn_logit_softcapping", None),
        final_logit_soft_cap=reader.get("final_logit_softcapping", None),
        dtype=_dtype(reader),
        bos_token_id=reader.get("bos_token_id", None),
        eos_token_ids=_token_ids(reader.get("eos_token_id", None)),
    )
    _check(config)
    return config


class _Reader:
    """A config.json with defaults under it; a required key that is missing is a ConfigError naming it."""

    def __init__(self, values: HFConfig):
        self.values = values

    def get(self, key: str, default: Any) -> Any:
        return self.values.get(key, default)

    def positive(self, key: str, default: int | None = None) -> int:
        value = self.values.get(key, default)
        if value is None:
            raise ConfigError(f"{key} is missing; add it or download config.json again")
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"{key} is {value!r}; it must be an integer, at least 1")
        return value


def _architecture(hf: HFConfig) -> str:
    model_type = str(hf.get("model_type"))
    names = hf.get("architectures")
    name = names[0] if isinstance(names, list) and names else ARCHITECTURE_OF_MODEL_TYPE.get(model_type, model_type)
    model_class(str(name))  # raises for an unsupported one
    return str(name)


def _refuse_unsupported(hf: HFConfig) -> None:
    if hf.get("auto_map"):
        raise ConfigError(
            "auto_map asks to run code from the model repository, which is always refused; "
            "remove auto_map from config.json if the weights fit the named architecture"
        )
    if hf.get("quantization_config"):
        method = hf["quantization_config"].get("quant_method", "unnamed")
        raise ConfigError(
            f"quantization method {method!r} is not built yet; use the unquantised checkpoint or a GGUF file"
        )
    if hf.get("use_bidirectional_attention"):
        raise ConfigError("use_bidirectional_attention is true; only causal attention is supported")
    if hf.get("partial_rotary_factor", 1.0) not in (1.0, None):
        raise ConfigError(f"partial_rotary_factor is {hf['partial_rotary_factor']}; only 1.0 is supported")


def _layer_windows(architecture: str, hf: HFConfig, reader: _Reader, num_layers: int) -> tuple[int | None, ...]:
    """Return the sliding window of each layer; () where every layer attends fully."""
    window = reader.get("sliding_window", None)
    if architecture == "MistralForCausalLM":
        is_local = [hf.get("sliding_window", window) is not None] * num_layers  # an explicit null means none
    elif architecture == "LlamaForCausalLM":
        is_local = [False] * num_layers
    elif reader.get("layer_types", None):
        is_local = [kind == "sliding_attention" for kind in reader.get("layer_types", None)]
    elif architecture == "Gemma3ForCausalLM":
        pattern = reader.positive("sliding_window_pattern", 6)
        is_local = [(i + 1) % pattern != 0 for i in range(num_layers)]
    else:
        is_local = [i >= reader.get("max_window_layers", 28) for i in range(num_layers)]
    if architecture in ("Qwen2ForCausalLM", "Qwen3ForCausalLM") and not reader.get("use_sliding_window", False):
        is_local = [False] * num_layers
    if len(is_local) != num_layers:
        raise ConfigError(
            f"layer_types has {len(is_local)} entries for num_hidden_layers {num_layers}; they must agree"
        )
    return tuple(window if local else None for local in is_local) if any(is_local) else ()


def _ropes(architecture: str, reader: _Reader) -> tuple[RopeConfig, RopeConfig | None]:
    """Return the rope of full attention layers and, for Gemma 3, of local ones."""
    parameters = reader.get("rope_parameters", None) or reader.get("rope_scaling", None) or {}
    theta = reader.get("rope_theta", 10000.0)
    if architecture != "Gemma3ForCausalLM":
        return _rope(parameters, theta, reader), None
    nested = "full_attention" in parameters or "sliding_attention" in parameters
    full = parameters.get("full_attention") or {} if nested else parameters
    local = parameters.get("sliding_attention") or {} if nested else {}
    return _rope(full, theta, reader), _rope(local, reader.get("rope_local_base_freq", 10000.0), reader)


def _rope(parameters: HFConfig, theta: float, reader: _Reader) -> RopeConfig:
    rope_type = parameters.get("rope_type", parameters.get("type", "default"))
    scaling = {
        key: value for key, value in parameters.items() if key not in ("rope_theta", "type") and value is not None
    }
    scaling["rope_type"] = rope_type
    if scaling.pop("partial_rotary_factor", 1.0) != 1.0:
        raise ConfigError(f"partial_rotary_factor is {parameters['partial_rotary_factor']}; only 1.0 is supported")
    if rope_type in ("llama3", "yarn"):
        original = reader.get("original_max_position_embeddings", scaling.get("original_max_position_embeddings"))
        scaling["original_max_position_embeddings"] = original or reader.positive("max_position_embeddings", 32768)
    pairs = () if rope_type == "default" else tuple(sorted(scaling.items()))
    return RopeConfig(theta=float(parameters.get("rope_theta", theta)), scaling=pairs)


def _activation(reader: _Reader, is_gemma: bool) -> Any:
    name = reader.get("hidden_activation" if is_gemma else "hidden_act", reader.get("hidden_act", "silu"))
    if name not in ACTIVATIONS:
        raise ConfigError(f"hidden_act is {name!r}; supported are {', '.join(ACTIVATIONS)}")
    return name


def _dtype(reader: _Reader) -> str:
    name = str(reader.get("dtype", reader.get("torch_dtype", "float32"))).removeprefix("torch.")
    if name not in DTYPES:
        raise ConfigError(f"torch_dtype is {name!r}; supported are {', '.join(DTYPES)}")
    return name


def _token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (value,)


def _check(config: ModelConfig) -> None:
    for rope in (config.rope, config.local_rope):
        if rope is not None:
            inverse_frequencies(rope, config.head_dim)  # raises for an unsupported or incomplete scaling
