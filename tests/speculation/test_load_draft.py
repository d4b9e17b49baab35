"""A draft model that cannot serve its target is refused before anything compiles, with what is wrong."""

import json

import jax
import pytest
from flax import nnx

from pagedjax.config import EngineConfig
from pagedjax.errors import ConfigError
from pagedjax.loading.hf_config import model_config_from_hf
from pagedjax.speculation.load_draft import load_draft
from tests.oracles import tiny_models
from tests.text.tokenizers import tokenizer_of

TARGET = tiny_models.CASES["smollm2"]


def load(model: str, *, load_format="dummy", tokenizer=None, **options):
    speculative = {"method": "draft_model", "model": model, "num_speculative_tokens": 3}
    config = EngineConfig(model="target", load_format=load_format, speculative_config=speculative, **options)
    return load_draft(config, model_config_from_hf(TARGET), tokenizer)


def write_config(directory, **changes) -> str:
    (directory / "config.json").write_text(json.dumps(TARGET | changes))
    return str(directory)


def test_a_draft_model_that_does_not_exist_is_named():
    with pytest.raises(ConfigError, match=r"^the draft model '/nowhere/draft' cannot be used: .* does not exist"):
        load("/nowhere/draft")


def test_a_draft_model_without_a_tokenizer_is_not_sent_to_the_option_of_the_target(tmp_path):
    """--tokenizer was the remedy, which leaves the draft model's as it is."""
    with pytest.raises(ConfigError, match=r"cannot be used: .* holds no tokenizer: ") as raised:
        load(write_config(tmp_path), load_format="auto", tokenizer=tokenizer_of("whole-words"))
    assert str(raised.value).endswith("copy the files from the model's repository, or choose another draft model")


def test_a_draft_model_of_another_vocabulary_is_refused_with_both_sizes(tmp_path, monkeypatch):
    monkeypatch.setattr("pagedjax.speculation.load_draft.load_model", None)  # its weights are not waited for
    size = TARGET["vocab_size"]
    with pytest.raises(ConfigError, match=f"the draft model has {size + 64} tokens, the target {size}; "):
        load(write_config(tmp_path, vocab_size=size + 64))


def test_a_draft_model_of_an_unknown_architecture_is_refused_by_name(tmp_path):
    with pytest.raises(ConfigError, match="EagleForCausalLM"):
        load(write_config(tmp_path, architectures=["EagleForCausalLM"]))


def test_a_draft_model_of_the_same_vocabulary_is_loaded(tmp_path):
    assert load(write_config(tmp_path)).config.vocab_size == TARGET["vocab_size"]
    assert load_draft(EngineConfig(model="target"), model_config_from_hf(TARGET), None) is None


def test_a_draft_model_has_the_target_s_type_whatever_its_checkpoint_says(tmp_path, monkeypatch):
    """On a GPU "auto" stood for each checkpoint's own type, and a float32 draft met a KV cache of bfloat16."""
    draft = write_config(tmp_path, torch_dtype="float32")
    monkeypatch.setattr("pagedjax.loading.weights.jax.default_backend", lambda: "gpu")
    speculative = {"method": "draft_model", "model": draft, "num_speculative_tokens": 3}
    config = EngineConfig(model="target", load_format="dummy", speculative_config=speculative)
    loaded = load_draft(config, model_config_from_hf(TARGET | {"torch_dtype": "bfloat16"}), None)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(nnx.state(loaded.model))} == {"bfloat16"}


@pytest.mark.parametrize("max_model_len", [None, "auto"])
def test_a_draft_model_of_fewer_positions_is_a_warning(tmp_path, caplog, max_model_len):
    """The automatic length was compared as -1."""
    directory = write_config(tmp_path, max_position_embeddings=TARGET["max_position_embeddings"] // 2)
    load(directory, max_model_len=max_model_len)
    assert any("past that its drafts are useless" in message for message in caplog.messages)
