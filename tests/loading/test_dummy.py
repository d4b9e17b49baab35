"""Random weights from a configuration alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pagedjax.config import EngineConfig
from pagedjax.errors import ConfigError
from pagedjax.loading import hub, load_model, load_model_config
from pagedjax.loading.gguf import GGUFSource
from pagedjax.loading.hf_config import model_config_from_hf, read_model_config
from pagedjax.loading.weights import abstract_model
from pagedjax.text.tokenizer import load_tokenizer
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


@pytest.mark.parametrize(
    ("name", "num_parameters"),
    # Llama 3 8B, Qwen3 0.6B, and a draft model of Qwen2.5 0.5B's size with Llama 3's vocabulary
    [("llama-8b", 8_030_261_248), ("qwen3-0.6b", 596_049_920), ("llama-0.5b", 472_787_840)],
)
def test_a_shape_by_name_has_the_parameters_of_the_model_it_stands_for(name, num_parameters):
    config = read_model_config(hub.locate(EngineConfig(model=f"dummy:{name}"), with_weights=False))
    state = abstract_model(config, jnp.bfloat16)[1]
    assert sum(leaf.size for leaf in jax.tree.leaves(state)) == num_parameters


def test_a_shape_by_name_needs_no_load_format_and_no_tokenizer(monkeypatch, tmp_path):
    write_config(tmp_path / "tiny", "smollm2")
    monkeypatch.setattr(hub, "SHAPES", tmp_path)
    config = EngineConfig(model="dummy:tiny")
    assert load_model(config).config.architecture == "LlamaForCausalLM"
    assert load_tokenizer(config) is None


def test_the_file_that_only_gives_a_configuration_is_closed(monkeypatch):
    """It stayed mapped until it was collected."""
    closed, close = [], GGUFSource.close
    monkeypatch.setattr(GGUFSource, "close", lambda source: (closed.append(source.origin), close(source)))
    load_model_config(EngineConfig(model="demo", load_format="dummy"))
    assert len(closed) == 1


def test_an_unknown_shape_and_a_shape_with_weights_are_refused():
    with pytest.raises(
        ConfigError, match=r"there is no shape 'llama-9b'; choose one of llama-0\.5b, llama-8b, qwen3-0\.6b"
    ):
        load_model(EngineConfig(model="dummy:llama-9b"))
    with pytest.raises(ConfigError, match="load_format is 'gguf', but 'dummy:llama-8b' is a shape without weights"):
        EngineConfig(model="dummy:llama-8b", load_format="gguf")
