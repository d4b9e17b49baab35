"""Llama and the families of its shape: Llama 2, 3 and later, CodeLlama, SmolLM2, Mistral, Qwen 2, 2.5 and 3.

Their differences (biases, q and k norms, windows, rope scaling, tied heads) are fields of `ModelConfig`.
"""

from pagedjax.models.causal_lm import CausalLM


class LlamaForCausalLM(CausalLM):
    """The plain pre-norm decoder."""
