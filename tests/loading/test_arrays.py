"""Weights that the caller holds: an nnx state, its nested dict, or Hugging Face names."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pagedjax.config import EngineConfig
from pagedjax.errors import CheckpointError, ConfigError
from pagedjax.loading import load_model
from pagedjax.loading.hf_config import model_config_from_hf
from pagedjax.models import model_class
from tests.oracles import tiny_models

GEMMA = model_config_from_hf(tiny_models.CASES["gemma3"])


def leaves(model):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(nnx.state(model))]


def assert_same_leaves(ours, theirs):
    for mine, other in zip(leaves(ours), leaves(theirs), strict=True):
        np.testing.assert_array_equal(mine, other)


@pytest.fixture(scope="module")
def model():
    return model_class(GEMMA.architecture)(GEMMA, dtype=jnp.float32, rngs=nnx.Rngs(5))


@pytest.mark.parametrize("as_params", [nnx.state, lambda model: nnx.to_pure_dict(nnx.state(model))])
def test_a_state_or_its_nested_dict_is_taken_as_it_is(model, as_params):
    loaded = load_model(EngineConfig(), params=as_params(model), model_config=GEMMA)
    assert loaded.config == GEMMA
    assert_same_leaves(loaded.model, model)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_arrays_that_the_caller_donates_afterwards_leave_the_model_its_own(model, dtype):
    """Of one type they were the engine's too, and a training step that donated them deleted its weights."""
    params = jax.tree.map(lambda leaf: jnp.array(leaf, dtype=dtype, copy=True), nnx.state(model))
    loaded = load_model(EngineConfig(dtype=dtype), params=params, model_config=GEMMA)
    expected = jax.tree.map(np.array, params)
    for leaf in jax.tree.leaves(params):
        leaf.delete()  # as donating does
    for mine, other in zip(leaves(loaded.model), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(mine, other)


def test_arrays_under_hugging_face_names_are_fused(model):
    arrays = {name: jnp.asarray(array) for name, array in tiny_models.weights("gemma3").items()}
    loaded = load_model(EngineConfig(), params=arrays, model_config=GEMMA).model
    np.testing.assert_array_equal(loaded.norm.scale[...], arrays["model.norm.weight"])
    np.testing.assert_array_equal(
        loaded.layers[2].mlp_out_norm.scale[...], arrays["model.layers.2.post_feedforward_layernorm.weight"]
    )


def test_params_are_cast_to_the_dtype_option(model):
    loaded = load_model(EngineConfig(dtype="bfloat16"), params=nnx.state(model), model_config=GEMMA)
    assert {leaf.dtype for leaf in leaves(loaded.model)} == {jnp.dtype(jnp.bfloat16)}


def test_params_that_do_not_fit_are_named(model):
    params = nnx.to_pure_dict(nnx.state(model))
    params["norm"]["scale"] = jnp.zeros(3, jnp.float32)
    params["extra"] = jnp.zeros(3, jnp.float32)
    del params["embed"]
    with pytest.raises(CheckpointError) as error:
        load_model(EngineConfig(), params=params, model_config=GEMMA)
    assert "['embed']['embedding'] is missing" in str(error.value)
    assert "['extra'] is unexpected" in str(error.value)
    assert "['norm']['scale'] is [3], not [48]" in str(error.value)


def test_a_name_that_is_missing_from_the_flat_dict_is_named():
    arrays = tiny_models.weights("gemma3")
    del arrays["model.norm.weight"]
    with pytest.raises(
        CheckpointError, match=r"params does not fit Gemma3ForCausalLM.*\n.*1 missing: model.norm.weight"
    ):
        load_model(EngineConfig(), params=arrays, model_config=GEMMA)


def test_params_need_a_model_config(model):
    with pytest.raises(ConfigError, match="without model_config"):
        load_model(EngineConfig(), params=nnx.state(model))
