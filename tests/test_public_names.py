"""What `import pagedjax` promises: its names, and that it starts nothing and changes nothing."""

import subprocess
import sys

import pytest

import pagedjax

NAMES = {
    "LLM", "LLMEngine", "StepOutput", "AsyncEngine", "EngineConfig", "SamplingParams", "RequestOutputKind",
    "StructuredOutputsParams", "ReasoningTokens",
    "RequestOutput", "CompletionOutput", "Logprob", "RequestMetrics", "PagedJaxError", "ConfigError",
    "CheckpointError", "InvalidRequestError", "EngineDeadError", "EngineView", "RequestView",
    "Histogram", "BeamSearchOutput", "BeamSearchParams", "BeamSearchSequence",
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


def test_importing_every_public_name_starts_no_backend_and_changes_no_config():
    code = """
import jax
before = dict(jax.config.values)
from pagedjax import *
from jax._src import xla_bridge
changed = {k for k, v in jax.config.values.items() if before.get(k) != v}
print(xla_bridge.backends_are_initialized(), sorted(changed))
"""
    assert python(code) == "False []"


def test_importing_names_says_nothing_and_leaves_the_environment_alone():
    """transformers told library users that it missed PyTorch."""
    code = """
import os
before = dict(os.environ)
from pagedjax import LLM, LLMEngine, AsyncEngine
import pagedjax.loading.orbax
os.environ.pop("TPU_LIBRARY_PATH", None)
print({k for k in os.environ if os.environ[k] != before.get(k)} & {"TRANSFORMERS_NO_ADVISORY_WARNINGS"})
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (ran.stdout.strip(), ran.stderr) == ("set()", "")


def test_optional_packages_are_not_needed_to_import_the_public_names():
    """The GPU image lacks these."""
    code = """
import sys
for name in ("pydantic", "gguf", "openai", "torch", "llguidance", "xgrammar", "ray", "matplotlib"):
    sys.modules[name] = None
from pagedjax import *
print(LLM.__name__)
"""
    assert python(code) == "LLM"
