"""The forward contract: one lowered function a kind of layer, a pool updated in place, harmless pads, stated types."""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pagedjax.errors import ConfigError
from pagedjax.loading.hf_config import model_config_from_hf
from pagedjax.models import MODEL_CLASSES, model_class
from pagedjax.models.config import ModelConfig
from pallas_kernels.rope_and_cache.reference import write_slots
from tests.models.paged_forward import PagedForward
from tests.oracles import tiny_models

pytestmark = pytest.mark.usefixtures("compiled_quickly")

LLAMA = model_config_from_hf(tiny_models.CASES["llama3_rope"])
GEMMA = model_config_from_hf(tiny_models.CASES["gemma3"])


def random_forward(config: ModelConfig, dtype: jnp.dtype = jnp.float32) -> PagedForward:
    model = model_class(config.architecture)(config, dtype=dtype, rngs=nnx.Rngs(3))
    return PagedForward(model, dtype)


@pytest.mark.parametrize(("config", "kinds"), [(replace(LLAMA, num_layers=5), 1), (GEMMA, 2)])
def test_layers_of_one_kind_are_lowered_once(config, kinds):
    text = random_forward(config).lower({"request": [5, 6, 7]}).as_text()
    assert len(re.findall(r"func\.func private @\w*run_layer\w*\(", text)) == kinds
    assert len(re.findall(r"call @\w*run_layer\w*\(", text)) == config.num_layers


def test_the_donated_pool_is_written_in_place():
    forward = random_forward(LLAMA)
    before = [array.unsafe_buffer_pointer() for array in jax.tree.leaves(forward.cache)]
    forward({"request": [5, 6, 7]})
    assert [array.unsafe_buffer_pointer() for array in jax.tree.leaves(forward.cache)] == before


def test_a_step_has_no_temporary_of_the_size_of_a_pool():
    forward = random_forward(LLAMA)
    pool = jax.ShapeDtypeStruct((1 << 16, LLAMA.num_kv_heads, 8, LLAMA.head_dim), jnp.float32)
    cache = [(pool, pool)] * LLAMA.num_layers
    lowered = forward.step.lower(forward.leaves, *forward.inputs({"request": [5]}), cache)
    assert lowered.compile().memory_analysis().temp_size_in_bytes < pool.size * 4


def test_only_the_slots_of_real_tokens_change():
    forward = random_forward(LLAMA)
    forward({"request": list(range(5, 16))})
    written = [(forward.tables["request"][i // 8], i % 8) for i in range(11)]
    for array in jax.tree.leaves(forward.cache):
        changed = (np.asarray(array) != 1e3).any(axis=(1, 3))  # [P, S]
        assert sorted(zip(*(axis.tolist() for axis in changed.nonzero()), strict=True)) == sorted(written)


def test_a_slot_past_the_end_is_dropped():
    pool = jnp.zeros((3, 2, 4, 2), jnp.float32)
    new = jnp.ones((2, 2, 2), jnp.float32)
    written = write_slots(pool, new, jnp.asarray([12, 5], jnp.int32))
    assert written[1, :, 1].tolist() == [[1, 1], [1, 1]]
    assert written.sum() == 4


def test_bfloat16_weights_give_bfloat16_hidden_states_and_float32_logits():
    forward = random_forward(GEMMA, jnp.bfloat16)
    logits, cache = jax.eval_shape(forward.step, forward.leaves, *forward.inputs({"request": [5]}), forward.cache)
    assert logits.dtype == jnp.float32
    assert {leaf.dtype for leaf in jax.tree.leaves(cache)} == {jnp.dtype(jnp.bfloat16)}


def test_bfloat16_logits_are_near_the_float32_ones():
    config = replace(LLAMA, tie_word_embeddings=True)
    exact = random_forward(config)
    rounded = random_forward(config, jnp.bfloat16)
    rounded.leaves = [leaf.astype(jnp.bfloat16) for leaf in exact.leaves]
    difference = exact({"a": [9, 8, 7]})["a"] - rounded({"a": [9, 8, 7]})["a"]
    assert 0 < np.abs(difference).max() < 0.05 * np.abs(exact({"b": [9, 8, 7]})["b"]).max()


def test_a_layer_has_few_leaves():
    state = nnx.split(model_class("Qwen2ForCausalLM")(LLAMA, dtype=jnp.float32, rngs=nnx.Rngs(0)))[1]
    assert len(jax.tree.leaves(state)) == 6 * LLAMA.num_layers + 3


def test_every_parameter_has_weight_names_in_its_table():
    for name, case in tiny_models.CASES.items():
        config = model_config_from_hf(case)
        model = model_class(config.architecture)(config, dtype=jnp.float32, rngs=nnx.Rngs(0))
        paths = {".".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(model))}
        table = model.weight_names(config.num_layers)
        assert {tensor for path in paths for tensor in table[path]} == tiny_models.tensor_shapes(name).keys()


def test_an_unsupported_architecture_lists_the_supported():
    with pytest.raises(ConfigError, match="'MambaForCausalLM' is not supported") as error:
        model_class("MambaForCausalLM")
    assert all(name in str(error.value) for name in MODEL_CLASSES)
