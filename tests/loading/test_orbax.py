"""An Orbax directory restores the model bit for bit and needs nothing of the original."""

import dataclasses
import json

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pagedjax.config import EngineConfig
from pagedjax.errors import CheckpointError, ConfigError
from pagedjax.loading import load_model, orbax
from pagedjax.loading.arrays import model_from_params
from pagedjax.loading.generation_config import generation_defaults
from pagedjax.loading.hf_config import model_config_from_hf
from pagedjax.loading.orbax import convert, is_orbax_directory, load_orbax, read_orbax_config, save_orbax
from pagedjax.models.config import RopeConfig
from pagedjax.text.tokenizer import load_tokenizer
from tests.loading.gguf_models import write_model
from tests.loading.tiny_checkpoints import write_checkpoint
from tests.oracles import tiny_models

CASE = "llama_with_biases"


def tiny_model(case=CASE, dtype=jnp.float32):
    config = model_config_from_hf(tiny_models.CASES[case])
    return model_from_params(tiny_models.weights(case), config, dtype=dtype)


def check_equal(left, right):
    left, right = nnx.state(left.model), nnx.state(right.model)
    assert jax.tree.structure(left) == jax.tree.structure(right)
    jax.tree.map(np.testing.assert_array_equal, left, right)
    assert jax.tree.map(lambda x: x.dtype, left) == jax.tree.map(lambda x: x.dtype, right)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    directory = tmp_path_factory.mktemp("orbax") / "model"
    save_orbax(directory, tiny_model())
    return directory


@pytest.fixture
def damaged(tmp_path):
    """A directory of its own, for tests that break it."""
    save_orbax(tmp_path / "model", tiny_model())
    return tmp_path / "model"


@pytest.mark.parametrize("case", [CASE, "gemma3_linear_rope"])
def test_a_saved_model_is_restored_bit_for_bit(case, tmp_path):
    model = tiny_model(case)
    save_orbax(tmp_path / "model", model)
    restored = load_orbax(tmp_path / "model", "float32")
    assert restored.config == model.config
    check_equal(restored, model)


def test_weights_are_cast_while_they_are_restored(saved):
    check_equal(load_orbax(saved, "bfloat16"), tiny_model(dtype=jnp.bfloat16))


def test_auto_is_float32_on_a_cpu(saved):
    check_equal(load_orbax(saved, "auto"), tiny_model())


def test_load_model_recognises_the_directory(saved):
    assert is_orbax_directory(saved)
    check_equal(load_model(EngineConfig(model=str(saved), dtype="float32")), tiny_model())


def test_every_field_of_a_configuration_survives(tmp_path):
    config = dataclasses.replace(
        model_config_from_hf(tiny_models.CASES["gemma3_linear_rope"]),
        rope=RopeConfig(theta=2.0, scaling=(("factor", 8.0), ("rope_type", "linear"))),
        local_rope=RopeConfig(theta=3.0),
        layer_windows=(None, 8, None, 8),
        eos_token_ids=(1, 2),
        bos_token_id=None,
        attn_soft_cap=3.0,
    )
    content = {"format": 1, "model_config": dataclasses.asdict(config)}
    (tmp_path / "pagedjax_model.json").write_text(json.dumps(content))
    assert read_orbax_config(tmp_path) == config


def test_a_converted_model_needs_nothing_of_the_original(tmp_path):
    path = write_chat_model(tmp_path / "original.gguf")
    original, tokenizer = load_model(EngineConfig(model=str(path))), load_tokenizer(EngineConfig(model=str(path)))
    convert(EngineConfig(model=str(path)), tmp_path / "converted")
    path.unlink()
    config = EngineConfig(model=str(tmp_path / "converted"))
    check_equal(load_model(config), original)
    restored = load_tokenizer(config)
    messages = [{"role": "user", "content": "  ab 12"}]
    assert restored.encode_chat(messages) == tokenizer.encode_chat(messages)
    assert restored.encode("ba  1") == tokenizer.encode("ba  1")
    assert restored.eos_token_ids == tokenizer.eos_token_ids
    assert generation_defaults(config) == {"temperature": 0.5, "eos_token_ids": (2, 7)}


def write_chat_model(path):
    def add(writer):
        letters = [chr(code) for code in range(33, 127)] + ["Ġ", "Ċ"]
        tokens = ["<unk>", "<s>", "</s>", *letters, "ab", *(f"<free{i}>" for i in range(28))]
        assert len(tokens) == 128
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("smollm")
        writer.add_token_list(tokens)
        writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * 125)
        writer.add_token_merges(["a b"])
        writer.add_chat_template("{% for m in messages %}<s>{{ m.content }}</s>{% endfor %}")
        writer.add_eot_token_id(7)
        writer.add_float32("general.sampling.temp", 0.5)

    return write_model(path, tiny_models.CASES[CASE], tiny_models.weights(CASE), extra=add)


def test_a_malformed_generation_config_is_refused_before_anything_loads(tmp_path, monkeypatch):
    """The conversion died with the error of the JSON parser when all weights were loaded."""
    monkeypatch.setattr(orbax, "load_tokenizer", lambda config: None)
    monkeypatch.setattr(orbax, "load_weights", lambda *args: pytest.fail("the weights were loaded"))
    (write_checkpoint(tmp_path, "smollm2") / "generation_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"generation_config\.json cannot be read"):
        convert(EngineConfig(model=str(tmp_path)), tmp_path / "converted")


def test_convert_keeps_float32_of_gguf_files_and_casts_when_asked(tmp_path):
    path = write_chat_model(tmp_path / "original.gguf")
    convert(EngineConfig(model=str(path), dtype="bfloat16"), tmp_path / "converted")
    rounded = tiny_model(dtype=jnp.bfloat16)
    restored = load_orbax(tmp_path / "converted", "float32")
    as_float32 = lambda x: np.asarray(x.astype(jnp.float32))  # noqa: E731
    jax.tree.map(
        lambda x, y: np.testing.assert_array_equal(x, as_float32(y)),
        nnx.state(restored.model),
        nnx.state(rounded.model),
    )


def test_a_directory_in_use_is_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="exists and is not an empty directory; remove it or choose another"):
        save_orbax(tmp_path, tiny_model())
    with pytest.raises(ConfigError, match="exists and is not an empty directory"):
        convert(EngineConfig(model="nothing"), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_converting_twice_is_refused(saved, tmp_path):
    with pytest.raises(ConfigError, match="is an Orbax directory already"):
        convert(EngineConfig(model=str(saved)), tmp_path / "again")


def test_arrays_that_do_not_fit_the_configuration_are_all_named(damaged):
    file = damaged / "pagedjax_model.json"
    content = json.loads(file.read_text())
    content["model_config"] |= {"intermediate_size": 96, "attention_out_bias": False}
    file.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="does not fit") as error:
        load_orbax(damaged, "float32")
    assert "layers.1.mlp.down.kernel is [80, 48], not [96, 48]" in str(error.value)
    assert "layers.0.attention.out.bias is unexpected" in str(error.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot be read"),
        ("[]", "cannot be read"),
        ('{"format": 2, "model_config": {}}', "has format 2, this version reads 1"),
        (
            '{"format": 1, "model_config": {"rope": {"theta": 1.0, "scaling": []}, "num_wings": 2}}',
            "does not describe a model",
        ),
        ('{"format": 1, "model_config": []}', "does not describe a model"),
    ],
)
def test_a_bad_model_file_is_an_error_that_names_it(content, message, tmp_path):
    (tmp_path / "pagedjax_model.json").write_text(content)
    with pytest.raises(CheckpointError, match=message) as error:
        load_orbax(tmp_path, "float32")
    assert "pagedjax_model.json" in str(error.value)


def test_missing_arrays_are_an_error_that_names_the_directory(damaged):
    (damaged / "params").rename(damaged / "elsewhere")
    with pytest.raises(CheckpointError, match=r"model/params is not a complete Orbax checkpoint"):
        load_orbax(damaged, "float32")


def test_truncated_arrays_are_an_error_that_names_the_directory(damaged):
    largest = max((damaged / "params").rglob("*"), key=lambda path: path.stat().st_size if path.is_file() else 0)
    largest.write_bytes(largest.read_bytes()[:100])
    with pytest.raises(CheckpointError, match=r"model/params is damaged"):
        load_orbax(damaged, "float32")
