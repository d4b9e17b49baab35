"""Hugging Face directories: single and sharded files, types, heads, and what is said about broken ones."""

import json

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from pagedjax.config import EngineConfig
from pagedjax.errors import CheckpointError, ConfigError
from pagedjax.loading import load_model
from pagedjax.loading.safetensors import SafetensorsSource
from tests.loading.tiny_checkpoints import write_checkpoint, write_config, write_tensors
from tests.oracles import tiny_models


def load(directory, **options):
    return load_model(EngineConfig(model=str(directory), **options))


def parameters(loaded):
    return {
        ".".join(map(str, path)): np.asarray(leaf[...]) for path, leaf in nnx.to_flat_state(nnx.state(loaded.model))
    }


def assert_same_parameters(loaded, other):
    ours, theirs = parameters(loaded), parameters(other)
    assert ours.keys() == theirs.keys()
    for name, array in ours.items():
        np.testing.assert_array_equal(array, theirs[name], err_msg=name)


def test_projections_are_fused_and_transposed(tmp_path):
    loaded = parameters(load(write_checkpoint(tmp_path, "qwen2_yarn")))
    tensors = {name.removeprefix("model."): array for name, array in tiny_models.weights("qwen2_yarn").items()}
    q, k, v = (tensors[f"layers.1.self_attn.{name}_proj.weight"] for name in "qkv")
    np.testing.assert_array_equal(loaded["layers.1.attention.qkv.kernel"], np.concatenate([q, k, v]).T)
    gate, up = (tensors[f"layers.0.mlp.{name}_proj.weight"] for name in ("gate", "up"))
    np.testing.assert_array_equal(loaded["layers.0.mlp.gate_up.kernel"], np.concatenate([gate, up]).T)
    biases = [tensors[f"layers.0.self_attn.{name}_proj.bias"] for name in "qkv"]
    np.testing.assert_array_equal(loaded["layers.0.attention.qkv.bias"], np.concatenate(biases))
    np.testing.assert_array_equal(loaded["embed.embedding"], tensors["embed_tokens.weight"])
    np.testing.assert_array_equal(loaded["head.kernel"], tensors["lm_head.weight"].T)


def test_shards_give_the_weights_of_one_file(tmp_path):
    whole = load(write_checkpoint(tmp_path / "whole", "mistral"))
    assert_same_parameters(load(write_checkpoint(tmp_path / "shards", "mistral", num_shards=3)), whole)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_files_are_widened_exactly(tmp_path, dtype):
    loaded = parameters(load(write_checkpoint(tmp_path, "smollm2", dtype=dtype)))
    expected = tiny_models.weights("smollm2")["model.layers.0.mlp.down_proj.weight"].astype(np.dtype(dtype))
    assert loaded["layers.0.mlp.down.kernel"].dtype == np.float32
    np.testing.assert_array_equal(loaded["layers.0.mlp.down.kernel"], expected.T.astype(np.float32))


def test_the_dtype_option_rounds_the_weights(tmp_path):
    loaded = load(write_checkpoint(tmp_path, "smollm2"), dtype="bfloat16")
    assert {array.dtype for array in parameters(loaded).values()} == {np.dtype(ml_dtypes.bfloat16)}


def test_a_tied_head_in_the_file_and_rotary_buffers_are_ignored(tmp_path):
    directory = write_checkpoint(tmp_path, "smollm2")
    plain = load(directory)
    extra = {
        "lm_head.weight": np.zeros((128, 48), np.float32),
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(4, np.float32),
    }
    write_tensors(directory, tiny_models.weights("smollm2") | extra)
    assert plain.model.head is None
    assert_same_parameters(load(directory), plain)


def test_every_mismatch_is_in_one_error(tmp_path):
    tensors = tiny_models.weights("llama3_rope")
    del tensors["model.norm.weight"], tensors["model.layers.0.self_attn.k_proj.weight"]
    tensors["model.layers.1.mlp.up_proj.weight"] = np.zeros((81, 48), np.float32)
    tensors["model.layers.7.mlp.up_proj.weight"] = np.zeros((80, 48), np.float32)
    write_tensors(write_config(tmp_path, "llama3_rope"), tensors)
    with pytest.raises(CheckpointError) as error:
        load(tmp_path)
    message = str(error.value)
    assert str(tmp_path) in message
    assert "2 missing: " in message
    assert "model.norm.weight" in message
    assert "model.layers.0.self_attn.k_proj.weight" in message
    assert "1 unexpected: model.layers.7.mlp.up_proj.weight" in message
    assert "1 misshapen: model.layers.1.mlp.up_proj.weight is [81, 48], not [80, 48]" in message


def test_swapped_head_counts_are_a_mismatch_although_the_fused_shape_agrees(tmp_path):
    """4 + 2*4 heads of q, k, v are as wide as 8 + 2*2, so only the parts can tell."""
    write_checkpoint(tmp_path, "code_llama", num_attention_heads=8, num_key_value_heads=2, head_dim=12)
    with pytest.raises(CheckpointError, match=r"q_proj.weight is \[48, 48\], not \[96, 48\]"):
        load(tmp_path)


def test_a_missing_separate_head_is_named(tmp_path):
    write_checkpoint(tmp_path, "smollm2", tie_word_embeddings=False)
    with pytest.raises(CheckpointError, match=r"1 missing: lm_head\.weight"):
        load(tmp_path)


@pytest.mark.parametrize("keep", [0, 5, 300, 20_000])
def test_a_truncated_file_is_named(tmp_path, keep):
    directory = write_checkpoint(tmp_path, "smollm2")
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is corrupt or truncated"):
        load(directory)


def test_a_file_of_noise_is_named(tmp_path):
    directory = write_config(tmp_path, "smollm2")
    (directory / "model.safetensors").write_bytes(np.random.RandomState(0).bytes(4096))
    with pytest.raises(CheckpointError, match=r"model\.safetensors is corrupt or truncated"):
        load(directory)


def test_a_missing_shard_is_named(tmp_path):
    directory = write_checkpoint(tmp_path, "smollm2", num_shards=3)
    (directory / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"names model-00002-of-00003\.safetensors, which"):
        load(directory)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": [1]}', '{"weight_map": {"a": 3}}'])
def test_an_unreadable_index_is_named(tmp_path, content):
    directory = write_checkpoint(tmp_path, "smollm2", num_shards=2)
    (directory / "model.safetensors.index.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"index\.json is not a readable safetensors index"):
        load(directory)


def test_an_index_cannot_name_files_elsewhere(tmp_path):
    directory = write_checkpoint(tmp_path / "model", "smollm2", num_shards=2)
    write_checkpoint(tmp_path, "smollm2")
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../model.safetensors"}}))
    with pytest.raises(CheckpointError, match="names files outside its directory"):
        load(directory)


def test_a_tensor_twice_is_an_error(tmp_path):
    directory = write_config(tmp_path, "smollm2")
    for name in ("a", "b"):
        write_tensors(directory, tiny_models.weights("smollm2"))
        (directory / "model.safetensors").rename(directory / f"{name}.safetensors")
    with pytest.raises(CheckpointError, match=r"is in .*a\.safetensors and .*b\.safetensors"):
        load(directory)


def test_an_integer_tensor_is_refused_by_type(tmp_path):
    tensors = tiny_models.weights("smollm2")
    tensors["model.norm.weight"] = np.zeros(48, np.int8)
    write_tensors(write_config(tmp_path, "smollm2"), tensors)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight is I8; supported are F32, F16, BF16"):
        load(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_pickled_weights_are_refused_unopened(tmp_path, name):
    (write_config(tmp_path, "smollm2") / name).write_bytes(b"never opened")
    with pytest.raises(ConfigError, match="pickled weights"):
        load(tmp_path)


def test_a_directory_without_weights_says_what_would_work(tmp_path):
    with pytest.raises(CheckpointError, match=r"no \*\.safetensors file; .* --load-format dummy"):
        load(write_config(tmp_path, "smollm2"))


def test_a_source_reads_tensors_one_by_one_with_their_stored_type(tmp_path):
    source = SafetensorsSource(write_checkpoint(tmp_path, "smollm2", dtype="bfloat16"))
    assert source.names() == sorted(tiny_models.tensor_shapes("smollm2"))
    assert source.shape("model.embed_tokens.weight") == (128, 48)
    assert source.load("model.embed_tokens.weight").dtype == jnp.bfloat16
    source.close()
