"""What `import pagedjax` promises: its names, and that it starts nothing and changes nothing."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import pagedjax

NAMES = {
    "LLM", "LLMEngine", "StepOutput", "AsyncEngine", "EngineConfig", "SamplingParams", "RequestOutputKind",
    "StructuredOutputsParams", "ReasoningTokens",
    "RequestOutput", "CompletionOutput", "Logprob", "RequestMetrics", "PagedJaxError", "ConfigError",
    "CheckpointError", "InvalidRequestError", "EngineDeadError", "EngineView", "RequestView",
    "Histogram", "BeamSearchOutput", "BeamSearchParams", "BeamSearchSequence", "ModelConfig", "RopeConfig",
}  # fmt: skip


def python(code: str) -> str:
    """Run code in a fresh interpreter and return what it prints; what the test run imported does not count there."""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip()


def test_the_public_names_are_these():
    assert set(pagedjax.__all__) == NAMES
    assert set(dir(pagedjax)) >= NAMES


@pytest.mark.parametrize("name", sorted(NAMES))
def test_each_public_name_exists_under_its_own_name(name):
    assert getattr(pagedjax, name).__name__ == name


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'LLMs'"):
        pagedjax.LLMs  # noqa: B018


def test_importing_the_package_imports_neither_jax_nor_other_heavy_packages():
    heavy = "{'jax', 'flax', 'transformers', 'numpy', 'aiohttp', 'orbax', 'torch'}"
    assert python(f"import sys, pagedjax; print(sorted({heavy} & set(sys.modules)))") == "[]"


@pytest.fixture(scope="module")
def imported():
    """What an interpreter says that imports every name, and lacks what the GPU image lacks."""
    code = """
import json, os, sys
for name in ("pydantic", "gguf", "openai", "torch", "llguidance", "xgrammar", "ray", "matplotlib"):
    sys.modules[name] = None
import jax
config, environment = dict(jax.config.values), dict(os.environ)
from pagedjax import *
import pagedjax.loading.orbax
from jax._src import xla_bridge
print(json.dumps({
    "name": LLM.__name__,
    "has backends": xla_bridge.backends_are_initialized(),
    "options": [k for k, v in jax.config.values.items() if config.get(k) != v],
    "variables": [k for k in os.environ if os.environ[k] != environment.get(k)],
}))
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout) | {"stderr": ran.stderr}


def test_importing_every_public_name_starts_no_backend_and_changes_no_config(imported):
    assert (imported["has backends"], imported["options"]) == (False, [])


def test_importing_names_says_nothing_and_leaves_the_environment_alone(imported):
    """transformers told library users that it missed PyTorch."""
    assert imported["stderr"] == ""
    assert "TRANSFORMERS_NO_ADVISORY_WARNINGS" not in imported["variables"]


def test_type_checkers_are_told_that_the_packages_have_types():
    """Without the files, and in an installation without their entry, whatever a user's code did was Any."""
    root = Path(pagedjax.__file__).parent.parent
    assert (root / "pagedjax/py.typed").exists()
    assert (root / "pallas_kernels/py.typed").exists()
    settings = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert "py.typed" in settings["package-data"]["*"]


def test_optional_packages_are_not_needed_to_import_the_public_names(imported):
    assert imported["name"] == "LLM"
