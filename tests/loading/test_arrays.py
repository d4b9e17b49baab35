"""Weights that the caller holds: an nnx state, its nested dict, or Hugging Face names."""

import os
import subprocess
import sys

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


def deleted(leaf):
    copy = jnp.array(leaf, copy=True)
    copy.delete()
    return copy


UNFIT = [
    (deleted, "was deleted or donated; pass the array that took its place"),
    (lambda leaf: leaf.astype(jnp.int8), "is int8; pass floating point numbers"),
    (lambda leaf: leaf.astype(jnp.complex64), "is complex64; pass floating point numbers"),
    (lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), "is a ShapeDtypeStruct; pass an array"),
]


@pytest.mark.parametrize(("change", "message"), UNFIT)
def test_leaves_that_are_no_weights_are_refused_by_name(model, change, message):
    """They took the place of the engine's good weights, and the next step failed or made nonsense of them."""
    params = nnx.to_pure_dict(nnx.state(model))
    params["norm"]["scale"] = change(params["norm"]["scale"])
    with pytest.raises(CheckpointError) as error:
        load_model(EngineConfig(), params=params, model_config=GEMMA)
    assert str(error.value) == f"params do not fit Gemma3ForCausalLM: ['norm']['scale'] {message}"


@pytest.mark.parametrize(("change", "message"), UNFIT)
def test_arrays_under_hugging_face_names_that_are_no_weights_are_refused_by_name(change, message):
    arrays = {name: jnp.asarray(array) for name, array in tiny_models.weights("gemma3").items()}
    arrays["model.norm.weight"] = change(arrays["model.norm.weight"])
    with pytest.raises(CheckpointError) as error:
        load_model(EngineConfig(), params=arrays, model_config=GEMMA)
    assert str(error.value) == f"params: model.norm.weight {message}"


def test_traced_params_are_refused_by_name(model):
    """The engine kept the tracers, which mean nothing outside of the function."""

    def load(params):
        load_model(EngineConfig(), params=params, model_config=GEMMA)

    with pytest.raises(CheckpointError, match=r"\['embed'\]\['embedding'\] is traced; pass it from outside of jit"):
        jax.jit(load)(nnx.state(model))


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


TRAINED_ON_A_MESH = """
import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from pagedjax import LLM, SamplingParams
from pagedjax.loading.hf_config import model_config_from_hf
from pagedjax.models import model_class
from tests.oracles import tiny_models

config = model_config_from_hf(tiny_models.CASES["smollm2"])
first, second = jax.devices()
both, one = jax.make_mesh((2,), ("data",)), jax.make_mesh((1,), ("data",), devices=[second])
model = model_class(config.architecture)(config, dtype=jnp.float32, rngs=nnx.Rngs(5))
weights = nnx.to_pure_dict(nnx.state(model))

def on(where):
    return jax.device_put(jax.tree.map(jnp.copy, weights), where)

options = dict(max_num_seqs=1, max_num_batched_tokens=16, max_model_len=32, show_progress=False)
with jax.default_device(second):
    llm = LLM(params=on(NamedSharding(both, PartitionSpec())), model_config=config, **options)

def generate():
    return llm.generate([5, 6, 7], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True), use_tqdm=False)[0]

expected = generate().outputs[0].token_ids
sharded, replicated = (NamedSharding(both, PartitionSpec(*axes)) for axes in (["data"], []))
for where in (sharded, replicated, NamedSharding(one, PartitionSpec()), first, second, None):
    params = on(where)
    llm.update_weights(params)
    jax.tree.map(lambda leaf: leaf.delete(), params)
    assert generate().outputs[0].token_ids == expected
    assert {device for leaf in llm.engine._runner._leaves for device in leaf.devices()} == {second}
assert llm.engine.stats()["num_compilations_after_ready"] == 0
print("fine")
"""


@pytest.mark.slow
def test_weights_from_a_mesh_or_another_device_are_brought_to_the_engine_s_own():
    """They took the place of the engine's weights where they were, and the next step refused their shardings."""
    environ = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    ran = subprocess.run([sys.executable, "-c", TRAINED_ON_A_MESH], capture_output=True, text=True, env=environ)
    assert ran.stdout == "fine\n", ran.stderr
