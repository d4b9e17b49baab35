"""Engine options: vLLM's names and defaults, types and ranges, contradictions, and what is refused as not built."""

import dataclasses
import math

import pytest

from pagedjax.config import AUTO, MAX_LOGPROBS, EngineConfig, resolve
from pagedjax.errors import ConfigError

DEFAULTS = {
    "model": "demo",
    "served_model_name": None,
    "dtype": "auto",
    "block_size": 16,
    "gpu_memory_utilization": 0.9,
    "kv_cache_memory_bytes": None,
    "num_gpu_blocks_override": None,
    "max_model_len": None,
    "max_num_seqs": 256,
    "max_num_batched_tokens": None,
    "enable_prefix_caching": True,
    "swap_space": 0.0,
    "scheduler_delay_factor": 0.0,
    "watermark": 0.05,
    "quantization": None,
    "tensor_parallel_size": 1,
    "speculative_config": None,
    "seed": 0,
}


@pytest.mark.parametrize(("name", "default"), DEFAULTS.items())
def test_each_named_option_has_its_documented_default(name, default):
    assert getattr(EngineConfig(), name) == default


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model", "/models/llama"),
        ("served_model_name", "llama"),
        ("dtype", "bfloat16"),
        ("block_size", 32),
        ("gpu_memory_utilization", 1),
        ("gpu_memory_utilization", 0.5),
        ("kv_cache_memory_bytes", 1 << 30),
        ("num_gpu_blocks_override", 2),
        ("max_model_len", 1),
        ("max_num_seqs", 1),
        ("max_num_batched_tokens", 256),
        ("enable_prefix_caching", False),
        ("swap_space", 4),
        ("preemption_mode", "recompute"),
        ("watermark", 0),
        ("max_model_len", AUTO),
        ("scheduler_delay_factor", 0.5),
        ("target_itl_ms", 20),
        ("seed", -1),
        ("max_logprobs", MAX_LOGPROBS),
        ("compilation_cache_dir", ""),
    ],
)
def test_a_good_value_is_kept(name, value):
    assert getattr(EngineConfig(**{name: value}), name) == value


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("model", "", "model is empty; give a directory"),
        ("model", None, "model is None; it must be str"),
        ("dtype", "int3", "dtype is 'int3'; choose one of auto, float32, bfloat16, float16"),
        ("load_format", "pt", "load_format is 'pt'; choose one of auto, safetensors"),
        ("block_size", 12, "block_size is 12; choose one of 8, 16, 32, 64, 128"),
        ("block_size", 16.0, "block_size is 16.0; choose one of"),
        ("gpu_memory_utilization", 0.0, "must be above 0 and at most 1, for example 0.9"),
        ("gpu_memory_utilization", 1.1, "must be above 0 and at most 1"),
        ("gpu_memory_utilization", math.nan, "must be above 0 and at most 1"),
        ("gpu_memory_utilization", "0.9", "gpu_memory_utilization is '0.9'; it must be float"),
        ("kv_cache_memory_bytes", 0, "kv_cache_memory_bytes is 0; it must be at least 1"),
        ("num_gpu_blocks_override", 1, "num_gpu_blocks_override is 1; it must be at least 2"),
        ("max_model_len", 0, "max_model_len is 0; it must be at least 1"),
        ("max_model_len", 4096.0, "max_model_len is 4096.0; it must be int or None"),
        ("max_num_seqs", 0, "max_num_seqs is 0; it must be at least 1"),
        ("max_num_seqs", True, "max_num_seqs is True; it must be int"),
        ("max_num_batched_tokens", -1, "max_num_batched_tokens is -1; it must be at least 1"),
        ("enable_prefix_caching", "no", "enable_prefix_caching is 'no'; it must be bool"),
        ("enable_prefix_caching", 1, "enable_prefix_caching is 1; it must be bool"),
        ("swap_space", -1, "swap_space is -1; it must be at least 0"),
        ("swap_space", math.nan, "swap_space is nan; it must be at least 0"),
        ("preemption_mode", "swap", "swap_space is 0, so that there is nowhere to swap to; set --swap-space"),
        ("max_model_len", -2, "max_model_len is -2; it must be at least 1"),
        ("max_model_len", "long", "max_model_len is 'long'; it must be int or None"),
        ("auto_concurrency", 0, "auto_concurrency is 0; it must be at least 1"),
        ("auto_concurrency", 4, "it belongs to --max-model-len auto: leave one out"),
        ("target_itl_ms", 0, "target_itl_ms is 0; it must be at least 0.1"),
        ("watermark", 0.6, "watermark is 0.6; it must be at least 0 and at most 0.5"),
        ("scheduler_delay_factor", -0.5, "scheduler_delay_factor is -0.5; it must be at least 0"),
        ("scheduling_policy", "lifo", "scheduling_policy is 'lifo'; choose one of fcfs, priority"),
        ("tensor_parallel_size", 0, "tensor_parallel_size is 0; it must be at least 1"),
        ("speculative_config", "ngram", "speculative_config is 'ngram', which is not JSON"),
        ("seed", 2**63, "seed is 9223372036854775808; it must be at least"),
        ("max_logprobs", 65, "max_logprobs is 65; it must be at least 0 and at most 64"),
    ],
)
def test_a_bad_value_names_the_value_and_the_limit(name, value, message):
    with pytest.raises(ConfigError) as raised:
        EngineConfig(**{name: value})
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tensor_parallel_size", 2),
        ("pipeline_parallel_size", 2),
        ("data_parallel_size", 2),
        ("quantization", "awq"),
        ("enable_chunked_prefill", False),
        ("trust_remote_code", True),
    ],
)
def test_what_is_not_built_is_refused_with_a_remedy(name, value):
    with pytest.raises(ConfigError, match=rf"^{name}=.* is (not built yet|refused)[:;] .*(leave|run|lower)"):
        EngineConfig(**{name: value})


def test_a_token_budget_below_the_number_of_sequences_is_a_contradiction():
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens is 128, below max_num_seqs 256; .*--max-num-seqs"):
        EngineConfig(max_num_batched_tokens=128)
    assert EngineConfig(max_num_batched_tokens=128, max_num_seqs=128).max_num_batched_tokens == 128


def test_two_sizes_of_the_kv_cache_are_a_contradiction():
    with pytest.raises(ConfigError, match="both fix the size of the KV cache: leave one out"):
        EngineConfig(kv_cache_memory_bytes=1 << 20, num_gpu_blocks_override=100)


def test_an_unknown_option_is_an_error():
    with pytest.raises(TypeError, match="max_sequences"):
        EngineConfig(max_sequences=4)


def test_a_config_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        EngineConfig().seed = 1


def test_each_option_explains_itself():
    assert all(field.metadata["help"].endswith(".") for field in dataclasses.fields(EngineConfig))


def test_clients_see_the_served_name_or_else_the_model():
    assert EngineConfig(model="m").model_name == "m"
    assert EngineConfig(model="m", served_model_name="n").model_name == "n"


def test_resolving_fills_in_the_models_length_and_the_devices_budget():
    on_cpu = resolve(EngineConfig(), max_position_embeddings=4096, platform="cpu")
    on_gpu = resolve(EngineConfig(max_model_len=1000), max_position_embeddings=4096, platform="gpu")
    assert (on_cpu.max_model_len, on_cpu.max_num_batched_tokens) == (4096, 2048)
    assert (on_gpu.max_model_len, on_gpu.max_num_batched_tokens) == (1000, 8192)


def test_resolving_keeps_a_budget_that_was_given_and_covers_every_sequence():
    given = resolve(EngineConfig(max_num_batched_tokens=512), max_position_embeddings=64, platform="gpu")
    many = resolve(EngineConfig(max_num_seqs=5000), max_position_embeddings=64, platform="cpu")
    assert given.max_num_batched_tokens == 512
    assert many.max_num_batched_tokens == 5000


def test_a_context_longer_than_the_models_is_refused():
    with pytest.raises(
        ConfigError, match=r"max_model_len is 8192, .* end at 4096; set --max-model-len to 4096 or less"
    ):
        resolve(EngineConfig(max_model_len=8192), max_position_embeddings=4096, platform="cpu")
