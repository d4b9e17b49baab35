"""Finds a model's configuration and weights, wherever they lie, and puts them on the device.

`load_model` picks the format; each format is one file here. Orbax is imported only when it may be used: it needs
transformers.
"""

from contextlib import closing
from pathlib import Path
from typing import Any

from pagedjax.config import EngineConfig
from pagedjax.errors import ConfigError
from pagedjax.loading.arrays import model_from_params
from pagedjax.loading.dummy import dummy_model
from pagedjax.loading.gguf import GGUFSource
from pagedjax.loading.hf_config import read_model_config
from pagedjax.loading.hub import locate
from pagedjax.loading.safetensors import SafetensorsSource
from pagedjax.loading.weights import LoadedModel, WeightSource, load_weights, resolve_dtype
from pagedjax.models.config import ModelConfig

__all__ = ["LoadedModel", "WeightSource", "load_model", "resolve_dtype"]


def load_model(
    config: EngineConfig, *, params: Any = None, model_config: ModelConfig | None = None, device: Any = None
) -> LoadedModel:
    """Load the model that `config.model` names.

    `params` are weights that the caller holds and need `model_config`: an `nnx.State` of the model (or its nested
    dict), or a flat dict from Hugging Face names to [out, in] arrays; they are copied to `device`, or to JAX's default
    one. `model_config` also serves `load_format="dummy"`.

    Raises:
        ConfigError: the model cannot be found or is not supported.
        CheckpointError: its weights are missing, corrupt or do not fit.
    """
    if not isinstance(model_config, ModelConfig | None):
        raise ConfigError(f"model_config is {model_config!r:.80}; pass a pagedjax.ModelConfig")
    if params is not None:
        if model_config is None:
            raise ConfigError("params are given without model_config; pass the ModelConfig that they belong to")
        dtype = resolve_dtype(config.dtype, model_config)
        return model_from_params(params, model_config, dtype=dtype, device=device)
    if config.has_dummy_weights:
        model_config = model_config or load_model_config(config)
        return dummy_model(model_config, dtype=resolve_dtype(config.dtype, model_config), seed=config.seed)
    if model_config is not None:
        raise ConfigError(f"model_config is given for {config.model!r}, which has its own; leave it out or pass params")
    return _load_path(locate(config), config)


def load_model_config(config: EngineConfig) -> ModelConfig:
    """Return the shape of the model that `config.model` names, without loading its weights.

    Raises:
        ConfigError: the model cannot be found or is not supported.
    """
    from pagedjax.loading.orbax import is_orbax_directory, read_orbax_config

    path = locate(config, with_weights=False)
    if path.suffix == ".gguf":
        with closing(GGUFSource(path)) as source:
            return source.model_config
    return read_orbax_config(path) if is_orbax_directory(path) else read_model_config(path)


def _load_path(path: Path, config: EngineConfig) -> LoadedModel:
    load_format = _detect(path)
    if config.load_format not in ("auto", load_format):
        raise ConfigError(
            f"load_format is {config.load_format!r}, but {path} is {load_format}; leave it out or pass another --model"
        )
    if load_format == "orbax":
        from pagedjax.loading.orbax import load_orbax

        return load_orbax(path, config.dtype)
    source = GGUFSource(path) if load_format == "gguf" else SafetensorsSource(path)
    try:
        return load_weights(source, resolve_dtype(config.dtype, source.model_config))
    finally:
        source.close()


def _detect(path: Path) -> str:
    if path.is_file():
        if path.suffix != ".gguf":
            raise ConfigError(f"{path} is a file but not a .gguf file; pass the directory that holds config.json")
        return "gguf"
    from pagedjax.loading.orbax import is_orbax_directory

    return "orbax" if is_orbax_directory(path) else "safetensors"
