"""Bucket tables: few, complete, and every size finds its bucket."""

import pytest

from pagedjax import SamplingParams
from pagedjax.execution import buckets
from pagedjax.execution.buckets import BucketTable, bucket_for, sizes_up_to
from tests.fakes import continuation, fake_engine, run_all


@pytest.mark.parametrize(
    ("limit", "expected"),
    [(1, (1,)), (4, (4,)), (6, (4, 6)), (8, (4, 8)), (9, (4, 8, 9)), (16, (4, 8, 16)), (40, (4, 8, 16, 32, 40))],
)
def test_sizes_end_exactly_at_the_limit(limit, expected):
    assert sizes_up_to(limit, (4, 8)) == expected


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_every_size_up_to_the_limit_has_a_bucket_that_holds_it(platform):
    table = BucketTable.build(max_num_seqs=24, max_num_batched_tokens=100, block_size=16, platform=platform)
    for size in range(1, 101):
        shape = table.forward_shape(size)
        assert shape.num_tokens >= size
        assert shape.num_rows == min(shape.num_tokens, 24)
    for size in range(1, 25):
        assert table.decode_shape(size).num_rows >= size


@pytest.mark.parametrize("max_num_seqs", [1, 4, 8])
def test_a_gpu_decodes_at_least_eight_rows_at_once(max_num_seqs):
    table = BucketTable.build(max_num_seqs=max_num_seqs, max_num_batched_tokens=64, block_size=16, platform="gpu")
    assert table.decode == (8,)
    assert table.forward_shape(1).num_rows == max_num_seqs


@pytest.mark.parametrize("max_num_seqs", [1, 3])
def test_a_decode_step_of_more_rows_than_may_run_is_padded(monkeypatch, max_num_seqs):
    """As on a GPU: the step samples too."""
    for table, value in ((buckets.DECODE_SIZES, (8,)), (buckets.MIN_DECODE_ROWS, 8), (buckets.IS_FUSED, True)):
        monkeypatch.setitem(table, "cpu", value)
    engine = fake_engine(max_num_seqs=max_num_seqs)
    prompts = {str(i): [i + j for j in range(5)] for i in range(4)}
    params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    outputs = run_all(engine, [(request_id, prompt, params) for request_id, prompt in prompts.items()])
    for request_id, prompt in prompts.items():
        assert outputs[request_id].outputs[0].token_ids == continuation(prompt, 20)
    engine.shutdown()


def test_a_default_engine_has_at_most_32_full_model_executables():
    table = BucketTable.build(max_num_seqs=256, max_num_batched_tokens=8192, block_size=16, platform="gpu")
    assert len(table.tokens) + len(table.decode) <= 32


def test_a_size_above_the_table_is_a_broken_invariant():
    with pytest.raises(AssertionError, match="above the largest bucket 8"):
        bucket_for(9, (1, 8))
