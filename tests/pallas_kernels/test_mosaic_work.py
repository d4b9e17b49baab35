"""Work lists share every tile out exactly once, evenly, in order."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.paged_attention import mosaic_work as work
from pallas_kernels.paged_attention.mosaic_prefill import make_query_tiles

TILE, HEADS, WORKERS = 64, 2, 6


def walk(rows: np.ndarray, workers: np.ndarray) -> list[tuple[int, int, int, int]]:
    """(worker, row, head, tile) in the order in which the kernel visits them."""
    visited = []
    for worker, (row, position, end, num_segments) in enumerate(workers.tolist()):
        for _ in range(num_segments):
            num_tiles, start = rows[row, work.NUM_TILES], rows[row, work.START]
            head, first = divmod(position - start, num_tiles)
            count = min(num_tiles - first, end - position)
            visited += [(worker, row, head, rows[row, work.FIRST_TILE] + first + i) for i in range(count)]
            position += count
            if position == start + num_tiles * HEADS:
                row = rows[row, work.NEXT_ROW]
        assert position == end
    return visited


@settings(max_examples=40, deadline=None)
@given(
    lens=st.lists(st.integers(0, 700), min_size=8, max_size=8),
    window=st.sampled_from([None, 1, 64, 100]),
    min_tiles=st.sampled_from([1, 3]),
)
def test_every_tile_of_every_pair_is_visited_once_in_even_shares(lens, window, min_tiles):
    index = jnp.arange(8, dtype=jnp.int32)
    lists = work.make_work_list(
        jnp.asarray(lens, jnp.int32), index, index, num_kv_heads=HEADS, tile=TILE, window=window,
        num_workers=WORKERS, min_tiles=min_tiles,
    )  # fmt: skip
    visited = walk(*map(np.asarray, lists))
    first = [0 if window is None else max(n - window, 0) // TILE for n in lens]
    expected = [
        (row, head, tile)
        for row, n in enumerate(lens)
        for head in range(HEADS)
        for tile in range(first[row], -(-n // TILE))
    ]
    assert [visit[1:] for visit in visited] == expected
    shares = np.bincount([visit[0] for visit in visited], minlength=WORKERS)
    assert shares.max(initial=0) <= max(-(-len(expected) // WORKERS), min_tiles)


@pytest.mark.parametrize("padding", [0, 5])
def test_query_tiles_cover_taken_requests_and_padding(padding):
    query_lens, seq_lens = [7, 1, 0, 16, 9], [20, 5, 3, 16, 30]
    taken = [True, False, True, True, True]
    starts = np.concatenate([[0], np.cumsum(query_lens)])
    tiles = make_query_tiles(
        jnp.asarray(starts, jnp.int32), jnp.asarray(seq_lens, jnp.int32), jnp.asarray(taken),
        num_tokens=33 + padding, tile_tokens=8,
    )  # fmt: skip
    covered = {}
    for request, token, position, count, seq_len in np.asarray(tiles).tolist():
        for i in range(count):
            assert token + i not in covered
            covered[token + i] = (request, position + i, seq_len) if seq_len else None
    expected = {
        int(starts[b]) + i: (b, seq_lens[b] - n + i, seq_lens[b])
        for b, n in enumerate(query_lens)
        if taken[b]
        for i in range(n)
    }
    assert covered == expected | dict.fromkeys(range(33, 33 + padding))
