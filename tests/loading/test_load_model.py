"""Which format a model path stands for, in which type it is loaded, and what a wrong path says."""

from dataclasses import replace

import jax.numpy as jnp
import pytest

from pagedjax.config import EngineConfig
from pagedjax.errors import ConfigError
from pagedjax.loading import load_model, resolve_dtype
from pagedjax.loading.hf_config import model_config_from_hf
from tests.loading.tiny_checkpoints import write_checkpoint
from tests.oracles import tiny_models

BFLOAT16 = replace(model_config_from_hf(tiny_models.CASES["smollm2"]), dtype="bfloat16")


def test_auto_is_float32_on_a_cpu_and_the_type_of_the_checkpoint_elsewhere(monkeypatch):
    monkeypatch.setattr("jax.default_backend", lambda: "cpu")
    assert resolve_dtype("auto", BFLOAT16) == jnp.float32
    monkeypatch.setattr("jax.default_backend", lambda: "gpu")
    assert resolve_dtype("auto", BFLOAT16) == jnp.bfloat16
    assert resolve_dtype("float16", BFLOAT16) == jnp.float16


def test_a_directory_loads_by_itself_and_by_named_format(tmp_path):
    directory = str(write_checkpoint(tmp_path, "smollm2"))
    for load_format in ("auto", "safetensors"):
        assert load_model(EngineConfig(model=directory, load_format=load_format)).config.num_layers == 2


@pytest.mark.parametrize("load_format", ["gguf", "orbax"])
def test_a_directory_is_not_read_as_another_format(tmp_path, load_format):
    """The parser of the wrong format told the operator to download a config.json again."""
    directory = str(write_checkpoint(tmp_path, "smollm2"))
    with pytest.raises(ConfigError, match=f"load_format is '{load_format}', but .* is safetensors"):
        load_model(EngineConfig(model=directory, load_format=load_format))


def test_a_path_that_does_not_exist_is_named():
    with pytest.raises(ConfigError, match="'/no/such/model' does not exist"):
        load_model(EngineConfig(model="/no/such/model"))


def test_a_file_of_another_kind_says_what_is_expected(tmp_path):
    path = tmp_path / "model.safetensors"
    path.touch()
    with pytest.raises(ConfigError, match=r"is a file but not a \.gguf file; pass the directory"):
        load_model(EngineConfig(model=str(path)))
