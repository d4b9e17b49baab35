"""Several completions of one prompt: computed once, ended one by one or together, whatever happens to the others."""

import numpy as np
import pytest

from pagedjax import SamplingParams
from pagedjax.execution.block_copy import COPY_BUCKETS
from tests.fakes import continuation, fake_engine, run_all

PROMPT = list(range(40, 61))


@pytest.fixture(scope="module")
def shared_engine():
    return fake_engine(max_num_seqs=4, max_num_batched_tokens=16, enable_prefix_caching=False)


@pytest.fixture
def engine(shared_engine):
    yield shared_engine
    shared_engine.step()
    assert not shared_engine.has_unfinished_requests()
    assert shared_engine.stats()["num_blocks_used"] == 0
    shared_engine.check_integrity()


def drawn(n, **options):
    return SamplingParams(n=n, temperature=1.5, seed=7, max_tokens=6, ignore_eos=True, **options)


def scheduled_tokens(engine, **requests):
    """Tokens that are computed until all is done, and the final outputs."""
    for request_id, (prompt, params) in requests.items():
        engine.add_request(request_id, prompt, params)
    count, outs = 0, {}
    while engine.has_unfinished_requests():
        output = engine.step()
        count += sum(one.num_scheduled_tokens for one in output.scheduled)
        outs |= {out.request_id: out for out in output if out.finished}
    return count, outs


def test_a_prompt_is_computed_once_for_more_completions_than_there_are_rows(engine):
    before = engine.stats()
    count, outs = scheduled_tokens(engine, many=(PROMPT, drawn(9)))
    assert count == len(PROMPT) + 8 + 9 * 5
    assert len({tuple(one.token_ids) for one in outs["many"].outputs}) == 9
    after = engine.stats()
    assert after["num_block_copies"] - before["num_block_copies"] >= 7
    assert after["prompt_tokens"] - before["prompt_tokens"] == len(PROMPT)
    assert after["num_compilations_after_ready"] == 0


def test_prompt_logprobs_are_scored_once_for_all(engine):
    alone = run_all(engine, [("one", PROMPT, drawn(1, prompt_logprobs=2, logprobs=1))])["one"]
    count, outs = scheduled_tokens(engine, many=(PROMPT, drawn(3, prompt_logprobs=2, logprobs=1)))
    assert count == len(PROMPT) + 2 + 3 * 5
    assert outs["many"].prompt_logprobs == alone.prompt_logprobs
    assert outs["many"].outputs[0].logprobs == alone.outputs[0].logprobs


@pytest.mark.parametrize("after", range(9))
def test_completions_are_aborted_together_in_every_state_of_their_life(engine, after):
    """Waiting, in the middle of the prompt, while the others are held, forked, with too few rows for all."""
    greedy = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    engine.add_request("other", [1, 2, 3], greedy)
    engine.add_request("many", PROMPT, drawn(5))
    seen = [output for _ in range(after) for output in engine.step()]
    engine.abort("many")
    while engine.has_unfinished_requests():
        seen += engine.step()
        engine.check_integrity()
    ended = {out.request_id: out for out in seen if out.finished}
    assert {one.finish_reason for one in ended["many"].outputs} <= {"abort", "length"}
    assert ended["many"].outputs[-1].finish_reason == "abort"
    assert ended["other"].outputs[0].token_ids == continuation([1, 2, 3], 20)


def test_copies_of_one_call_are_all_read_before_any_is_written(engine):
    """Over all layers, in place, and padded: a block may be copied from and to at once."""
    runner = engine._runner
    before = [np.array(pool) for layer in runner._kv_cache for pool in layer]
    filled = [pool + np.arange(pool.shape[0], dtype=np.float32)[:, None, None, None] for pool in before]
    for (k, v), layer in zip(zip(filled[::2], filled[1::2], strict=True), range(len(runner._kv_cache)), strict=True):
        runner._kv_cache[layer] = (runner._kv_cache[layer][0].at[:].set(k), runner._kv_cache[layer][1].at[:].set(v))
    pairs = [(3, 4), (4, 5), (7, 8), *((9, target) for target in range(10, 10 + COPY_BUCKETS[0]))]
    runner._fork_blocks(pairs)
    for pool, old in zip((pool for layer in runner._kv_cache for pool in layer), filled, strict=True):
        expected = old.copy()
        for source, target in pairs:
            expected[target] = old[source]
        np.testing.assert_array_equal(np.array(pool), expected)


def test_a_copy_of_blocks_makes_no_copy_of_the_pool(engine):
    pool = sum(array.nbytes for layer in engine._runner._kv_cache for array in layer)
    for bucket in COPY_BUCKETS[:1]:
        executable = engine._runner._executables[f"copy blocks {bucket}"].compile()
        assert executable.memory_analysis().temp_size_in_bytes < pool / 2
        assert executable.memory_analysis().alias_size_in_bytes >= pool
