"""Tiny random models, one a family and variant, as Hugging Face configurations and reproducible weights.

Shared by the oracle scripts (another interpreter, with torch) and the tests: needs numpy and Python 3.11 only.
Weights are drawn from each tensor's name by numpy's frozen legacy generator, so none are stored.
"""

import zlib
from typing import Any

import numpy as np

_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 48,
    "intermediate_size": 80,
    "max_position_embeddings": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "vocab_size": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_QWEN2 = {
    **_LLAMA,
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "max_window_layers": 2,
    "rope_theta": 1000000.0,
    "sliding_window": 8,
    "use_sliding_window": False,
}
_GEMMA3 = {
    **_LLAMA,
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "head_dim": 16,
    "hidden_activation": "gelu_pytorch_tanh",
    "num_hidden_layers": 4,
    "query_pre_attn_scalar": 24,
    "rope_local_base_freq": 10000.0,
    "rope_theta": 1000000.0,
    "sliding_window": 8,
    "sliding_window_pattern": 2,
    "tie_word_embeddings": True,
}

CASES: dict[str, dict[str, Any]] = {
    "code_llama": {**_LLAMA, "num_key_value_heads": 4, "rope_theta": 1000000.0},
    "llama_with_biases": {**_LLAMA, "attention_bias": True, "mlp_bias": True},
    "llama_linear_rope": {
        **_LLAMA,
        "max_position_embeddings": 16,
        "rope_scaling": {"type": "linear", "factor": 8.0},
    },
    "llama3_rope": {
        **_LLAMA,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "factor": 8.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 16,
            "rope_type": "llama3",
        },
    },
    "smollm2": {**_LLAMA, "num_attention_heads": 6, "rope_theta": 100000.0, "tie_word_embeddings": True},
    "mistral": {**_LLAMA, "architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 8},
    "qwen2": {**_QWEN2, "tie_word_embeddings": True},
    "qwen2_sliding_window": {**_QWEN2, "num_hidden_layers": 4, "use_sliding_window": True},
    "qwen2_yarn": {
        **_QWEN2,
        "max_position_embeddings": 16,
        "rope_scaling": {"factor": 8.0, "original_max_position_embeddings": 16, "type": "yarn"},
    },
    "qwen3": {
        **_QWEN2,
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "head_dim": 16,
        "tie_word_embeddings": True,
    },
    "gemma3": _GEMMA3,
    "gemma3_linear_rope": {
        **_GEMMA3,
        "final_logit_softcapping": 8.0,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    },
}

PROMPT_LENGTHS = (1, 7, 40)  # 40 is past every window (8) and original rope length (16)
NUM_GREEDY_TOKENS = 32
LOGIT_POSITIONS = (0, 3, 6, 7, 8, 15, 16, 17, 24, 31, 38, 39)  # those of each prompt that exist


def prompts(case: str) -> list[list[int]]:
    """Return one prompt of each length, as token ids."""
    random = np.random.RandomState(_seed(case, "prompts"))
    return [random.randint(3, CASES[case]["vocab_size"], size=length).tolist() for length in PROMPT_LENGTHS]


def tensor_shapes(case: str) -> dict[str, tuple[int, ...]]:
    """Return every tensor of the case's checkpoint, by Hugging Face name, as [out, in]."""
    config = CASES[case]
    dim, mlp_dim, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    head_dim = config.get("head_dim", dim // config["num_attention_heads"])
    q_dim, kv_dim = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    is_qwen2, is_gemma = config["model_type"] == "qwen2", config["model_type"] == "gemma3_text"
    layer: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": (q_dim, dim),
        "self_attn.k_proj.weight": (kv_dim, dim),
        "self_attn.v_proj.weight": (kv_dim, dim),
        "self_attn.o_proj.weight": (dim, q_dim),
        "mlp.gate_proj.weight": (mlp_dim, dim),
        "mlp.up_proj.weight": (mlp_dim, dim),
        "mlp.down_proj.weight": (dim, mlp_dim),
        "input_layernorm.weight": (dim,),
        "post_attention_layernorm.weight": (dim,),
    }
    if config.get("attention_bias") or is_qwen2:
        layer |= {
            f"self_attn.{name}_proj.bias": (size,) for name, size in zip("qkv", (q_dim, kv_dim, kv_dim), strict=True)
        }
    if config.get("attention_bias"):
        layer["self_attn.o_proj.bias"] = (dim,)
    if config.get("mlp_bias"):
        layer |= {"mlp.gate_proj.bias": (mlp_dim,), "mlp.up_proj.bias": (mlp_dim,), "mlp.down_proj.bias": (dim,)}
    if config["model_type"] == "qwen3" or is_gemma:
        layer |= {"self_attn.q_norm.weight": (head_dim,), "self_attn.k_norm.weight": (head_dim,)}
    if is_gemma:
        layer |= {"pre_feedforward_layernorm.weight": (dim,), "post_feedforward_layernorm.weight": (dim,)}
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, dim), "model.norm.weight": (dim,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, dim)
    for i in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    return shapes


def weights(case: str) -> dict[str, np.ndarray]:
    """Draw every tensor of the case's checkpoint, float32."""
    is_gemma = CASES[case]["model_type"] == "gemma3_text"
    return {name: _tensor(case, name, shape, is_gemma) for name, shape in tensor_shapes(case).items()}


def _tensor(case: str, name: str, shape: tuple[int, ...], is_gemma: bool) -> np.ndarray:
    noise = np.random.RandomState(_seed(case, name)).standard_normal(shape)
    if name.endswith("norm.weight"):  # Gemma's are offsets from 1
        return (0.2 * noise + (0.0 if is_gemma else 1.0)).astype(np.float32)
    if name.endswith("bias"):
        return (0.3 * noise).astype(np.float32)
    sharpness = 2.0 if "q_proj" in name or "k_proj" in name else 1.0  # makes attention depend on position
    return (sharpness * noise / np.sqrt(shape[-1])).astype(np.float32)


def _seed(case: str, name: str) -> int:
    return zlib.crc32(f"{case}/{name}".encode())
