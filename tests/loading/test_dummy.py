"""Random weights from a configuration alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pagedjax.config import EngineConfig
from pagedjax.errors import ConfigError
from pagedjax.loading import load_model
from pagedjax.loading.hf_config import model_config_from_hf
from tests.loading.tiny_checkpoints import write_checkpoint, write_config
from tests.oracles import tiny_models


def dummy(directory, **options):
    return load_model(EngineConfig(model=str(directory), load_format="dummy", **options))


def leaves(loaded):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(nnx.state(loaded.model))]


def test_a_directory_with_only_a_configuration_is_enough(tmp_path):
    loaded = dummy(write_config(tmp_path, "qwen3"))
    assert loaded.config.architecture == "Qwen3ForCausalLM"
    assert all(np.isfinite(leaf).all() for leaf in leaves(loaded))


def test_the_weights_have_the_structure_of_real_ones(tmp_path):
    real = load_model(EngineConfig(model=str(write_checkpoint(tmp_path, "gemma3"))))
    random = dummy(tmp_path)
    assert nnx.split(random.model)[0] == nnx.split(real.model)[0]
    assert [leaf.shape for leaf in leaves(random)] == [leaf.shape for leaf in leaves(real)]


def test_the_seed_decides_the_weights(tmp_path):
    directory = write_config(tmp_path, "smollm2")
    first, again, other = (leaves(dummy(directory, seed=seed)) for seed in (1, 1, 2))
    assert all((a == b).all() for a, b in zip(first, again, strict=True))
    assert any((a != b).any() for a, b in zip(first, other, strict=True))


def test_a_model_config_is_enough():
    config = model_config_from_hf(tiny_models.CASES["llama3_rope"])
    loaded = load_model(EngineConfig(load_format="dummy", dtype="bfloat16"), model_config=config)
    assert loaded.config == config
    assert {leaf.dtype for leaf in leaves(loaded)} == {jnp.dtype(jnp.bfloat16)}


def test_a_model_config_beside_real_weights_is_refused(tmp_path):
    config = model_config_from_hf(tiny_models.CASES["smollm2"])
    with pytest.raises(ConfigError, match="which has its own"):
        load_model(EngineConfig(model=str(write_checkpoint(tmp_path, "smollm2"))), model_config=config)
