"""What speculative_config and the older flags may say, and what is said about anything else."""

import dataclasses
import json
import math

import pytest

from pagedjax.config import NOT_BUILT, EngineConfig
from pagedjax.errors import ConfigError
from pagedjax.flags import parse_flags
from pagedjax.speculation.config import OLDER_FLAGS, REFUSED_KEYS, SpeculativeConfig

NGRAM = {"method": "ngram", "num_speculative_tokens": 4}


@pytest.fixture(autouse=True)
def _speculation_is_built(monkeypatch):
    monkeypatch.delitem(NOT_BUILT, "speculative_config", raising=False)


def config(value=None, **options) -> SpeculativeConfig:
    result = EngineConfig(speculative_config=value, **options).speculative_config
    assert isinstance(result, SpeculativeConfig)
    return result


def refusal(value=None, **options) -> str:
    with pytest.raises(ConfigError) as raised:
        EngineConfig(speculative_config=value, **options)
    return str(raised.value)


def test_nothing_given_is_no_speculation():
    assert EngineConfig().speculative_config is None
    assert EngineConfig(speculative_config=None).speculative_config is None


def test_an_object_json_text_and_a_complete_config_say_the_same():
    assert config(NGRAM) == config(json.dumps(NGRAM)) == config(SpeculativeConfig(**NGRAM)) == config(config(NGRAM))
    assert config(NGRAM).method == "ngram"
    assert config(NGRAM).num_speculative_tokens == 4


def test_replacing_another_option_keeps_it():
    engine = EngineConfig(speculative_config=NGRAM, forced_acceptance=0.5)
    assert dataclasses.replace(engine, seed=1).speculative_config == engine.speculative_config
    assert engine.speculative_config.forced_acceptance == 0.5


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, (5, 5)),
        ({"prompt_lookup_max": 4}, (4, 4)),
        ({"prompt_lookup_min": 2}, (2, 2)),
        ({"prompt_lookup_max": 4, "prompt_lookup_min": 2}, (4, 2)),
        ({"prompt_lookup_max": 4, "prompt_lookup_min": None}, (4, 4)),
    ],
)
def test_the_lengths_of_a_look_up_have_vllms_defaults(given, expected):
    result = config(NGRAM | given)
    assert (result.prompt_lookup_max, result.prompt_lookup_min) == expected


@pytest.mark.parametrize(
    ("given", "method"),
    [
        ({"model": "ngram"}, "ngram"),
        ({"model": "[ngram]"}, "ngram"),
        ({"model": "ngram", "method": "ngram"}, "ngram"),
        ({"model": "/models/small"}, "draft_model"),
        ({"model": "/models/small", "method": "draft_model", "revision": "main"}, "draft_model"),
        ({"method": "suffix"}, "suffix"),
    ],
)
def test_the_method_follows_from_the_model_as_in_vllm(given, method):
    result = config(given | {"num_speculative_tokens": 3})
    assert result.method == method
    assert result.model == (given.get("model") if method == "draft_model" else None)
    assert result.is_sequential == (method == "draft_model")


def test_suffix_decoding_needs_no_number_of_drafts():
    assert config({"method": "suffix"}).num_speculative_tokens == 24
    assert config({"method": "suffix", "suffix_decoding_max_tree_depth": 64}).num_speculative_tokens == 32
    assert config({"method": "suffix", "num_speculative_tokens": 5}).num_speculative_tokens == 5


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_speculative_tokens": 0}, "num_speculative_tokens is 0; it must be at least 1 and at most 32"),
        ({"num_speculative_tokens": -1}, "num_speculative_tokens is -1; it must be at least 1 and at most 32"),
        ({"num_speculative_tokens": 200}, "num_speculative_tokens is 200; it must be at least 1 and at most 32"),
        ({"num_speculative_tokens": True}, "num_speculative_tokens is True; it must be int"),
        ({"num_speculative_tokens": "4"}, "num_speculative_tokens is '4'; it must be int"),
        ({"num_speculative_tokens": 4.0}, "num_speculative_tokens is 4.0; it must be int"),
        ({"num_speculative_tokens": [4]}, "num_speculative_tokens is [4]; it must be int"),
        (
            {"num_speculative_tokens": None},
            "num_speculative_tokens is not given, and 'ngram' has no default; set it to",
        ),
        ({"method": "eagle"}, "method is 'eagle'; choose one of ngram, draft_model, suffix"),
        ({"method": 1}, "method is 1; choose one of"),
        ({"prompt_lookup_max": 0}, "prompt_lookup_max is 0; it must be at least 1 and at most 32"),
        ({"prompt_lookup_max": "4"}, "prompt_lookup_max is '4'; it must be int or None"),
        ({"prompt_lookup_min": [1]}, "prompt_lookup_m"),
        (
            {"prompt_lookup_min": 4, "prompt_lookup_max": 3},
            "prompt_lookup_min is 4, above prompt_lookup_max 3; lower it or raise the other",
        ),
        ({"rejection_sample_method": "block"}, "rejection_sample_method is 'block'; choose one of coupled, standard"),
        ({"disable_by_batch_size": 0}, "disable_by_batch_size is 0; it must be at least 1"),
        ({"draft_tensor_parallel_size": 2}, "draft_tensor_parallel_size is 2, it must be 1: tensor parallelism is not"),
        ({"is_adaptive": "no"}, "is_adaptive is 'no'; it must be bool"),
        (
            {"model": "/models/small"},
            "model is '/models/small', but the method is 'ngram'; it belongs to 'draft_model'",
        ),
        (
            {"suffix_decoding_max_tree_depth": 8},
            "suffix_decoding_max_tree_depth is 8, but the method is 'ngram'; it belongs to 'suffix': leave one out",
        ),
    ],
)
def test_a_bad_value_names_itself_the_limit_and_the_remedy(given, message):
    assert message in refusal(NGRAM | given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"suffix_decoding_max_tree_depth": 2}, "must be at least 3 and at most 1024"),
        ({"suffix_decoding_max_tree_depth": "8"}, "suffix_decoding_max_tree_depth is '8'; it must be int"),
        (
            {"suffix_decoding_max_cached_requests": -1},
            "suffix_decoding_max_cached_requests is -1; it must be at least 0",
        ),
        ({"suffix_decoding_max_spec_factor": 0}, "suffix_decoding_max_spec_factor is 0; it must be at least 0.01"),
        ({"suffix_decoding_max_spec_factor": math.nan}, "suffix_decoding_max_spec_factor is nan; it must be"),
        (
            {"suffix_decoding_min_token_prob": 1.5},
            "suffix_decoding_min_token_prob is 1.5; it must be at least 0 and at",
        ),
        ({"prompt_lookup_max": 3}, "prompt_lookup_max is 3, but the method is 'suffix'; it belongs to 'ngram'"),
    ],
)
def test_a_bad_value_of_suffix_decoding_does_too(given, message):
    assert message in refusal({"method": "suffix", "num_speculative_tokens": 4} | given)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("ngram", "speculative_config is 'ngram', which is not JSON: "),
        ("{", "which is not JSON"),
        ("[" * 100_000, "which is not JSON: maximum recursion depth exceeded"),
        ("[1]", "speculative_config is [1]; it must be an object such as"),
        ("4", "speculative_config is 4; it must be an object such as"),
        ("null", "speculative_config is None; it must be an object"),
        (4, "speculative_config is 4; it must be an object such as"),
        ({}, "speculative_config is empty; it needs method and num_speculative_tokens"),
        ({"method": None}, "speculative_config is empty"),
        ({"num_speculative_tokens": 3}, "neither method nor model; set method to 'ngram', 'suffix' or 'draft_model'"),
        ({"method": "draft_model", "num_speculative_tokens": 3}, "model is None; the method 'draft_model' needs one"),
        ({"method": "ngram", "num_speculative_token": 3}, "unknown key 'num_speculative_token'; did you mean"),
        ({"method": "ngram", 3: 4}, "unknown key 3; known are method, num_speculative_tokens, model"),
    ],
)
def test_what_is_no_object_of_known_keys_is_refused(value, message):
    assert message in refusal(value)


@pytest.mark.parametrize("key", REFUSED_KEYS)
def test_a_key_that_is_not_taken_says_what_to_do_instead(key):
    text = refusal(NGRAM | {key: 1})
    assert text.startswith(f"speculative_config has {key!r}=1; ")
    assert text.endswith(REFUSED_KEYS[key])


def test_forced_acceptance_is_a_flag_of_its_own_and_needs_drafts():
    assert config(NGRAM, forced_acceptance=0.8).forced_acceptance == 0.8
    assert "it makes outputs wrong on purpose" in refusal(NGRAM | {"forced_acceptance": 0.8})
    assert refusal(forced_acceptance=0.8).startswith("forced_acceptance is 0.8, but nothing is drafted; it needs")
    assert "forced_acceptance is 1.5; it must be at least 0 and at most 1" in refusal(NGRAM, forced_acceptance=1.5)
    standard = NGRAM | {"rejection_sample_method": "standard"}
    assert "forced_acceptance is 0.8, but rejection_sample_method is 'standard'" in refusal(
        standard, forced_acceptance=0.8
    )
    assert "forced_acceptance is nan" in refusal(NGRAM, forced_acceptance=math.nan)


def test_the_older_flags_say_the_same():
    look_ups = {"num_speculative_tokens": 4, "ngram_prompt_lookup_max": 3, "ngram_prompt_lookup_min": 2}
    assert config(speculative_model="[ngram]", **look_ups) == config(
        NGRAM | {"prompt_lookup_max": 3, "prompt_lookup_min": 2}
    )
    older = {"speculative_model": "/models/small", "speculative_draft_tensor_parallel_size": 1}
    engine = EngineConfig(num_speculative_tokens=5, **older)
    assert engine.speculative_config == config({"model": "/models/small", "num_speculative_tokens": 5})
    assert all(getattr(engine, name) is None for name in OLDER_FLAGS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"speculative_draft_tensor_parallel_size": 2, "speculative_model": "m", "num_speculative_tokens": 4},
         "draft_tensor_parallel_size is 2, it must be 1: tensor parallelism is not built yet"),
        ({"num_speculative_tokens": 4}, "num_speculative_tokens is 4, but nothing is drafted; add --speculative-model"),
        ({"speculative_model": "[ngram]"}, "num_speculative_tokens is not given"),
        ({"speculative_model": "[ngram]", "num_speculative_tokens": 0}, "num_speculative_tokens is 0; it must be"),
        ({"speculative_model": "m", "num_speculative_tokens": 2, "ngram_prompt_lookup_max": 4},
         "prompt_lookup_max is 4, but the method is 'draft_model'"),
        ({"speculative_config": NGRAM, "num_speculative_tokens": 4},
         "num_speculative_tokens is 4, but speculative_config is given too; put it there as 'num_speculative_tokens'"),
        ({"speculative_config": NGRAM, "ngram_prompt_lookup_max": 4}, "put it there as 'prompt_lookup_max'"),
    ],
)  # fmt: skip
def test_older_flags_that_contradict_something_are_refused(options, message):
    with pytest.raises(ConfigError) as raised:
        EngineConfig(**options)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    "line",
    [
        '-sc {"method":"ngram","num_speculative_tokens":4}',
        "--speculative-model [ngram] --num-speculative-tokens 4",
        "--speculative_model=[ngram] --num_speculative_tokens=4 --speculative-draft-tensor-parallel-size 1",
    ],
)
def test_the_command_line_says_it_as_vllms_does(line):
    (engine,) = parse_flags([EngineConfig], line.split(), program="p", summary="s")
    assert engine.speculative_config == config(NGRAM)


def test_each_key_explains_itself():
    assert all(field.metadata["help"].endswith(".") for field in dataclasses.fields(SpeculativeConfig))
