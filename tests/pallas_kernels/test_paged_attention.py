"""The blockwise backend equals the dense reference, and the reference a loop in numpy."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention.tuning import tiling

pytestmark = pytest.mark.usefixtures("compiled_quickly")

# Both sides sum up to 300 products in float32, in different orders; outputs are near 1.
FLOAT32 = {"atol": 3e-6, "rtol": 1e-5}
# Weights are rounded to the pool's type before they meet the values: one half unit in the last place of weight and
# result each, 2 ** -9 in bfloat16 and 2 ** -12 in float16.
HALF = {jnp.bfloat16: {"atol": 8e-3, "rtol": 1e-2}, jnp.float16: {"atol": 1e-3, "rtol": 2e-3}}

TILE = tiling().queries

# (query_len, seq_len): decoding at a block's last and next slot, length 1, whole prompts, chunks over a context, query
# tokens around a tile's, a request with nothing this step, an empty one.
MIXED = [
    *[(1, 32), (1, 33), (1, 1), (70, 70), (0, 40), (20, 150), (0, 0), (2, 2), (1, 300)],
    *[(TILE - 1, TILE), (TILE, TILE + 9), (TILE + 1, TILE + 1)],
]
DECODE = [(1, n) for n in (1, 2, 15, 16, 17, 127, 128, 129, 290)]


# Groups of 1, 2, 3, 4, 8 and 12, every head size, blocks shorter and longer than a chunk, windows shorter and longer
# than the sequences and crossed by the query tokens.
@pytest.mark.parametrize(
    ("lens", "heads", "head_dim", "block_size", "options"),
    [
        (MIXED, (2, 2), 16, 8, {}),
        (DECODE, (9, 3), 64, 16, {}),
        (MIXED, (9, 3), 64, 16, {"window": 20}),
        (MIXED, (4, 1), 128, 32, {"soft_cap": 2.0}),
        (MIXED, (8, 1), 256, 16, {"window": 400}),
        (DECODE, (6, 2), 16, 32, {"window": 60, "soft_cap": 1.5, "sinks": True}),
        (MIXED, (4, 2), 16, 16, {"window": 130, "sinks": True}),
        (DECODE, (12, 1), 16, 128, {"window": 1}),
    ],
)
def test_blockwise_equals_the_reference(make_batch, lens, heads, head_dim, block_size, options):
    batch = make_batch(
        lens, heads=heads, head_dim=head_dim, block_size=block_size, num_blocks=3000 // block_size,
        max_blocks=400 // block_size + 1, pad_tokens=3, pad_requests=3,
    )  # fmt: skip
    options = dict(options)
    if options.pop("sinks", False):
        options |= {"sinks": jnp.linspace(-2, 3, heads[0], dtype=jnp.float32)}
    expected = batch.attend(backend="reference", **options)
    np.testing.assert_allclose(batch.attend(**options), expected, **FLOAT32)


@pytest.mark.parametrize(("dtype", "lens"), [(jnp.bfloat16, MIXED), (jnp.float16, DECODE)])
def test_blockwise_equals_the_reference_in_half_precision(make_batch, dtype, lens):
    batch = make_batch(lens)
    expected = batch.attend(dtype=dtype, backend="reference")
    np.testing.assert_allclose(batch.attend(dtype=dtype), expected, **HALF[dtype])


def test_more_decoding_requests_than_one_group_holds(make_batch):
    lens = [(1, 1 + 37 * i % 90) for i in range(2 * tiling().rows + 5)]
    batch = make_batch(lens, num_blocks=200, pad_tokens=6, pad_requests=6)
    np.testing.assert_allclose(batch.attend(), batch.attend(backend="reference"), **FLOAT32)


def test_as_many_tokens_as_requests_need_not_be_one_each(make_batch):
    batch = make_batch([(2, 40), (0, 33), (1, 20), (3, 3), (0, 0), (0, 5)])
    assert len(batch.q) == len(batch.seq_lens)
    np.testing.assert_allclose(batch.attend(), batch.attend(backend="reference"), **FLOAT32)


@pytest.mark.parametrize(("pad_tokens", "sinks"), [(4, None), (7, np.zeros(4, np.float32))])
def test_a_batch_without_live_tokens_is_zeros(make_batch, pad_tokens, sinks):
    batch = make_batch([(0, 30)], pad_tokens=pad_tokens, pad_requests=3)
    given = {} if sinks is None else {"sinks": jnp.asarray(sinks)}
    np.testing.assert_array_equal(batch.attend(**given), 0)


@pytest.mark.parametrize("options", [{}, {"window": 6}, {"soft_cap": 0.7}, {"sinks": True}])
def test_the_reference_equals_a_loop_over_tokens(make_batch, options):
    batch = make_batch([(1, 20), (9, 17), (0, 5), (3, 3)], pad_tokens=2, pad_requests=1)
    options = dict(options)
    sinks = np.linspace(-1, 2, 4).astype(np.float32) if options.pop("sinks", False) else None
    expected = np.zeros(batch.q.shape)
    for request, start in enumerate(batch.query_start_loc[:-1]):
        seq_len = batch.seq_lens[request]
        query_len = batch.query_start_loc[request + 1] - start
        for i in range(query_len):
            expected[start + i] = attend_one(
                batch, request, batch.q[start + i], seq_len - query_len + i, sinks, **options
            )
    given = {} if sinks is None else {"sinks": jnp.asarray(sinks)}
    np.testing.assert_allclose(batch.attend(backend="reference", **options, **given), expected, **FLOAT32)


def attend_one(batch, request, q, position, sinks, *, window=None, soft_cap=None):
    """One token's output by its definition: [N, H]."""
    _, num_kv_heads, block_size, _ = batch.k_pool.shape
    group = len(q) // num_kv_heads
    positions = range(0 if window is None else max(position - window + 1, 0), position + 1)
    slots = [(batch.block_tables[request, p // block_size], p % block_size) for p in positions]
    out = []
    for head, query in enumerate(q.astype(np.float64)):
        k = np.array([batch.k_pool[block, head // group, offset] for block, offset in slots], np.float64)
        v = np.array([batch.v_pool[block, head // group, offset] for block, offset in slots], np.float64)
        scores = batch.scale * k @ query
        if soft_cap is not None:
            scores = soft_cap * np.tanh(scores / soft_cap)
        weights = np.exp(scores)
        out.append(weights @ v / (weights.sum() + (0 if sinks is None else np.exp(sinks[head]))))
    return np.array(out)
