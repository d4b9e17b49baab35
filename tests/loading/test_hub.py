"""Model names: a local path wins, then the hub; every way that can fail says what to do. No test reaches a network."""

from pathlib import Path

import httpx2
import huggingface_hub
import pytest
from huggingface_hub import constants, errors

from pagedjax.errors import ConfigError
from pagedjax.loading.hub import resolve


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A hub whose one snapshot has the files that a test lists; `hub.asked` holds what was asked of it."""
    return FakeHub(monkeypatch, tmp_path / "snapshot")


class FakeHub:
    def __init__(self, monkeypatch, snapshot):
        self.snapshot = snapshot
        self.files = ["config.json", "model.safetensors"]
        self.error = None
        self.asked = []
        monkeypatch.setattr(huggingface_hub, "snapshot_download", self.download)

    def download(self, repo_id, **options):
        self.asked.append((repo_id, options))
        if self.error is not None:
            raise self.error
        self.snapshot.mkdir()
        matching = huggingface_hub.utils.filter_repo_objects(
            self.files, allow_patterns=options["allow_patterns"], ignore_patterns=options["ignore_patterns"]
        )
        for name in matching:
            (self.snapshot / name).touch()
        return str(self.snapshot)


def http_error(kind, status):
    request = httpx2.Request("GET", "http://hub.invalid/api/models/owner/name")
    return kind("refused", response=httpx2.Response(status, request=request))


def test_an_existing_path_wins_over_the_hub(hub, tmp_path, monkeypatch):
    (tmp_path / "gpt2").mkdir()
    monkeypatch.chdir(tmp_path)
    assert resolve("gpt2") == Path("gpt2")
    assert not hub.asked


def test_a_hub_name_is_downloaded_at_its_revision_into_the_cache_named(hub):
    assert resolve("owner/name", revision="v1", download_dir="/cache") == hub.snapshot
    [(name, options)] = hub.asked
    assert (name, options["revision"], options["cache_dir"]) == ("owner/name", "v1", "/cache")


def test_only_safetensors_configuration_and_tokenizer_files_are_fetched(hub):
    wanted = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer.model", "merges.txt"]
    wanted += ["model-00001-of-00002.safetensors", "model.safetensors.index.json", "chat_template.jinja"]
    pickles = ["pytorch_model.bin", "model.pt", "training_args.bin", "optimizer.pth", "flax_model.msgpack"]
    others = [
        "modeling_custom.py",
        "original/consolidated.00.pth",
        "onnx/model.safetensors",
        "consolidated.safetensors",
    ]
    hub.files = wanted + pickles + others
    directory = resolve("owner/name")
    assert sorted(path.name for path in directory.iterdir()) == sorted(wanted)


def test_without_weights_none_are_fetched(hub):
    directory = resolve("owner/name", with_weights=False)
    assert [path.name for path in directory.iterdir()] == ["config.json"]


def test_a_repository_with_pickled_weights_only_is_refused(hub):
    hub.files = ["config.json", "pytorch_model.bin"]
    with pytest.raises(ConfigError, match=r"'owner/name' has no safetensors files; pickled weights .* are refused"):
        resolve("owner/name")


@pytest.mark.parametrize(
    "name", ["/models/llama", "./llama", "../llama", "~/llama", "a/b/c", "model.gguf", "owner/", ""]
)
def test_what_can_only_be_a_path_is_not_asked_of_the_hub(name, hub, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(ConfigError, match=r"does not exist .*check the spelling") as error:
        resolve(name)
    assert repr(name) in str(error.value)
    assert not hub.asked


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (http_error(errors.GatedRepoError, 403), "'owner/name' is gated: accept its terms .* `hf auth login`"),
        (http_error(errors.RepositoryNotFoundError, 404), "'owner/name' is neither a local path .* check the spelling"),
        (
            http_error(errors.RevisionNotFoundError, 404),
            "'owner/name' has no revision 'v1'; give a branch, tag or commit",
        ),
        (
            http_error(errors.HfHubHTTPError, 500),
            "downloading 'owner/name' at revision 'v1' failed: refused.*try again",
        ),
        (OSError("No space left on device"), "downloading .* failed: No space left on device"),
        (httpx2.ReadError("connection reset"), "downloading .* failed: connection reset"),
        (errors.HFValidationError("bad name"), "downloading .* failed: bad name"),
    ],
)
def test_each_refusal_of_the_hub_has_its_remedy(error, message, hub):
    hub.error = error
    with pytest.raises(ConfigError, match=message) as raised:
        resolve("owner/name", revision="v1")
    assert raised.value.__cause__ is error


def test_without_network_the_message_says_so(hub, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    hub.error = errors.LocalEntryNotFoundError("not cached")
    hub.error.__cause__ = httpx2.ConnectError("name resolution failed")
    with pytest.raises(ConfigError, match=r"cannot be reached \(name resolution failed\); check the network, or pass"):
        resolve("owner/name")


def test_offline_mode_is_the_reason_given_when_it_is_set(tmp_path, monkeypatch):
    """With the library's own download: the test environment sets HF_HUB_OFFLINE."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(
        ConfigError, match=r"'owner/name' is neither a local path nor complete in the cache.*OFFLINE is set"
    ):
        resolve("owner/name", download_dir=str(tmp_path))


def test_offline_mode_uses_the_cache(tmp_path, monkeypatch):
    """With the library's own cache layout."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    commit = "0123456789" * 4
    repository = tmp_path / "models--owner--name"
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").touch()
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    assert resolve("owner/name", download_dir=str(tmp_path)) == snapshot
