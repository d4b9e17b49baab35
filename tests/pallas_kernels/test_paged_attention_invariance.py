"""What a request's output and cost must not depend on.

Padding, the contents of slots it does not own, its neighbours, how its tokens are split over steps, the table's width.
"""

import jax
import numpy as np
import pytest

from pallas_kernels.paged_attention import blockwise
from pallas_kernels.paged_attention.tuning import tiling

# The order of the sums over a sequence is fixed; how XLA splits a dot over lanes may change with the number of rows.
ROUNDING = {"atol": 1e-6, "rtol": 1e-6}

MIXED = [(1, 32), (30, 70), (0, 40), (1, 130), (30, 30), (0, 0)]
DECODE = [(1, n) for n in (1, 31, 32, 33, 130, 129)]


@pytest.mark.parametrize("garbage", [1e30, np.inf, np.nan])
@pytest.mark.parametrize("lens", [DECODE, MIXED], ids=["decode", "mixed"])
def test_garbage_in_slots_and_padding_changes_nothing(make_batch, lens, garbage):
    batch = make_batch(lens, pad_tokens=5, pad_requests=5)
    stale = ~batch.owned()[:, None, :, None]
    q = batch.q.copy()
    q[batch.num_tokens :] = garbage
    needed = -(-batch.seq_lens // 16)
    unallocated = np.arange(batch.block_tables.shape[1]) >= needed[:, None]
    dirty = batch.replace(
        q=q,
        k_pool=np.where(stale, np.float32(garbage), batch.k_pool),
        v_pool=np.where(stale, np.float32(garbage), batch.v_pool),
        block_tables=np.where(unallocated, np.int32(10**9), batch.block_tables),
    )
    out = dirty.attend()
    np.testing.assert_array_equal(out, batch.attend())
    np.testing.assert_array_equal(out[batch.num_tokens :], 0)


@pytest.mark.parametrize("lens", [DECODE, MIXED], ids=["decode", "mixed"])
def test_a_request_with_nan_in_its_cache_spoils_only_itself(make_batch, lens):
    batch = make_batch(lens, pad_tokens=5, pad_requests=5)
    k_pool, v_pool = batch.k_pool.copy(), batch.v_pool.copy()
    k_pool[batch.block_tables[1, 0]] = np.nan
    v_pool[batch.block_tables[1, 0]] = np.nan
    out, clean = batch.replace(k_pool=k_pool, v_pool=v_pool).attend(), batch.attend()
    start, end = batch.query_start_loc[1:3]
    assert np.isnan(out[start:end]).all()
    np.testing.assert_array_equal(np.delete(out, np.s_[start:end], 0), np.delete(clean, np.s_[start:end], 0))


def test_blocks_behind_a_window_are_never_used(make_batch):
    batch = make_batch([(1, 290), (40, 300)])
    blocks = batch.block_tables[:, : (260 - 64) // 16]  # the earliest query is at 260
    k_pool, v_pool = batch.k_pool.copy(), batch.v_pool.copy()
    k_pool[blocks], v_pool[blocks] = np.nan, np.nan
    out = batch.replace(k_pool=k_pool, v_pool=v_pool).attend(window=64)
    np.testing.assert_array_equal(out, batch.attend(window=64))


@pytest.mark.parametrize(
    ("lens", "options"), [(DECODE, {}), (DECODE, {"window": 40}), (MIXED, {})], ids=["decode", "window", "mixed"]
)
def test_a_request_alone_equals_itself_in_a_batch(make_batch, lens, options):
    batch = make_batch(lens, pad_tokens=5, pad_requests=5)
    together = batch.attend(**options)
    for i, (start, end) in enumerate(zip(batch.query_start_loc, batch.query_start_loc[1:], strict=False)):
        if start < end:
            alone = batch.replace(
                q=batch.q[start:end],
                block_tables=batch.block_tables[i : i + 1],
                query_start_loc=np.array([0, end - start], np.int32),
                seq_lens=batch.seq_lens[i : i + 1],
            )
            np.testing.assert_allclose(alone.attend(**options), together[start:end], **ROUNDING)


def test_a_prompt_in_chunks_equals_the_whole_prompt(make_batch):
    """Chunks of one token are decoding, so this compares tiles, rows and their sums with each other."""
    prompt = make_batch([(150, 150)])
    whole = prompt.attend()
    for size in (1, 30):
        chunks = [
            prompt.replace(
                q=prompt.q[end - size : end],
                query_start_loc=np.array([0, size], np.int32),
                seq_lens=np.array([end], np.int32),
            ).attend()
            for end in range(size, 151, size)
        ]
        np.testing.assert_allclose(np.concatenate(chunks), whole, **ROUNDING)


def test_the_result_is_the_same_with_64_bit_types_on(make_batch):
    batch = make_batch(MIXED, pad_tokens=5, pad_requests=5)
    expected = batch.attend()
    with jax.enable_x64(True):
        np.testing.assert_array_equal(batch.attend(), expected)


@pytest.mark.parametrize("max_blocks", [4, 4096])
def test_chunks_read_follow_the_longest_sequence_and_not_the_table(make_batch, chunks_read, max_blocks):
    make_batch([(1, 64), (1, 7)], max_blocks=max_blocks).attend()
    assert chunks_read() == 64 // tiling().chunk_tokens


def test_chunks_read_grow_with_the_sequence_and_shrink_with_a_window(make_batch, chunks_read):
    long = make_batch([(1, 1000)], max_blocks=64)
    long.attend()
    assert chunks_read() == -(-1000 // tiling().chunk_tokens)
    long.attend(window=100)
    assert chunks_read() == 2  # positions 900 to 999 lie in [896, 1024)


def test_padding_requests_and_tokens_cost_no_chunk(make_batch, chunks_read):
    lens = [(0, 0)] * 40 + [(1, 40)] + [(0, 0)] * 30 + [(1, 9)]
    make_batch(lens, pad_tokens=70).attend()
    assert chunks_read() == 1
    make_batch([*lens, (20, 33)], pad_tokens=200).attend()
    assert chunks_read() == 2  # one of the group of rows, one of the tile


@pytest.fixture
def chunks_read(monkeypatch):
    """Count, at run time, how many chunks were read since the last call."""
    count = 0

    def reset() -> int:
        nonlocal count
        jax.effects_barrier()
        seen, count = count, 0
        return seen

    def bump() -> None:
        nonlocal count
        count += 1

    accumulate = blockwise._accumulate

    def counted(*args, **kwargs):
        jax.debug.callback(bump)
        return accumulate(*args, **kwargs)

    monkeypatch.setattr(blockwise, "_accumulate", counted)
    jax.clear_caches()
    yield reset
    jax.clear_caches()
