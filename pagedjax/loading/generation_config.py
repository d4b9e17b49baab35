"""What a model's generation_config.json says: default sampling parameters and the ids that end a sequence.

`--generation-config` picks the file: "auto" is the model directory's, "vllm" keeps the sampling defaults of
`SamplingParams`, anything else is a directory. GGUF files say the same in their metadata; a model may also say nothing.
It knows no requests.
"""

import json
from pathlib import Path
from typing import Any

from pagedjax.config import EngineConfig
from pagedjax.errors import ConfigError, InvalidRequestError
from pagedjax.loading import gguf_config, hub
from pagedjax.loading.gguf_file import GGUFFile
from pagedjax.sampling_params import SamplingParams

FILE_NAME = "generation_config.json"
SAMPLING_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def generation_defaults(config: EngineConfig) -> dict[str, Any]:
    """Return the model's defaults of `SamplingParams` fields, and `eos_token_ids` (a tuple) where it lists any.

    Raises:
      ConfigError: the file is missing where `--generation-config` names a directory, unreadable or out of range.
    """
    source = _source(config)
    path, values = _file(source), read_generation_config(source)
    names = () if config.generation_config == "vllm" else SAMPLING_FIELDS
    defaults = {name: values[name] for name in names if values.get(name) is not None}
    try:
        SamplingParams(**defaults)
    except InvalidRequestError as error:
        raise ConfigError(f"{path}: {error}; correct it or pass --generation-config vllm") from error
    eos_token_ids = _token_ids(values.get("eos_token_id"), path)
    return defaults | ({"eos_token_ids": eos_token_ids} if eos_token_ids else {})


def read_generation_config(source: Path) -> dict[str, Any]:
    """Return all that the model in the directory or GGUF file `source` says of generation, {} where it says nothing.

    Raises:
      ConfigError: its generation_config.json is unreadable or no JSON object.
    """
    path = _file(source)
    if path == source:
        file = GGUFFile(path)
        try:
            return gguf_config.generation_defaults(file)
        finally:
            file.close()
    if not path.is_file():
        return {}
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds a {type(values).__name__}; it must be a JSON object")
    return values


def _source(config: EngineConfig) -> Path:
    """Where to look: the directory that --generation-config names, or the model's own or GGUF file."""
    if config.generation_config in ("auto", "vllm"):
        return hub.locate(config, with_weights=False)
    path = Path(config.generation_config) / FILE_NAME
    if not path.is_file():
        raise ConfigError(f"{path} does not exist; --generation-config takes 'auto', 'vllm' or a directory with it")
    return path.parent


def _file(source: Path) -> Path:
    return source if source.suffix == ".gguf" and source.is_file() else source / FILE_NAME


def _token_ids(value: Any, path: Path) -> tuple[int, ...]:
    """`eos_token_id` is one id, a list of ids, or null."""
    token_ids = value if isinstance(value, list) else [] if value is None else [value]
    for token_id in token_ids:
        if not isinstance(token_id, int) or isinstance(token_id, bool) or token_id < 0:
            raise ConfigError(f"{path}: eos_token_id holds {token_id!r}; token ids are integers of 0 or more")
    return tuple(token_ids)
