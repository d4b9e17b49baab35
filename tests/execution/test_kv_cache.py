"""What the ledger says where not even one request fits: the limit that counts, and only remedies that would work."""

import jax.numpy as jnp
import pytest

from pagedjax.config import EngineConfig
from pagedjax.errors import ConfigError
from pagedjax.execution import kv_cache
from tests.fakes import FAKE_CONFIG


def plan(**options):
    config = EngineConfig(model="fake", block_size=16, max_num_seqs=4, **options)
    return kv_cache.plan(
        config, FAKE_CONFIG, dtype=jnp.dtype("float32"), max_model_len=128, weights=0, request_state=0, temporaries=0
    )


def test_too_few_blocks_are_told_in_blocks():
    """It said that 0.35 GiB were needed and 1.00 GiB was there."""
    with pytest.raises(
        ConfigError, match=r"needs 9 blocks of KV cache, there is room for 4 blocks \(48 tokens\)"
    ) as error:
        plan(num_gpu_blocks_override=4)
    assert str(error.value).endswith("raise --num-gpu-blocks-override to 9, or set --max-model-len to 48 or less")
    assert plan(num_gpu_blocks_override=9).num_blocks == 9


def test_too_little_memory_for_a_block_does_not_advise_a_length_of_zero():
    with pytest.raises(ConfigError, match=r"raise --kv-cache-memory-bytes to 1152$"):
        plan(kv_cache_memory_bytes=100)
    assert plan(kv_cache_memory_bytes=1152).num_blocks == 9
