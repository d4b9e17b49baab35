"""The ledger decides how many blocks and how long a context fit, and says so where too little does."""

import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from pagedjax.config import AUTO, EngineConfig, resolve
from pagedjax.errors import ConfigError, InvalidRequestError
from pagedjax.execution import kv_cache
from pagedjax.sampling_params import SamplingParams
from tests.fakes import FAKE_CONFIG, continuation, fake_engine, run_all
from tests.kept_executables import few_buckets

MIB = 1 << 20
BLOCK = 2 * 8 * 4  # bytes: K and V, one layer of one head of one float32, 8 tokens


def plan(*, weights=0, request_state=0, temporaries=0, swap_staging=0, **options):
    config = resolve(EngineConfig(block_size=8, **options), max_position_embeddings=256, platform="cpu")
    return kv_cache.plan(
        config, FAKE_CONFIG, dtype=jnp.dtype("float32"), max_model_len=config.max_model_len, weights=weights,
        request_state=request_state, temporaries=temporaries, swap_staging=swap_staging,
    )  # fmt: skip


@pytest.fixture
def gpu(monkeypatch):
    """A GPU with 2 GiB for JAX, which holds 10 MiB of somebody else's arrays."""
    stats = {"bytes_limit": 2 << 30, "bytes_in_use": 10 * MIB}
    device = SimpleNamespace(platform="gpu", memory_stats=lambda: stats)
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "1.0")
    return stats


@pytest.mark.parametrize(
    ("num_blocks", "concurrency", "max_model_len"),
    [(33, 1, 256), (32, 1, 248), (33, 4, 64), (33, 5, 48), (100, 1, 256)],
)
def test_auto_is_the_longest_of_which_the_stated_number_fits(num_blocks, concurrency, max_model_len):
    ledger = plan(num_gpu_blocks_override=num_blocks, max_model_len="auto", auto_concurrency=concurrency)
    assert ledger.max_model_len == max_model_len
    assert ledger.max_concurrency >= concurrency


def test_auto_follows_the_bytes_that_are_left(gpu):
    left = 21 * BLOCK
    ledger = plan(temporaries=int(0.9 * (2 << 30)) - (1 << 30) - 10 * MIB - left, max_model_len="auto")
    assert (ledger.num_blocks, ledger.max_model_len) == (21, 160)


def test_staging_buffers_for_swapped_blocks_are_in_the_ledger_and_cost_blocks(gpu):
    options = {"weights": int(0.9 * (2 << 30)) - (1 << 30) - 10 * MIB - 50 * BLOCK, "max_model_len": 64}
    gpu["bytes_in_use"] += options["weights"]
    without, ledger = plan(**options), plan(**options, swap_staging=20 * BLOCK)
    assert (without.num_blocks, ledger.num_blocks) == (50, 30)
    assert ("staging for swapped blocks", 20 * BLOCK) in ledger.rows()
    assert not any("swapped" in name for name, _ in without.rows())


@pytest.mark.parametrize("size", [{"num_gpu_blocks_override": 100}, {"kv_cache_memory_bytes": 100 * BLOCK}])
@pytest.mark.parametrize(("enable_prefix_caching", "num_blocks"), [(True, 100), (False, 33)])
def test_a_stated_size_is_kept_where_prefixes_may_use_it(size, enable_prefix_caching, num_blocks):
    """One request of 32 blocks at a time left no room to pin a prefix, however large the pool was said to be."""
    assert plan(**size, max_num_seqs=1, enable_prefix_caching=enable_prefix_caching).num_blocks == num_blocks
    assert plan(max_num_seqs=1).num_blocks == 33


def test_auto_is_an_error_where_not_even_one_block_fits():
    with pytest.raises(ConfigError, match="request of max_model_len 8 needs"):
        plan(kv_cache_memory_bytes=BLOCK, max_model_len="auto")


def test_too_little_memory_is_told_with_the_ledger_and_with_what_would_fit(gpu):
    gpu["bytes_in_use"] = 50 * MIB
    budget = int(0.9 * (2 << 30)) - (1 << 30)
    options = {"max_num_seqs": 100, "request_state": 50 * MIB, "temporaries": budget - 50 * MIB - 21 * BLOCK}
    with pytest.raises(ConfigError) as error:
        plan(**options)
    message = str(error.value)
    assert "one request of max_model_len 256 needs" in message
    assert re.search(r"^  temporaries .* GiB$", message, re.MULTILINE)
    fits = int(re.search(r"--max-model-len to (\d+) or less", message).group(1))
    assert plan(**options, max_model_len=fits).max_concurrency >= 1
    with pytest.raises(ConfigError):
        plan(**options, max_model_len=fits + 1)
    max_num_seqs = int(re.search(r"--max-num-seqs to about (\d+) or less", message).group(1))
    gpu["bytes_in_use"] = 0
    saved = (100 - max_num_seqs) * (50 * MIB // 100)
    assert plan(**{**options, "request_state": 50 * MIB - saved, "max_num_seqs": max_num_seqs}).max_concurrency >= 1


def test_where_not_even_the_step_fits_nothing_is_promised(gpu):
    with pytest.raises(ConfigError) as error:
        plan(weights=4 << 30, max_num_seqs=2)
    assert "--max-model-len" not in str(error.value).split("\n")[0]
    assert "--max-num-seqs" not in str(error.value)
    assert "use a smaller dtype" in str(error.value)


@pytest.mark.parametrize(
    ("num_blocks", "max_num_seqs", "is_hinted"),
    [(513, 256, True), (600, 256, True), (3000, 256, False), (1025, 2, False), (1024, 2, True)],
)
def test_a_pool_for_a_few_of_the_longest_requests_is_a_hint_at_start(num_blocks, max_num_seqs, is_hinted):
    """Two requests at a time were advised to be shorter where there was room for both."""
    ledger = kv_cache.Ledger(
        budget=0, weights=0, request_state=0, temporaries=0, margin=0, foreign=0, block=BLOCK, num_blocks=num_blocks,
        block_size=8, max_model_len=4096, device="gpu", max_num_seqs=max_num_seqs,
    )  # fmt: skip
    hints = [line for line in ledger.lines() if line.startswith("Hint:")]
    assert bool(hints) == is_hinted
    assert all("99th percentile" in hint for hint in hints)


def automatic_engine():
    with few_buckets():
        return fake_engine(max_model_len=AUTO, auto_concurrency=2, num_gpu_blocks_override=17, max_num_seqs=2)


def test_an_engine_of_automatic_length_takes_requests_up_to_it():
    engine = automatic_engine()
    assert engine.config.max_model_len == 64
    assert "Maximum concurrency for 64 tokens per request: 2.00x" in engine.start_up_lines()
    prompt = list(range(51))
    params = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
    out = run_all(engine, [("a", prompt, params), ("b", prompt, params)])["b"].outputs[0]
    assert (out.token_ids, out.finish_reason) == (continuation(prompt, 13), "length")
    with pytest.raises(InvalidRequestError, match="64 tokens, max_model_len is 64"):
        engine.add_request("c", list(range(64)), params)


def test_a_pool_that_the_device_refuses_is_told_with_the_ledger(monkeypatch):
    def allocate(*args, **options):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory\nand more")

    monkeypatch.setattr(kv_cache, "allocate", allocate)
    with pytest.raises(ConfigError, match=r"refuses a KV cache of 0.00 GiB: RESOURCE_EXHAUSTED: Out of memory; lower"):
        automatic_engine()


def test_too_few_blocks_are_told_in_blocks():
    """It said that 0.35 GiB were needed and 1.00 GiB was there."""
    with pytest.raises(ConfigError) as error:
        plan(num_gpu_blocks_override=4)
    first = str(error.value).splitlines()[0]
    assert "needs 33 blocks of KV cache, there is room for 4 blocks (24 tokens)" in first
    assert first.endswith("raise --num-gpu-blocks-override to 33, or set --max-model-len to 24 or less")
    assert plan(num_gpu_blocks_override=33).num_blocks == 33


def test_too_little_memory_for_a_block_does_not_advise_a_length_of_zero():
    with pytest.raises(ConfigError) as error:
        plan(kv_cache_memory_bytes=10)
    assert str(error.value).splitlines()[0].endswith(f"raise --kv-cache-memory-bytes to {33 * BLOCK}")


def test_a_draft_model_s_weights_and_blocks_are_in_the_ledger_and_cost_blocks(gpu):
    """A draft block as large as the target's halves the pool."""
    config = resolve(EngineConfig(block_size=8, max_model_len=64), max_position_embeddings=256, platform="cpu")
    weights = int(0.9 * (2 << 30)) - (1 << 30) - 10 * MIB - 60 * BLOCK
    gpu["bytes_in_use"] += weights + 10 * BLOCK
    ledger = kv_cache.plan(
        config, FAKE_CONFIG, dtype=jnp.dtype("float32"), max_model_len=64, weights=weights, request_state=0,
        temporaries=0, draft_weights=10 * BLOCK, draft_block=BLOCK,
    )  # fmt: skip
    assert ledger.num_blocks == 25
    assert ("weights of the draft model", 10 * BLOCK) in ledger.rows()
    assert (f"KV cache of the draft model, {BLOCK} bytes a block", 25 * BLOCK) in ledger.rows()


def test_a_draft_model_that_leaves_no_room_is_refused_with_the_numbers(gpu):
    config = resolve(EngineConfig(block_size=8, max_model_len=64), max_position_embeddings=256, platform="cpu")
    draft_weights = 2 << 30
    with pytest.raises(ConfigError, match=r"use a smaller draft model or none(.|\n)*weights of the draft model +2.000"):
        kv_cache.plan(
            config, FAKE_CONFIG, dtype=jnp.dtype("float32"), max_model_len=64, weights=0, request_state=0,
            temporaries=0, draft_weights=draft_weights, draft_block=BLOCK,
        )  # fmt: skip
