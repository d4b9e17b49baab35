"""What the step derives from packed changes: rows, positions, slots and lengths."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from pagedjax.execution.buckets import BucketTable
from pagedjax.execution.model_input import FROM_ROW, pack_changes
from pagedjax.execution.request_state import empty_rows, neutral_sampler_rows
from pagedjax.execution.step import StepFunctions, prepare, record_tokens
from pagedjax.sampling_params import SamplingParams
from pagedjax.scheduling.request import Request
from pagedjax.scheduling.step_plan import ScheduledRequest
from tests.fakes import FakeModel

BLOCK_SIZE, NUM_BLOCKS, NUM_ROWS = 4, 20, 4
TABLE = BucketTable.build(max_num_seqs=NUM_ROWS, max_num_batched_tokens=16, block_size=BLOCK_SIZE, platform="cpu")


def scheduled(row, num_tokens, *, context_len=0, new_blocks=(), first_index=0, prompt_len=12, samples=False):
    request = Request(
        f"r{row}", list(range(100, 100 + prompt_len)), SamplingParams(), max_tokens=4, eos_token_ids=frozenset(),
        arrival_time=0.0, seed=0,
    )  # fmt: skip
    return ScheduledRequest(request, row, num_tokens, context_len, list(new_blocks), first_index, False, samples)


def run(items, shape, state):
    packed = pack_changes(items, shape, max_num_seqs=NUM_ROWS)
    assert packed.shape == (shape.packed_size,)
    return jax.jit(prepare, static_argnames=("shape", "block_size", "num_blocks"))(
        state, jnp.asarray(packed), shape=shape, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS
    )


def test_a_mixed_step_gives_each_token_its_position_and_slot():
    items = [
        scheduled(2, 1, context_len=5, new_blocks=[7], first_index=1, samples=True),
        scheduled(0, 6, context_len=4, new_blocks=[3, 9], first_index=1),
    ]
    state = empty_rows(NUM_ROWS, 4)
    tables = state.block_tables.at[2, 0].set(5).at[0, 0].set(2)
    lens = jnp.array([4, 0, 5, 0], jnp.int32)
    last = jnp.array([0, 0, 77, 0], jnp.int32)
    state = jax.tree.map(lambda x: x, state.__class__(lens, last, tables, state.floats, state.ints))
    new, tokens, batch = run(items, TABLE.forward_shape(7), state)
    assert tokens[:7].tolist() == [77, 104, 105, 106, 107, 108, 109]
    assert batch.positions[:7].tolist() == [5, 4, 5, 6, 7, 8, 9]
    assert batch.slot_mapping[:7].tolist() == [7 * 4 + 1, 12, 13, 14, 15, 36, 37]
    assert set(batch.slot_mapping[7:].tolist()) == {NUM_BLOCKS * BLOCK_SIZE}
    assert batch.query_start_loc.tolist() == [0, 1, 7, 7, 7]
    assert batch.seq_lens.tolist() == [6, 10, 0, 0]
    assert new.context_lens.tolist() == [10, 0, 6, 0]
    assert new.block_tables[0].tolist() == [2, 3, 9, 0]


def test_a_decode_step_takes_every_token_from_its_row():
    items = [
        scheduled(1, 1, context_len=3, samples=True),
        scheduled(3, 1, context_len=8, new_blocks=[6], first_index=2, samples=True),
    ]
    state = empty_rows(NUM_ROWS, 4)
    state = state.__class__(
        jnp.array([0, 3, 0, 8], jnp.int32), jnp.array([0, 11, 0, 33], jnp.int32),
        state.block_tables.at[1, 0].set(4), state.floats, state.ints,
    )  # fmt: skip
    _, tokens, batch = run(items, TABLE.decode_shape(2), state)
    assert tokens[:2].tolist() == [11, 33]
    assert batch.slot_mapping.tolist() == [4 * 4 + 3, 24, *[NUM_BLOCKS * BLOCK_SIZE] * 2]  # padded to four rows


def test_a_token_whose_block_is_the_null_block_is_not_written():
    state = empty_rows(NUM_ROWS, 4)
    _, _, batch = run([scheduled(1, 1, samples=True)], TABLE.decode_shape(1), state)
    assert batch.slot_mapping.tolist() == [NUM_BLOCKS * BLOCK_SIZE]


def test_garbage_in_rows_that_are_not_scheduled_changes_nothing():
    item = scheduled(1, 3, context_len=2, new_blocks=[8], first_index=1)
    clean = empty_rows(NUM_ROWS, 4)
    clean = clean.__class__(
        clean.context_lens.at[1].set(2),
        clean.last_token_ids,
        clean.block_tables.at[1, 0].set(5),
        clean.floats,
        clean.ints,
    )
    others = np.array([0, 2, 3])
    dirty = clean.__class__(
        clean.context_lens.at[others].set(99), clean.last_token_ids.at[others].set(-7),
        clean.block_tables.at[others].set(19), clean.floats, clean.ints,
    )  # fmt: skip
    shape = TABLE.forward_shape(3)
    _, clean_tokens, clean_batch = run([item], shape, clean)
    _, dirty_tokens, dirty_batch = run([item], shape, dirty)
    assert clean_tokens[:3].tolist() == dirty_tokens[:3].tolist() == [102, 103, 104]
    for name in ("positions", "slot_mapping", "query_start_loc", "seq_lens"):
        np.testing.assert_array_equal(getattr(clean_batch, name), getattr(dirty_batch, name))


def test_the_host_never_sends_the_newest_token_of_a_sampling_row():
    packed = pack_changes([scheduled(0, 12, samples=True)], TABLE.forward_shape(12), max_num_seqs=NUM_ROWS)
    assert packed[-16:-4].tolist() == [*range(100, 111), FROM_ROW]


def test_a_pool_of_another_size_leaves_cached_sampling_executables_their_names():
    """Its arrays are arguments of those that use it; the others were compiled again."""
    sizes = {"block_size": 8, "max_num_seqs": 4, "max_logprobs": 2}
    model = FakeModel()
    assert repr(StepFunctions(model, num_blocks=9, **sizes)) == repr(StepFunctions(model, num_blocks=10, **sizes))
    assert repr(StepFunctions(model, num_blocks=9, **sizes | {"max_logprobs": 3})) != repr(
        StepFunctions(model, num_blocks=9, **sizes)
    )


def test_a_count_of_a_token_stays_at_the_most_it_can_hold():
    """It wrapped to -32768, so that the token counted as never generated."""
    most = np.iinfo(np.int16).max
    wide = neutral_sampler_rows(3, 8)
    wide = replace(wide, output_counts=wide.output_counts.at[:, 5].set(most - 1))
    for _ in range(3):
        wide = record_tokens(wide, jnp.array([0, 2, 3], jnp.int32), jnp.array([5, 4, 5], jnp.int32))  # row 3 is a pad
    assert np.asarray(wide.output_counts)[:, 4:6].tolist() == [[0, most], [0, most - 1], [3, most - 1]]
