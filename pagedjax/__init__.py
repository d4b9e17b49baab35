"""Serve and run large language models from JAX. These names are the public interface; importing starts no backend."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for type checkers and editors: at run time `__getattr__` imports a name when it is first used
    from pagedjax.async_engine import AsyncEngine as AsyncEngine
    from pagedjax.beam_search import BeamSearchOutput as BeamSearchOutput
    from pagedjax.beam_search import BeamSearchParams as BeamSearchParams
    from pagedjax.beam_search import BeamSearchSequence as BeamSearchSequence
    from pagedjax.config import EngineConfig as EngineConfig
    from pagedjax.engine import LLMEngine as LLMEngine
    from pagedjax.engine import StepOutput as StepOutput
    from pagedjax.engine_view import EngineView as EngineView
    from pagedjax.engine_view import RequestView as RequestView
    from pagedjax.errors import CheckpointError as CheckpointError
    from pagedjax.errors import ConfigError as ConfigError
    from pagedjax.errors import EngineDeadError as EngineDeadError
    from pagedjax.errors import InvalidRequestError as InvalidRequestError
    from pagedjax.errors import PagedJaxError as PagedJaxError
    from pagedjax.iteration_stats import Histogram as Histogram
    from pagedjax.llm import LLM as LLM
    from pagedjax.models.config import ModelConfig as ModelConfig
    from pagedjax.models.config import RopeConfig as RopeConfig
    from pagedjax.outputs import CompletionOutput as CompletionOutput
    from pagedjax.outputs import Logprob as Logprob
    from pagedjax.outputs import RequestMetrics as RequestMetrics
    from pagedjax.outputs import RequestOutput as RequestOutput
    from pagedjax.sampling_params import RequestOutputKind as RequestOutputKind
    from pagedjax.sampling_params import SamplingParams as SamplingParams
    from pagedjax.structured_outputs import ReasoningTokens as ReasoningTokens
    from pagedjax.structured_outputs import StructuredOutputsParams as StructuredOutputsParams

_HOMES = {
    "LLM": "pagedjax.llm",
    "LLMEngine": "pagedjax.engine",
    "StepOutput": "pagedjax.engine",
    "Histogram": "pagedjax.iteration_stats",
    "EngineView": "pagedjax.engine_view",
    "RequestView": "pagedjax.engine_view",
    "AsyncEngine": "pagedjax.async_engine",
    "EngineConfig": "pagedjax.config",
    "ModelConfig": "pagedjax.models.config",
    "RopeConfig": "pagedjax.models.config",
    "BeamSearchOutput": "pagedjax.beam_search",
    "BeamSearchParams": "pagedjax.beam_search",
    "BeamSearchSequence": "pagedjax.beam_search",
    "SamplingParams": "pagedjax.sampling_params",
    "RequestOutputKind": "pagedjax.sampling_params",
    "StructuredOutputsParams": "pagedjax.structured_outputs",
    "ReasoningTokens": "pagedjax.structured_outputs",
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

__all__ = sorted(_HOMES)  # pyright: ignore[reportUnsupportedDunderAll]  the imports above tell type checkers
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that importing the package stays cheap."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
