"""Random weights from a configuration alone: for speed, memory and shape experiments, never for text."""

from flax import nnx
from jax.typing import DTypeLike

from pagedjax.loading.weights import LoadedModel
from pagedjax.models import model_class
from pagedjax.models.config import ModelConfig


def dummy_model(config: ModelConfig, *, dtype: DTypeLike, seed: int) -> LoadedModel:
    """Build a model as its constructor initialises it: normal kernels, drawn on the device one at a time."""
    model = model_class(config.architecture)(config, dtype=dtype, rngs=nnx.Rngs(seed))
    return LoadedModel(config, model)
