"""Flax NNX definitions of decoder-only models behind one forward contract.

`Model(config, dtype=..., rngs=...)`; `model(token_ids, batch, kv_cache) -> (hidden, kv_cache)`;
`model.compute_logits(hidden) -> logits`. Knows nothing of files, requests or sampling.
"""

from pagedjax.errors import ConfigError
from pagedjax.models.causal_lm import CausalLM
from pagedjax.models.gemma import Gemma3ForCausalLM
from pagedjax.models.llama import LlamaForCausalLM

MODEL_CLASSES: dict[str, type[CausalLM]] = {
    "LlamaForCausalLM": LlamaForCausalLM,
    "MistralForCausalLM": LlamaForCausalLM,
    "Qwen2ForCausalLM": LlamaForCausalLM,
    "Qwen3ForCausalLM": LlamaForCausalLM,
    "Gemma3ForCausalLM": Gemma3ForCausalLM,
}
"""Hugging Face architecture -> the class that implements it."""


def model_class(architecture: str) -> type[CausalLM]:
    """Return the class for a Hugging Face architecture name.

    Raises:
        ConfigError: the architecture is not supported; the message lists those that are.
    """
    if architecture not in MODEL_CLASSES:
        raise ConfigError(f"architecture {architecture!r} is not supported; supported are {', '.join(MODEL_CLASSES)}")
    return MODEL_CLASSES[architecture]
