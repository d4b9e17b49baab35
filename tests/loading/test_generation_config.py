"""Sampling defaults and end-of-sequence ids come from the file that --generation-config picks."""

import json

import pytest

from pagedjax.config import EngineConfig
from pagedjax.errors import ConfigError
from pagedjax.loading import generation_config
from pagedjax.loading.generation_config import generation_defaults

LLAMA = {"temperature": 0.6, "top_p": 0.9, "do_sample": True, "bos_token_id": 1, "eos_token_id": [5, 6], "top_k": None}


@pytest.fixture
def directory(tmp_path):
    return write(tmp_path / "model", LLAMA)


def write(directory, values):
    directory.mkdir(exist_ok=True)
    (directory / "generation_config.json").write_text(values if isinstance(values, str) else json.dumps(values))
    return directory


def defaults(directory, **options):
    return generation_defaults(EngineConfig(model=str(directory), **options))


def test_the_model_directorys_file_gives_sampling_fields_and_ids(directory):
    assert defaults(directory) == {"temperature": 0.6, "top_p": 0.9, "eos_token_ids": (5, 6)}


def test_every_sampling_field_is_read(tmp_path):
    values = {"temperature": 0, "top_p": 1.0, "top_k": 50, "min_p": 0.1, "repetition_penalty": 1.1}
    assert defaults(write(tmp_path, {**values, "max_length": 20})) == values


def test_a_single_id_is_a_list_of_one(tmp_path):
    assert defaults(write(tmp_path, {"eos_token_id": 0})) == {"eos_token_ids": (0,)}


def test_vllms_defaults_leave_the_ids_that_end_a_sequence(directory):
    assert defaults(directory, generation_config="vllm") == {"eos_token_ids": (5, 6)}


def test_another_directorys_file_replaces_the_models(directory, tmp_path):
    other = write(tmp_path / "other", {"top_k": 7})
    assert defaults(directory, generation_config=str(other)) == {"top_k": 7}


def test_a_model_without_the_file_has_no_defaults(tmp_path):
    assert defaults(tmp_path) == {}


def test_a_hub_name_is_resolved_with_its_revision_and_cache(directory, monkeypatch):
    asked = []
    resolve = lambda name, **options: asked.append((name, options)) or directory  # noqa: E731
    monkeypatch.setattr(generation_config.hub, "resolve", resolve)
    assert defaults("org/model", revision="v1", download_dir="cache")["temperature"] == 0.6
    assert asked == [("org/model", {"revision": "v1", "download_dir": "cache", "with_weights": False})]


def test_a_gguf_file_gives_its_own_ids():
    assert generation_defaults(EngineConfig(model="demo")) == {"eos_token_ids": (2,)}


@pytest.mark.parametrize(
    ("values", "part"),
    [
        ("{", "generation_config.json cannot be read: "),
        ("[]", "holds a list; it must be a JSON object"),
        ({"temperature": 5.0}, "temperature is 5.0; it must be at least 0.0 and at most 2.0; correct it or pass"),
        ({"top_p": "high"}, "top_p is 'high'"),
        ({"eos_token_id": "</s>"}, "eos_token_id holds '</s>'; token ids are integers of 0 or more"),
        ({"eos_token_id": [1, -1]}, "eos_token_id holds -1"),
        ({"eos_token_id": True}, "eos_token_id holds True"),
    ],
)
def test_a_bad_file_is_named_with_what_is_wrong(tmp_path, values, part):
    with pytest.raises(ConfigError) as caught:
        defaults(write(tmp_path, values))
    assert part in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_a_named_directory_without_the_file_is_an_error(directory, tmp_path):
    with pytest.raises(ConfigError, match=r"does not exist; --generation-config takes 'auto', 'vllm' or a directory"):
        defaults(directory, generation_config=str(tmp_path))
