"""Orbax directories: a model's weights as the model holds them, with all that is needed to run it again.

    DIR/pagedjax_model.json     format version and ModelConfig; written last, so that it marks a complete directory
    DIR/params/                 Orbax checkpoint of a flat dict, parameter path ("layers.0.mlp.down.kernel") -> array
    DIR/tokenizer.json, ...     what transformers' save_pretrained writes; generation_config.json where there is one

Restoring puts each array on the device as it is read, already in the wanted type.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from pagedjax.config import EngineConfig
from pagedjax.errors import CheckpointError, ConfigError
from pagedjax.loading.generation_config import FILE_NAME as GENERATION_CONFIG_FILE
from pagedjax.loading.generation_config import read_generation_config
from pagedjax.loading.gguf import GGUFSource
from pagedjax.loading.hub import locate
from pagedjax.loading.safetensors import SafetensorsSource
from pagedjax.loading.weights import LoadedModel, abstract_model, load_weights, resolve_dtype
from pagedjax.models.config import ModelConfig, RopeConfig
from pagedjax.text.tokenizer import PreTrainedTokenizerFast, load_tokenizer

MODEL_FILE = "pagedjax_model.json"
PARAMS_DIRECTORY = "params"
FORMAT_VERSION = 1


def is_orbax_directory(path: Path) -> bool:
    """Say whether `path` is a complete directory of this format."""
    return (path / MODEL_FILE).is_file()


def convert(config: EngineConfig, out: Path) -> None:
    """Load the model and tokenizer that `config` names and save them as an Orbax directory.

    `dtype="auto"` keeps every bit: the checkpoint's type, and float32 for GGUF files, whatever their quantisation.

    Raises:
        ConfigError: the model cannot be loaded, or `out` exists and is not an empty directory.
    """
    _check_empty(out)
    path = locate(config)
    if is_orbax_directory(path):
        raise ConfigError(f"{path} is an Orbax directory already; copy it, or convert the model it was made from")
    is_gguf = path.suffix == ".gguf"
    tokenizer = load_tokenizer(dataclasses.replace(config, model=str(path)))
    generation_config = read_generation_config(path)  # its errors come before anything loads
    source = GGUFSource(path) if is_gguf else SafetensorsSource(path)
    try:
        lossless = "float32" if is_gguf else source.model_config.dtype
        loaded = load_weights(source, lossless if config.dtype == "auto" else config.dtype)
    finally:
        source.close()
    hf_tokenizer = None if tokenizer is None else tokenizer.hf
    save_orbax(out, loaded, tokenizer=hf_tokenizer, generation_config=generation_config)


def save_orbax(
    path: Path,
    loaded: LoadedModel,
    *,
    tokenizer: PreTrainedTokenizerFast | None = None,
    generation_config: dict[str, Any] | None = None,
) -> None:
    """Save a model to the new or empty directory `path`.

    Raises:
        ConfigError: `path` exists and is not an empty directory.
    """
    import orbax.checkpoint as ocp  # seconds to import

    _check_empty(path)
    path.mkdir(parents=True, exist_ok=True)
    state = nnx.state(loaded.model)
    arrays = {_dotted(keys): variable.get_value() for keys, variable in nnx.to_flat_state(state)}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path.absolute() / PARAMS_DIRECTORY, arrays)
    if tokenizer is not None:
        tokenizer.save_pretrained(path)
    if generation_config:
        (path / GENERATION_CONFIG_FILE).write_text(json.dumps(generation_config, indent=2) + "\n", encoding="utf-8")
    content = {"format": FORMAT_VERSION, "model_config": dataclasses.asdict(loaded.config)}
    (path / MODEL_FILE).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def load_orbax(path: Path, dtype: str) -> LoadedModel:
    """Restore a model onto the first device.

    `dtype` is `EngineConfig.dtype`; "auto" means what it does for other formats.

    Raises:
        CheckpointError: the directory is incomplete or damaged, or its arrays do not fit its configuration.
    """
    config = read_orbax_config(path)
    graphdef, state = abstract_model(config, resolve_dtype(dtype, config))
    sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    flat = nnx.to_flat_state(state)
    wanted = {_dotted(keys): jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=sharding) for keys, v in flat}
    arrays = _restore(path, wanted)
    restored = [(keys, variable.replace(arrays[_dotted(keys)])) for keys, variable in flat]
    return LoadedModel(config, nnx.merge(graphdef, nnx.from_flat_state(restored)))


def read_orbax_config(path: Path) -> ModelConfig:
    """Read the configuration of an Orbax directory.

    Raises:
        CheckpointError: the file is missing, damaged or of another version.
    """
    file = path / MODEL_FILE
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        version, fields = content["format"], content["model_config"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{file} cannot be read ({error!r}); convert the model again") from error
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"{file} has format {version!r}, this version reads {FORMAT_VERSION}; convert the model again"
        )
    try:
        return _config_from_json(fields)
    except (TypeError, AttributeError, ConfigError) as error:  # a field is unknown, missing or wrong
        raise CheckpointError(f"{file} does not describe a model ({error}); convert the model again") from error


def _restore(path: Path, wanted: dict[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    import orbax.checkpoint as ocp

    directory = path.absolute() / PARAMS_DIRECTORY
    with ocp.StandardCheckpointer() as checkpointer:
        try:
            stored = checkpointer.metadata(directory).item_metadata.tree
        except Exception as error:  # orbax raises what its file formats raise
            raise CheckpointError(
                f"{directory} is not a complete Orbax checkpoint ({error}); convert the model again"
            ) from error
        _check_fit(directory, {name: tuple(array.shape) for name, array in stored.items()}, wanted)
        try:
            return checkpointer.restore(directory, wanted)
        except Exception as error:
            raise CheckpointError(f"{directory} is damaged ({error}); convert the model again") from error


def _check_fit(directory: Path, stored: dict[str, tuple[int, ...]], wanted: dict[str, jax.ShapeDtypeStruct]) -> None:
    problems = [f"{name} is missing" for name in wanted if name not in stored]
    problems += [f"{name} is unexpected" for name in stored if name not in wanted]
    problems += [
        f"{name} is {list(stored[name])}, not {list(array.shape)}"
        for name, array in wanted.items()
        if name in stored and stored[name] != array.shape
    ]
    if problems:
        raise CheckpointError(
            f"{directory} does not fit the model that {MODEL_FILE} describes: {'; '.join(problems[:20])}; "
            "convert the model again"
        )


def _config_from_json(fields: dict[str, Any]) -> ModelConfig:
    """Undo `dataclasses.asdict` and JSON's lists in place of tuples."""
    ropes = {name: _rope_from_json(fields[name]) for name in ("rope", "local_rope") if fields.get(name) is not None}
    sequences = {name: tuple(value) for name, value in fields.items() if isinstance(value, list)}
    return ModelConfig(**{**fields, **sequences, **ropes})


def _rope_from_json(fields: dict[str, Any]) -> RopeConfig:
    return RopeConfig(theta=fields["theta"], scaling=tuple((key, value) for key, value in fields["scaling"]))


def _check_empty(path: Path) -> None:
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ConfigError(f"{path} exists and is not an empty directory; remove it or choose another")


def _dotted(keys: tuple[Any, ...]) -> str:
    return ".".join(map(str, keys))
