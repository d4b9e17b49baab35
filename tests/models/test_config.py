"""A shape of a model that a caller describes: what cannot be one is refused with the value and the limit."""

from dataclasses import replace

import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from flax import nnx

from pagedjax import ConfigError, EngineConfig, ModelConfig, RopeConfig
from pagedjax.loading import load_model
from pagedjax.models import model_class

CONFIG = ModelConfig(
    architecture="LlamaForCausalLM", vocab_size=128, hidden_size=48, intermediate_size=80, num_layers=2, num_heads=4,
    num_kv_heads=2, head_dim=12, max_position_embeddings=128, rms_norm_eps=1e-5, rope=RopeConfig(), eos_token_ids=(2,),
)  # fmt: skip


@pytest.fixture(autouse=True)
def _no_type_checks_but_ours(monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 0}, "num_layers is 0; it must be an integer, at least 1"),
        ({"hidden_size": 48.0}, r"hidden_size is 48\.0; it must be an integer"),
        ({"num_kv_heads": 3}, "num_heads is 4; it must be a multiple of num_kv_heads 3"),
        ({"rope": {"theta": 1e4}}, "rope is .*; it must be a RopeConfig"),
        ({"layer_windows": (8,)}, r"layer_windows is \(8,\); it must be a tuple of one for each of 2 layers"),
        ({"layer_windows": (8, 0)}, "layer_windows holds 0; each is an integer, at least 1, or None"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; supported are silu, gelu_pytorch_tanh"),
        ({"dtype": "float8"}, "dtype is 'float8'; supported are float32, bfloat16, float16"),
        ({"eos_token_ids": [2]}, r"eos_token_ids is \[2\]; it must be a tuple of token ids"),
        ({"eos_token_ids": (-1,)}, r"eos_token_ids is \(-1,\); it must be a tuple"),
    ],
)
def test_what_cannot_be_a_model_is_refused(changes, message):
    """It went into the model: "gelu" ran as its tanh approximation, ids in a list failed when an engine was made."""
    with pytest.raises(ConfigError, match=message):
        replace(CONFIG, **changes)


def test_numpy_integers_are_sizes():
    assert replace(CONFIG, num_layers=np.int64(2)) == CONFIG


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_dim": 11}, "head_dim is 11; rotary embedding needs an even one"),
        ({"rope": RopeConfig(scaling=(("rope_type", "dynamic"),))}, "rope scaling type 'dynamic' is not supported"),
    ],
)
def test_a_model_whose_rotation_cannot_be_computed_is_refused_when_it_is_made(changes, message):
    """The first step failed, in the middle of being traced."""
    with pytest.raises(ConfigError, match=message):
        model_class("LlamaForCausalLM")(replace(CONFIG, **changes), dtype=jnp.float32, rngs=nnx.Rngs(0))


def test_a_model_config_of_another_type_is_refused():
    """An attribute was missing somewhere."""
    with pytest.raises(ConfigError, match=r"model_config is \{'num_layers': 2\}; pass a pagedjax\.ModelConfig"):
        load_model(EngineConfig(), params={}, model_config={"num_layers": 2})
