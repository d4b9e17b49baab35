"""The engine that an offline measurement runs, and its flags."""

import gc
import sys
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from pagedjax.config import EngineConfig, option
from pagedjax.engine import LLMEngine
from pagedjax.errors import ConfigError
from pagedjax.loading import resolve_dtype
from pagedjax.sampling_params import RequestOutputKind, SamplingParams


@dataclass(frozen=True, kw_only=True)
class BenchEngineConfig(EngineConfig):
    """EngineConfig with prefix caching off: prompts that were seen before must not come for free."""

    enable_prefix_caching: bool = option(False, "Reuse KV cache blocks of equal prefixes.")


@dataclass(frozen=True, kw_only=True)
class BenchSampling:
    """How every request of a measurement samples."""

    temperature: float = option(0.0, "Randomness; 0 is greedy.")
    top_p: float = option(1.0, "Keep the most likely tokens that reach this probability together.")
    top_k: int = option(0, "Keep this many of the most likely tokens; 0 keeps all.")
    disable_detokenize: bool = option(False, "Do not turn token ids into text.")

    def params(self, max_tokens: int, *, ignore_eos: bool = True, n: int = 1) -> SamplingParams:
        """Return the parameters of a request of `max_tokens`, whose output is handed out once, at its end."""
        return SamplingParams(
            n=n,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            max_tokens=max_tokens,
            ignore_eos=ignore_eos,
            detokenize=not self.disable_detokenize,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )


def start_engine(config: EngineConfig) -> LLMEngine:
    """Build the engine as a server does."""
    engine = LLMEngine(config, show_progress=sys.stderr.isatty())
    gc.collect()
    gc.freeze()  # what is loaded now stays: the collector need not walk it again during a step
    return engine


def describe(engine: LLMEngine) -> dict[str, Any]:
    """Return what a result must say to be worth something later: model, device, versions, start-up times."""
    device = jax.local_devices()[0]
    return {
        "model": engine.config.model_name,
        "device": getattr(device, "device_kind", device.platform),
        "jax_version": jax.__version__,
        "dtype": resolve_dtype(engine.config.dtype, engine.model_config).name,
        "max_model_len": engine.config.max_model_len,
        "max_num_seqs": engine.config.max_num_seqs,
        "max_num_batched_tokens": engine.config.max_num_batched_tokens,
        "start_up_seconds": engine.start_up_seconds,
    }


def header(engine: LLMEngine) -> str:
    """Return the first line of a report."""
    facts = describe(engine)
    seconds = sum(engine.start_up_seconds.values())
    return (
        f"{facts['model']} in {facts['dtype']} on {facts['device']}, jax {facts['jax_version']}, "
        f"ready in {seconds:.1f} s"
    )


def random_token_ids(engine: LLMEngine, rng: np.random.Generator, length: int) -> list[int]:
    """Return a prompt of `length` tokens drawn uniformly from the model's vocabulary."""
    return rng.integers(0, engine.model_config.vocab_size, length).tolist()


def check_length(engine: LLMEngine, num_tokens: int) -> None:
    """Raise a ConfigError where a request of `num_tokens`, output included, would be cut short."""
    limit = engine.config.max_model_len
    assert limit is not None, "the engine resolves it"
    if num_tokens > limit:
        raise ConfigError(
            f"input and output are {num_tokens} tokens together, max_model_len is {limit}; "
            "shorten them or raise --max-model-len"
        )
