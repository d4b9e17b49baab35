"""Writes tiny models of tests/oracles as Hugging Face directories: one file or shards, in any floating type."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from tests.oracles import tiny_models


def write_checkpoint(directory: Path, case: str, *, dtype: str = "float32", num_shards: int = 1, **config) -> Path:
    """Write config.json and weights; `config` entries override the case's."""
    write_config(directory, case, torch_dtype=dtype, **config)
    tensors = {name: array.astype(np.dtype(dtype)) for name, array in tiny_models.weights(case).items()}
    return write_tensors(directory, tensors, num_shards)


def write_config(directory: Path, case: str, **config) -> Path:
    """Write config.json alone."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(tiny_models.CASES[case] | config))
    return directory


def write_tensors(directory: Path, tensors: dict[str, np.ndarray], num_shards: int = 1) -> Path:
    """Write weights, with an index where there are several shards."""
    if num_shards == 1:
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        return directory
    files = {name: f"model-{i % num_shards + 1:05}-of-{num_shards:05}.safetensors" for i, name in enumerate(tensors)}
    for file in set(files.values()):
        save_file({name: array for name, array in tensors.items() if files[name] == file}, directory / file)
    index = {"metadata": {"total_size": sum(array.nbytes for array in tensors.values())}, "weight_map": files}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory
