"""Serve and run large language models from JAX. The names below are the public interface; importing starts no backend."""

import importlib
from typing import Any

_HOMES = {
    "LLM": "pagedjax.llm",
    "LLMEngine": "pagedjax.engine",
    "StepOutput": "pagedjax.engine",
    "AsyncEngine": "pagedjax.async_engine",
    "EngineConfig": "pagedjax.config",
    "SamplingParams": "pagedjax.sampling_params",
    "RequestOutputKind": "pagedjax.sampling_params",
    "RequestOutput": "pagedjax.outputs",
    "CompletionOutput": "pagedjax.outputs",
    "Logprob": "pagedjax.outputs",
    "RequestMetrics": "pagedjax.outputs",
    "PagedJaxError": "pagedjax.errors",
    "ConfigError": "pagedjax.errors",
    "CheckpointError": "pagedjax.errors",
    "InvalidRequestError": "pagedjax.errors",
    "EngineDeadError": "pagedjax.errors",
}

__all__ = sorted(_HOMES)
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that importing the package stays cheap."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
