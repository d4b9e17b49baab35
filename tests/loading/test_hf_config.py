"""config.json in old and new spelling, against transformers' own reading of it, and what is refused."""

import json

import pytest
import transformers

from pagedjax.errors import ConfigError
from pagedjax.loading.hf_config import model_config_from_hf, read_model_config
from pagedjax.models import MODEL_CLASSES
from pagedjax.models.config import RopeConfig
from tests.oracles import tiny_models

LLAMA = tiny_models.CASES["llama3_rope"]


def change(case, **entries):
    """Return a case's config.json with entries replaced, or removed where the value is ...."""
    return {key: value for key, value in (tiny_models.CASES[case] | entries).items() if value is not ...}


@pytest.mark.parametrize("case", tiny_models.CASES)
def test_the_spelling_that_transformers_saves_today_means_the_same(case, tmp_path):
    old = tiny_models.CASES[case]
    hf = transformers.AutoConfig.for_model(**old)
    hf.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert "rope_theta" not in saved
    assert model_config_from_hf(saved | {"architectures": old["architectures"]}) == model_config_from_hf(old)


@pytest.mark.parametrize(
    ("model_type", "entries"),
    [
        ("llama", {}),
        ("mistral", {}),
        ("qwen2", {"use_sliding_window": True, "num_hidden_layers": 30}),
        ("qwen3", {"use_sliding_window": True, "num_hidden_layers": 30}),
        ("gemma3_text", {}),
    ],
)
def test_missing_keys_get_the_defaults_of_transformers(model_type, entries):
    hf = transformers.AutoConfig.for_model(model_type, **entries)
    required = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    config = model_config_from_hf({"model_type": model_type} | {key: getattr(hf, key) for key in required} | entries)
    is_gemma = model_type == "gemma3_text"
    rope = hf.rope_parameters["full_attention"] if is_gemma else hf.rope_parameters
    assert config.num_kv_heads == hf.num_key_value_heads
    assert config.head_dim == getattr(hf, "head_dim", hf.hidden_size // hf.num_attention_heads)
    assert config.max_position_embeddings == hf.max_position_embeddings
    assert config.rms_norm_eps == hf.rms_norm_eps
    assert config.rope.theta == rope["rope_theta"]
    assert config.tie_word_embeddings == hf.tie_word_embeddings
    window = getattr(hf, "sliding_window", None)
    kinds = getattr(hf, "layer_types", None) or ["sliding_attention"] * config.num_layers
    assert list(config.window) == [window if kind == "sliding_attention" else None for kind in kinds]
    if is_gemma:
        assert config.local_rope == RopeConfig(theta=10000.0)
        assert config.attention_scale == hf.query_pre_attn_scalar**-0.5
        assert config.hidden_act == hf.hidden_activation


def test_an_explicit_null_window_means_full_attention():
    assert model_config_from_hf(change("mistral", sliding_window=None)).window == (None, None)


def test_the_longest_context_counts_rope_scaling():
    assert model_config_from_hf(LLAMA).max_position_embeddings == 128  # llama3's figure includes it
    assert model_config_from_hf(tiny_models.CASES["llama_linear_rope"]).max_position_embeddings == 128
    assert model_config_from_hf(tiny_models.CASES["qwen2_yarn"]).max_position_embeddings == 128
    assert model_config_from_hf(tiny_models.CASES["gemma3_linear_rope"]).max_position_embeddings == 128


def test_eos_may_be_a_list():
    assert model_config_from_hf(change("smollm2", eos_token_id=[7, 9])).eos_token_ids == (7, 9)
    assert model_config_from_hf(change("smollm2", eos_token_id=...)).eos_token_ids == ()


def test_a_config_is_hashable():
    assert len({model_config_from_hf(case) for case in tiny_models.CASES.values()}) == len(tiny_models.CASES)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "'MambaForCausalLM' is not supported; supported are Llama"),
        ({"architectures": None, "model_type": "bert"}, "'bert' is not supported"),
        ({"auto_map": {"AutoModel": "modeling.py"}}, "run code from the model repository, which is always refused"),
        ({"quantization_config": {"quant_method": "awq"}}, "'awq' is not built yet"),
        ({"hidden_size": ...}, "hidden_size is missing"),
        ({"num_hidden_layers": "two"}, "num_hidden_layers is 'two'; it must be an integer"),
        ({"num_key_value_heads": 3}, "num_heads is 4; it must be a multiple of num_kv_heads 3"),
        ({"head_dim": 7}, "head_dim is 7"),
        ({"hidden_act": "relu"}, "hidden_act is 'relu'; supported are silu, gelu_pytorch_tanh"),
        ({"torch_dtype": "int8"}, "torch_dtype is 'int8'; supported are float32"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic' is not supported; supported are default"),
        ({"rope_scaling": {"type": "yarn"}}, "'yarn' needs 'factor'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5; only 1.0"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(entries, message):
    with pytest.raises(ConfigError, match=message):
        model_config_from_hf(change("llama3_rope", **entries))


WRONG_VALUES = ["x", -1, 0, 1.5, [[]], {"a": []}, True, float("nan"), float("inf"), 10**30, [1], ["x"], [], {}]


@pytest.mark.parametrize("case", ["llama3_rope", "qwen2_yarn", "gemma3"])
def test_a_value_of_any_wrong_kind_is_a_config_error_or_harmless(case):
    """Many were a traceback of Python's; an epsilon or theta that is not a number became NaN without a word."""
    hf = tiny_models.CASES[case]
    rope = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    changed = [change(case, **{key: value}) for key in hf for value in WRONG_VALUES]
    changed += [change(case, rope_scaling={**rope, key: value}) for key in rope for value in WRONG_VALUES]
    changed += [change(case, rope_parameters={"full_attention": value}) for value in WRONG_VALUES]
    num_refused = 0
    for values in changed:
        try:
            hash(model_config_from_hf(values))
        except ConfigError:
            num_refused += 1
    assert num_refused > len(changed) / 2


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"rms_norm_eps": "small"}, "rms_norm_eps is 'small'; it must be a number above 0"),
        ({"rope_theta": float("nan")}, "rope_theta is nan; it must be a number above 0"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear'; it must be an object"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "rope_scaling.factor is 0; it must be a number"),
        ({"quantization_config": "awq"}, "quantization_config is 'awq'; it must be an object"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings is 'false'; it must be true or false"),
        ({"eos_token_id": ["</s>"]}, r"eos_token_id is \['</s>'\]; it must be a token id or a list of them"),
        ({"architectures": "LlamaForCausalLM"}, "architectures is 'LlamaForCausalLM'; it must be a list of strings"),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused_by_name(entries, message):
    with pytest.raises(ConfigError, match=message):
        model_config_from_hf(change("llama3_rope", **entries))


def test_an_unsupported_architecture_lists_every_supported_one():
    with pytest.raises(ConfigError) as error:
        model_config_from_hf(change("smollm2", architectures=["GPT2LMHeadModel"]))
    assert all(name in str(error.value) for name in MODEL_CLASSES)


def test_layer_types_of_another_length_are_refused():
    with pytest.raises(ConfigError, match="layer_types has 1 entries for num_hidden_layers 4"):
        model_config_from_hf(change("gemma3", layer_types=["full_attention"]))


@pytest.mark.parametrize(
    ("content", "message"),
    [("{", "cannot be read as JSON"), ("[1]", "holds a JSON list"), (b"\xff\xfe", "cannot be read as JSON")],
)
def test_an_unreadable_file_is_named(tmp_path, content, message):
    path = tmp_path / "config.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match=f"{path}.*{message}"):
        read_model_config(tmp_path)


def test_a_missing_file_says_what_the_directory_must_hold(tmp_path):
    with pytest.raises(ConfigError, match=r"config\.json does not exist; --model must be a directory with"):
        read_model_config(tmp_path)


def test_an_error_in_the_content_names_the_file(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(change("smollm2", vocab_size=...)))
    with pytest.raises(ConfigError, match=r"config\.json: vocab_size is missing"):
        read_model_config(tmp_path)
