"""Weights that the caller already holds: an nnx state of the model, or arrays under Hugging Face names."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer
from jax.sharding import SingleDeviceSharding
from jax.typing import ArrayLike, DTypeLike

from pagedjax.device import default_device
from pagedjax.errors import CheckpointError
from pagedjax.loading.weights import LoadedModel, abstract_model, load_weights
from pagedjax.models.config import ModelConfig


class ArraySource:
    """A flat mapping from Hugging Face names to [out, in] arrays. `WeightSource` says what the methods mean."""

    origin = "params"

    def __init__(self, arrays: Mapping[str, ArrayLike], model_config: ModelConfig):
        self.model_config = model_config
        self._arrays = arrays

    def names(self) -> list[str]:
        """List every array."""
        return sorted(self._arrays)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return one array's shape."""
        return np.shape(self._arrays[name])

    def load(self, name: str) -> np.ndarray:
        """Copy one array to the host; other floating types become float32."""
        if (problem := _problem(self._arrays[name])) is not None:
            raise CheckpointError(f"params: {name} {problem}")
        array = np.asarray(self._arrays[name])
        return array if array.dtype in (np.float32, np.float16, jnp.bfloat16) else array.astype(np.float32)

    def close(self) -> None:
        """Do nothing: the arrays are the caller's."""


def model_from_params(params: Any, model_config: ModelConfig, *, dtype: DTypeLike, device: Any = None) -> LoadedModel:
    """Build a model from an `nnx.State` of it (or its nested dict), or from a flat dict of Hugging Face names.

    The model's arrays are copies on `device`, or on JAX's default one, wherever the caller's are: it may shard them
    over a mesh, donate or change them.

    Raises:
        CheckpointError: names, shapes or types do not fit the model, or an array holds nothing; every mismatch is in
            the message.
    """
    device = device or default_device()
    with jax.default_device(device):
        if isinstance(params, Mapping) and all(isinstance(key, str) and "." in key for key in params):
            return load_weights(ArraySource(params, model_config), dtype)
        return _model_from_state(params, model_config, dtype, device)


def _model_from_state(params: Any, config: ModelConfig, dtype: DTypeLike, device: Any) -> LoadedModel:
    graphdef, expected = abstract_model(config, dtype)
    given = {jax.tree_util.keystr(path): leaf for path, leaf in _leaves(params)}
    wanted = {jax.tree_util.keystr(path): leaf for path, leaf in _leaves(expected)}
    problems = [f"{path} is missing" for path in wanted.keys() - given.keys()]
    problems += [f"{path} is unexpected" for path in given.keys() - wanted.keys()]
    problems += [
        f"{path} is {list(np.shape(given[path]))}, not {list(leaf.shape)}"
        for path, leaf in wanted.items()
        if path in given and np.shape(given[path]) != leaf.shape
    ]
    problems += [f"{path} {problem}" for path, leaf in given.items() if (problem := _problem(leaf)) is not None]
    if problems:
        raise CheckpointError(f"params do not fit {config.architecture}: " + "; ".join(sorted(problems)[:20]))
    arrays = [_copy(given[path], dtype, device) for path in wanted]
    state = jax.tree.unflatten(jax.tree.structure(expected), arrays)
    return LoadedModel(config, nnx.merge(graphdef, state))


def _problem(leaf: Any) -> str | None:
    """Say why something cannot be weights, or None."""
    if isinstance(leaf, Tracer):
        return "is traced; pass it from outside of jit, grad and vmap"
    if not hasattr(leaf, "__array__"):
        return f"is a {type(leaf).__name__}; pass an array"
    if isinstance(leaf, jax.Array) and leaf.is_deleted():
        return "was deleted or donated; pass the array that took its place"
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        return "lies partly in other processes; gather it first"
    if isinstance(leaf, jax.Array | np.ndarray) and not jnp.issubdtype(leaf.dtype, jnp.floating):
        return f"is {leaf.dtype}; pass floating point numbers"
    return None


def _copy(leaf: Any, dtype: DTypeLike, device: Any) -> jax.Array:
    """Copy an array from wherever it is."""
    array = leaf if isinstance(leaf, jax.Array) else np.asarray(leaf)
    array = jax.device_put(array, SingleDeviceSharding(device))  # beside a mere device, its type would keep its mesh
    return jnp.array(array, dtype=dtype, copy=True)  # what was there already, or a shard, may be the caller's memory


def _leaves(params: Any) -> list[tuple[tuple[Any, ...], Any]]:
    """Flatten with paths of plain keys, so that a State and its nested dict agree."""
    pure = nnx.to_pure_dict(params) if isinstance(params, nnx.State) else params
    return jax.tree_util.tree_flatten_with_path(pure)[0]
