"""Engine options: vLLM's flag names, defaults and meanings, checked before anything loads.

Each field carries its help text; the command line is generated from them (`flags.py`). What depends on
the model (context length, budgets) is left None here and resolved once by `resolve`.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from pagedjax.errors import ConfigError
from pagedjax.options import check_range, check_types, option
from pagedjax.speculation.config import OLDER_FLAGS, SpeculativeConfig, parse_speculative_config

DEFAULT_MAX_NUM_BATCHED_TOKENS = {"cpu": 2048, "gpu": 8192}
CPU_KV_CACHE_BYTES = 1 << 30  # default pool on a CPU, where there is no device memory to take a share of
DUMMY_PREFIX = "dummy:"  # of models that are shapes without weights
AUTO = -1  # max_model_len: the longest that fits
MAX_LOGPROBS = 64  # rows of top log probabilities have this fixed width

# Known to vLLM's users but not built here: the one value that is taken, and what to say about any other.
NOT_BUILT: dict[str, tuple[Any, str]] = {
    "tensor_parallel_size": (1, "is not built yet; leave it at 1"),
    "pipeline_parallel_size": (1, "is not built yet; leave it at 1"),
    "data_parallel_size": (1, "is not built yet; leave it at 1 and run several servers"),
    "quantization": (None, "is not built yet; leave it out (a .gguf file is expanded to --dtype when it loads)"),
    "enable_chunked_prefill": (True, "is refused: long prompts are always split; lower --max-model-len to bound them"),
    "trust_remote_code": (False, "is refused: code from model repositories is never run; leave it out"),
}


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Options of one engine; unknown names are a TypeError, contradictory values a ConfigError."""

    model: str = option(
        "demo",
        "Hugging Face directory or hub name, .gguf file, Orbax directory, 'demo' for the embedded "
        "SmolLM2-135M-Instruct, or 'dummy:llama-8b', 'dummy:llama-0.5b' and 'dummy:qwen3-0.6b' for random weights of "
        "these shapes.",
        positional=True,
    )
    tokenizer: str | None = option(None, "Tokenizer directory or hub name; the model's own if unset.")
    served_model_name: str | None = option(None, "Name that requests and metrics use; the value of --model if unset.")
    revision: str | None = option(None, "Branch, tag or commit on the hub.")
    download_dir: str | None = option(None, "Where hub files are cached; the hub library's default if unset.")
    load_format: Literal["auto", "safetensors", "gguf", "orbax", "dummy"] = option(
        "auto", "Format of the weights; 'dummy' makes random ones from the config alone."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto", "Type of weights, activations and KV cache; 'auto' is the checkpoint's on a GPU and float32 on a CPU."
    )
    quantization: str | None = option(None, "Quantisation method of the weights.", short="-q")
    trust_remote_code: bool = option(False, "Run code from the model repository; always refused.")
    seed: int = option(0, "Seed of dummy weights and of the seeds given to unseeded requests.")
    max_model_len: int | None = option(
        None,
        "Longest prompt plus output in tokens; the model's own limit if unset, 'auto' (or -1) for the longest of which "
        "--auto-concurrency requests fit the KV cache.",
        words={"auto": AUTO},
    )
    auto_concurrency: int = option(1, "Requests of max_model_len tokens that --max-model-len auto leaves room for.")
    block_size: Literal[8, 16, 32, 64, 128] = option(16, "Tokens per KV cache block.")
    gpu_memory_utilization: float = option(0.9, "Share of device memory the engine may use, above 0 and at most 1.")
    kv_cache_memory_bytes: int | None = option(
        None,
        f"Bytes for the KV cache, in place of --gpu-memory-utilization; {CPU_KV_CACHE_BYTES} on a CPU if unset.",
    )
    num_gpu_blocks_override: int | None = option(
        None, "Number of KV cache blocks, in place of what memory allows; for tests."
    )
    swap_space: float = option(
        0.0,
        "GiB of pinned host memory for the blocks of preempted requests and for prefixes that the KV cache has no room "
        "for; 0 for none: they are computed again.",
    )
    preemption_mode: Literal["auto", "swap", "recompute"] = option(
        "auto", "What becomes of a preempted request's blocks; 'auto' does what should take less time, as measured."
    )
    max_num_seqs: int = option(256, "Most requests in one iteration.")
    max_num_batched_tokens: int | None = option(
        None, "Most tokens in one iteration; 8192 on a GPU and 2048 on a CPU if unset."
    )
    enable_prefix_caching: bool = option(True, "Reuse KV cache blocks of equal prefixes.")
    enable_chunked_prefill: bool = option(True, "Split long prompts over iterations; cannot be switched off.")
    scheduling_policy: Literal["fcfs", "priority"] = option(
        "fcfs", "Order of requests: first come first served, or lowest priority value first."
    )
    watermark: float = option(
        0.05,
        "Share of KV cache blocks that admitting a request leaves free, for those that run to grow into (vLLM: 0). "
        "At 0 an overloaded cache computes up to a third of all tokens again.",
    )
    scheduler_delay_factor: float = option(
        0.0,
        "A new prompt waits until the oldest waiting one has waited this many times the last prompt's step, unless "
        "nothing runs: fewer, larger steps for prompts.",
    )
    target_itl_ms: float | None = option(
        None,
        "Milliseconds between two tokens of a request to keep to while prompts come in: the prompts' chunks shrink "
        "until steps are as short; no limit if unset.",
    )
    async_scheduling: bool = option(True, "Run the host one iteration ahead of the device.")
    tensor_parallel_size: int = option(1, "GPUs that share each layer.", short="-tp")
    pipeline_parallel_size: int = option(1, "Groups of layers on different GPUs.", short="-pp")
    data_parallel_size: int = option(1, "Copies of the model.", short="-dp")
    speculative_config: SpeculativeConfig | dict[str, Any] | str | None = option(
        None, "Speculative decoding, as a JSON object of the keys below.", short="-sc"
    )
    speculative_model: str | None = option(None, "Older form of the key model; '[ngram]' for look-ups.")
    num_speculative_tokens: int | None = option(None, "Older form of the key of that name.")
    ngram_prompt_lookup_max: int | None = option(None, "Older form of the key prompt_lookup_max.")
    ngram_prompt_lookup_min: int | None = option(None, "Older form of the key prompt_lookup_min.")
    speculative_draft_tensor_parallel_size: int | None = option(
        None, "Older form of draft_tensor_parallel_size; only 1."
    )
    forced_acceptance: float | None = option(
        None,
        "For benchmarks of speculation: accept each draft with this probability, whatever the target says. Outputs "
        "are wrong.",
    )
    generation_config: str = option(
        "auto", "Where sampling defaults come from: 'auto' the model directory, 'vllm' none, or a directory."
    )
    chat_template: str | None = option(None, "Jinja chat template file or text, in place of the tokenizer's.")
    max_logprobs: int = option(20, f"Most log probabilities a request may ask for per token, at most {MAX_LOGPROBS}.")
    compilation_cache_dir: str | None = option(
        None, "Directory of compiled steps; ~/.cache/pagedjax if unset, an empty string switches it off."
    )
    disable_log_stats: bool = option(False, "No statistics line every ten seconds.")

    def __post_init__(self) -> None:
        if self.max_model_len == "auto":
            object.__setattr__(self, "max_model_len", AUTO)
        self._take_speculation()
        check_types(self)
        _check_ranges(self)
        _check_agreement(self)
        _check_built(self)

    def _take_speculation(self) -> None:
        """Turn whatever says how to speculate into a SpeculativeConfig, the only thing that is left of it."""
        older = {name: getattr(self, name) for name in OLDER_FLAGS}
        forced_acceptance = self.forced_acceptance
        config = parse_speculative_config(self.speculative_config, older=older, forced_acceptance=forced_acceptance)
        object.__setattr__(self, "speculative_config", config)
        for name in (*OLDER_FLAGS, "forced_acceptance"):
            object.__setattr__(self, name, None)

    @property
    def model_name(self) -> str:
        """The name clients see."""
        return self.served_model_name or self.model

    @property
    def speculation(self) -> SpeculativeConfig | None:
        """How to speculate, checked and complete."""
        config = self.speculative_config
        assert config is None or isinstance(config, SpeculativeConfig), "it was parsed"
        return config

    @property
    def has_dummy_weights(self) -> bool:
        """Whether the weights are random, made from a configuration alone."""
        return self.load_format == "dummy" or self.model.startswith(DUMMY_PREFIX)


def resolve(config: EngineConfig, *, max_position_embeddings: int, platform: str) -> EngineConfig:
    """Fill in what depends on the model and the device ("cpu" or "gpu"), and check it; AUTO waits for the ledger.

    Raises:
      ConfigError: max_model_len exceeds what the model was trained for.
    """
    max_model_len = config.max_model_len or max_position_embeddings
    if max_model_len > max_position_embeddings:
        raise ConfigError(
            f"max_model_len is {max_model_len}, the model's positions end at {max_position_embeddings}; "
            f"set --max-model-len to {max_position_embeddings} or less"
        )
    budget = config.max_num_batched_tokens or max(DEFAULT_MAX_NUM_BATCHED_TOKENS[platform], config.max_num_seqs)
    return dataclasses.replace(config, max_model_len=max_model_len, max_num_batched_tokens=budget)


def _check_ranges(config: EngineConfig) -> None:
    for name in ("max_num_seqs", "auto_concurrency", "max_num_batched_tokens", "kv_cache_memory_bytes"):
        check_range(config, name, 1)
    if config.max_model_len != AUTO:
        check_range(config, "max_model_len", 1)
    for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"):
        check_range(config, name, 1)
    check_range(config, "num_gpu_blocks_override", 2)  # block 0 is the null block
    check_range(config, "swap_space", 0)
    check_range(config, "watermark", 0, 0.5)
    check_range(config, "scheduler_delay_factor", 0)
    check_range(config, "target_itl_ms", 0.1)
    check_range(config, "max_logprobs", 0, MAX_LOGPROBS)
    check_range(config, "seed", -(2**63), 2**63 - 1)
    if not 0 < config.gpu_memory_utilization <= 1:
        raise ConfigError(
            f"gpu_memory_utilization is {config.gpu_memory_utilization}; "
            "it must be above 0 and at most 1, for example 0.9"
        )
    if not config.model.strip():
        raise ConfigError("model is empty; give a directory, a file, a hub name or 'demo'")


def _check_agreement(config: EngineConfig) -> None:
    """Refuse values that contradict each other."""
    budget = config.max_num_batched_tokens
    if budget is not None and budget < config.max_num_seqs:
        raise ConfigError(
            f"max_num_batched_tokens is {budget}, below max_num_seqs {config.max_num_seqs}; "
            "every running request needs one token an iteration: raise it or lower --max-num-seqs"
        )
    if config.model.startswith(DUMMY_PREFIX) and config.load_format not in ("auto", "dummy"):
        raise ConfigError(
            f"load_format is {config.load_format!r}, but {config.model!r} is a shape without weights; leave it out"
        )
    if config.auto_concurrency != 1 and config.max_model_len != AUTO:
        raise ConfigError(
            f"auto_concurrency is {config.auto_concurrency}, but max_model_len is {config.max_model_len}; "
            "it belongs to --max-model-len auto: leave one out"
        )
    if config.preemption_mode == "swap" and not config.swap_space:
        raise ConfigError(
            "preemption_mode is 'swap', but swap_space is 0, so that there is nowhere to swap to; "
            "set --swap-space to some GiB or leave --preemption-mode out"
        )
    if config.kv_cache_memory_bytes is not None and config.num_gpu_blocks_override is not None:
        raise ConfigError(
            f"kv_cache_memory_bytes is {config.kv_cache_memory_bytes} and num_gpu_blocks_override is "
            f"{config.num_gpu_blocks_override}; both fix the size of the KV cache: leave one out"
        )


def _check_built(config: EngineConfig) -> None:
    for name, (taken, refusal) in NOT_BUILT.items():
        value = getattr(config, name)
        if value != taken:
            raise ConfigError(f"{name}={value!r:.80} {refusal}")
