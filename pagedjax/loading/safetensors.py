"""Reads a Hugging Face directory of safetensors files, one file or shards with an index, tensor by tensor.

Owns the open files. Knows nothing of models beyond the config.json that lies beside the weights.
"""

import json
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from pagedjax.errors import CheckpointError, ConfigError
from pagedjax.loading.hf_config import read_model_config

INDEX_NAME = "model.safetensors.index.json"
PICKLE_PATTERNS = ("*.bin", "*.pt", "*.pth", "*.ckpt")
FLOAT_TYPES = ("F32", "F16", "BF16")


class SafetensorsSource:
    """The tensors of one directory. `WeightSource` says what the methods mean."""

    def __init__(self, directory: Path):
        self.origin = str(directory)
        self.model_config = read_model_config(directory)
        self._files = [_open(path) for path in find_weight_files(directory)]
        self._file_of = {}
        for path, file in self._files:
            for name in file.keys():  # noqa: SIM118  a safetensors file is not a mapping
                if name in self._file_of:
                    raise CheckpointError(f"tensor {name} is in {self._file_of[name][0]} and {path}; remove one file")
                self._file_of[name] = (path, file)

    def names(self) -> list[str]:
        """List every tensor."""
        return sorted(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        """Read one tensor's shape from its file's header."""
        return tuple(self._file_of[name][1].get_slice(name).get_shape())

    def load(self, name: str) -> np.ndarray:
        """Read one tensor."""
        path, file = self._file_of[name]
        stored_type = file.get_slice(name).get_dtype()
        if stored_type not in FLOAT_TYPES:
            raise CheckpointError(f"{path}: tensor {name} is {stored_type}; supported are {', '.join(FLOAT_TYPES)}")
        try:
            return file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: tensor {name} cannot be read: {error}; download the file again") from error

    def close(self) -> None:
        """Drop the memory maps."""
        self._file_of.clear()
        self._files.clear()


def find_weight_files(directory: Path) -> list[Path]:
    """Return the safetensors files that make up the model in `directory`, those of the index if there is one.

    Raises:
        CheckpointError: there is none, or the index is unreadable or names files that are not there.
        ConfigError: there are only pickled weights.
    """
    index = directory / INDEX_NAME
    if index.exists():
        return _indexed_files(index)
    files = sorted(directory.glob("*.safetensors"))
    if len(files) > 1 and (directory / "model.safetensors") in files:
        return [directory / "model.safetensors"]
    if files:
        return files
    pickles = sorted(path.name for pattern in PICKLE_PATTERNS for path in directory.glob(pattern))
    if pickles:
        raise ConfigError(
            f"{directory} has only pickled weights ({', '.join(pickles[:3])}), which can run code and are refused; "
            "convert them to safetensors"
        )
    raise CheckpointError(
        f"{directory} has no *.safetensors file; download the weights, pass a .gguf file by its own path, "
        "or use --load-format dummy"
    )


def _indexed_files(index: Path) -> list[Path]:
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        files = [index.parent / name for name in sorted(names)]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} is not a readable safetensors index: {error!r}; download it again") from error
    elsewhere = [str(path) for path in files if path.parent != index.parent]
    if elsewhere:
        raise CheckpointError(f"{index} names files outside its directory: {', '.join(elsewhere)}; download it again")
    missing = [path.name for path in files if not path.is_file()]
    if missing:
        raise CheckpointError(f"{index} names {', '.join(missing)}, which {index.parent} lacks; download them")
    return files


def _open(path: Path) -> tuple[Path, safe_open]:
    try:
        return path, safe_open(path, framework="np")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path} is corrupt or truncated ({path.stat().st_size} bytes): {error}; download it again"
        ) from error
