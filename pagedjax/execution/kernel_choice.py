"""Which backend of each op a model runs on this device: for the log, for the cache's keys, and for who may lower."""

from typing import Any

import jax
from jax.typing import DTypeLike

from pagedjax.models import MODEL_CLASSES
from pagedjax.models.config import ModelConfig
from pallas_kernels import add_rms_norm, gated_matmul, hopper, matmul, paged_attention, rope_and_cache

SOME, MANY = 64, 1024  # tokens of the steps that are spoken of


def have_kernels() -> bool:
    """Whether the device runs the kernels of all ops."""
    ops = (add_rms_norm, gated_matmul, matmul, rope_and_cache)
    return hopper.unavailable() is None and all(op.is_sound() for op in ops)


def kernel_lines(model: ModelConfig, dtype: DTypeLike, block_size: int) -> list[str]:
    """Say which backend of each op this model runs on this device, and why."""
    dim, hidden, head_dim = model.hidden_size, model.intermediate_size, model.head_dim
    num_heads, num_kv_heads = model.num_heads, model.num_kv_heads
    num_projected = num_heads + 2 * num_kv_heads

    def array(*shape: int) -> Any:  # an abstract one
        return jax.ShapeDtypeStruct(shape, dtype)

    k_pool, gate_up = array(1, num_kv_heads, block_size, head_dim), array(dim, 2 * hidden)
    backends = {
        "paged_attention": paged_attention.default_backend(array(1, num_heads, head_dim), k_pool),
        "rope_and_cache": rope_and_cache.default_backend(array(1, num_projected, head_dim), k_pool),
        f"matmul of {SOME} tokens": matmul.default_backend(array(SOME, dim), array(dim, num_heads * head_dim)),
        f"gated_matmul of {MANY} tokens": gated_matmul.default_backend(array(MANY, dim), gate_up),
    }
    known = MODEL_CLASSES.get(model.architecture)
    if known is None or not known.layer_class.norm_unit_offset:  # of other norms XLA makes its own
        backends["add_rms_norm"] = add_rms_norm.default_backend(array(1, dim))
    return [f"{op}: {name} ({why})" for op, (name, why) in backends.items()]
