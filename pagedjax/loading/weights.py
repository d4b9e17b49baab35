"""From a checkpoint's tensors to a model's parameters, one parameter at a time.

A `WeightSource` names tensors the Hugging Face way, whatever file they lie in; a model's weight table
(`weight_names`) says which of them make one parameter. This file joins the two: it compares names and
shapes before anything is read and reports every mismatch at once. It knows no file format.
"""

import sys
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PyTree
from tqdm import tqdm

from pagedjax.errors import CheckpointError
from pagedjax.models import model_class
from pagedjax.models.causal_lm import IGNORED_WEIGHTS, CausalLM
from pagedjax.models.config import ModelConfig


@runtime_checkable
class WeightSource(Protocol):
    """The tensors of one checkpoint, in Hugging Face names and [out, in] layout, read lazily."""

    @property
    def origin(self) -> str:
        """The file or directory, for messages."""
        ...

    @property
    def model_config(self) -> ModelConfig:
        """The model that these weights belong to."""
        ...

    def names(self) -> list[str]:
        """List every tensor, without reading any."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape that `load` will return, without reading the tensor."""
        ...

    def load(self, name: str) -> np.ndarray:
        """Read one tensor as float32, float16 or bfloat16 (ml_dtypes).

        Raises:
            CheckpointError: the tensor cannot be read; the message names the file.
        """
        ...

    def close(self) -> None:
        """Release the files; arrays already loaded stay valid."""
        ...


@dataclass(frozen=True)
class LoadedModel:
    """A model with its weights on the device, ready for `nnx.split`."""

    config: ModelConfig
    model: CausalLM


def resolve_dtype(dtype: str, model_config: ModelConfig) -> jnp.dtype:
    """Return the type that `dtype` stands for; "auto" is float32 on a CPU and the checkpoint's type elsewhere."""
    if dtype == "auto":
        dtype = "float32" if jax.default_backend() == "cpu" else model_config.dtype
    return jnp.dtype(dtype)


def load_weights(source: WeightSource, dtype: DTypeLike) -> LoadedModel:
    """Build the model that `source` belongs to and stream its weights to the device, cast to `dtype`.

    Host memory holds one tensor at a time besides what the source keeps; the device holds one
    parameter twice while its parts are joined.

    Raises:
        CheckpointError: tensors are missing, unexpected or of the wrong shape (all are named), or unreadable.
    """
    config = source.model_config
    graphdef, state = abstract_model(config, dtype)
    plans = plan_parameters(source, state)
    arrays = {}
    for plan in tqdm(plans, desc="Loading weights", unit="tensor", file=sys.stderr, disable=None):
        # waiting for each copy frees its array before the next is read
        parts = tuple(jax.block_until_ready(jax.device_put(source.load(t), may_alias=False)) for t in plan.tensors)
        arrays[plan.path] = jax.block_until_ready(_join(parts, is_kernel=plan.is_kernel, dtype=jnp.dtype(dtype)))
    flat = [(path, variable.replace(arrays[_dotted(path)])) for path, variable in nnx.to_flat_state(state)]
    return LoadedModel(config, nnx.merge(graphdef, nnx.from_flat_state(flat)))


def abstract_model(config: ModelConfig, dtype: DTypeLike) -> tuple[nnx.GraphDef, PyTree]:
    """Return the model's structure and its parameters' shapes, allocating nothing."""
    build = model_class(config.architecture)
    return nnx.split(nnx.eval_shape(lambda: build(config, dtype=dtype, rngs=nnx.Rngs(0))))


@dataclass(frozen=True)
class ParameterPlan:
    """One parameter and the checkpoint tensors whose join along the output axis it is."""

    path: str
    tensors: tuple[str, ...]
    is_kernel: bool  # stored [in, out], the checkpoint's tensors being [out, in]


def plan_parameters(source: WeightSource, state: PyTree) -> list[ParameterPlan]:
    """Match every parameter with its tensors.

    Raises:
        CheckpointError: names or shapes do not match; every mismatch is in the message.
    """
    config = source.model_config
    table = model_class(config.architecture).weight_names(config.num_layers)
    available = set(source.names())
    plans, missing, misshapen, wanted = [], [], [], set()
    for path, variable in nnx.to_flat_state(state):
        plan = ParameterPlan(_dotted(path), table[_dotted(path)], is_kernel=path[-1] == "kernel")
        plans.append(plan)
        wanted.update(plan.tensors)
        expected_shapes = _tensor_shapes(plan, variable.shape, config)
        for name, expected in zip(plan.tensors, expected_shapes, strict=True):
            if name not in available:
                missing.append(name)
            elif tuple(source.shape(name)) != expected:
                misshapen.append(f"{name} is {list(source.shape(name))}, not {list(expected)}")
    unexpected = sorted(name for name in available - wanted if not _is_ignored(name, config))
    _raise_mismatches(source, missing=missing, unexpected=unexpected, misshapen=misshapen)
    return plans


def _tensor_shapes(plan: ParameterPlan, shape: tuple[int, ...], config: ModelConfig) -> list[tuple[int, ...]]:
    """Return the shape each of the plan's tensors must have in the checkpoint."""
    if len(plan.tensors) == 3:  # q, k, v
        widths = [heads * config.head_dim for heads in (config.num_heads, config.num_kv_heads, config.num_kv_heads)]
    else:
        widths = [shape[-1] // len(plan.tensors)] * len(plan.tensors)
    return [(width, shape[0]) if plan.is_kernel else (*shape[:-1], width) for width in widths]


def _is_ignored(name: str, config: ModelConfig) -> bool:
    is_tied_head = config.tie_word_embeddings and name == "lm_head.weight"
    return is_tied_head or name.endswith(IGNORED_WEIGHTS)


def _raise_mismatches(source: WeightSource, **mismatches: list[str]) -> None:
    lines = [f"  {len(names)} {kind}: {_shorten(names)}" for kind, names in mismatches.items() if names]
    if lines:
        raise CheckpointError(
            f"{source.origin} does not fit {source.model_config.architecture} as its configuration describes it; "
            "use the configuration that belongs to these weights:\n" + "\n".join(lines)
        )


def _shorten(names: list[str], limit: int = 20) -> str:
    rest = f" and {len(names) - limit} more" if len(names) > limit else ""
    return "; ".join(names[:limit]) + rest


def _dotted(path: tuple[Any, ...]) -> str:
    return ".".join(map(str, path))


@partial(jax.jit, static_argnames=("is_kernel", "dtype"))
def _join(parts: tuple[Float[Array, "..."], ...], *, is_kernel: bool, dtype: jnp.dtype) -> Float[Array, "..."]:
    cast = [(part.T if is_kernel else part).astype(dtype) for part in parts]
    return jnp.concatenate(cast, axis=-1)
