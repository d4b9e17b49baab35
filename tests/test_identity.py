"""One request gets the same tokens, float32, however it is served: alone, batched, cached, in chunks, preempted,
swapped out and in.

A tiny Mistral with random weights, whose window of 8 every prompt crosses; greedy and sampled, with every filter.
"""

import re
from dataclasses import replace

import jax
import numpy as np
import pytest

from pagedjax import LLM, CheckpointError, ConfigError, SamplingParams
from pagedjax.loading.hf_config import model_config_from_hf
from tests.kept_executables import few_buckets, sharing_executables
from tests.oracles import tiny_models

KINDS = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 1.3, "top_k": 7},
    {"temperature": 0.9, "top_p": 0.7},
    {"temperature": 1.1, "min_p": 0.1},
    {"temperature": 0.8, "repetition_penalty": 1.4, "frequency_penalty": 0.3},
    {"temperature": 1.0, "logit_bias": {5: 4.0}, "bad_words": None, "min_tokens": 4},
    {"temperature": 0.0, "presence_penalty": 1.5, "logprobs": 2},
]
COUNT = 32


def make_llm(params=None, **options):
    """All engines have rows of the same number, so that most executables are compiled once."""
    defaults = {"max_model_len": 96, "block_size": 8, "max_num_seqs": 32, "max_num_batched_tokens": 64}
    with sharing_executables(), few_buckets(num_rows=(1,), num_tokens=(16,)):
        return LLM(
            params=tiny_models.weights("mistral") if params is None else params,
            model_config=model_config_from_hf(tiny_models.CASES["mistral"]),
            show_progress=False,
            **(defaults | options),
        )


def requests():
    rng = np.random.default_rng(5)
    prompts = [rng.integers(3, 128, int(rng.integers(2, 60))).tolist() for _ in range(COUNT)]
    params = [SamplingParams(seed=i, max_tokens=24, ignore_eos=True, **KINDS[i % len(KINDS)]) for i in range(COUNT)]
    return prompts, params


def group_requests():
    """One request a kind, each for eight completions."""
    prompts, params = requests()
    return prompts[: len(KINDS)], [
        replace(one, n=8, max_tokens=12, seed=100 * one.seed) for one in params[: len(KINDS)]
    ]


def completions(llm):
    outs = llm.generate(*group_requests(), use_tqdm=False)
    llm.engine.check_integrity()
    return [[one.token_ids for one in out.outputs] for out in outs]


def tokens(llm, prompts, params):
    outs = llm.generate(prompt_token_ids=prompts, sampling_params=params, use_tqdm=False)
    llm.engine.check_integrity()
    return [out.outputs[0].token_ids for out in outs]


@pytest.fixture(scope="module")
def llm():
    with make_llm() as llm:
        yield llm


@pytest.fixture(scope="module")
def alone(llm):
    prompts, params = requests()
    results = []
    for prompt, one in zip(prompts, params, strict=True):
        llm.engine.reset_prefix_cache()
        results += tokens(llm, [prompt], [one])
    assert len({tuple(result) for result in results}) == COUNT
    return results


@pytest.fixture(scope="module")
def eight_alone(llm):
    results = []
    for prompt, params in zip(*group_requests(), strict=True):
        llm.engine.reset_prefix_cache()
        singles = [replace(params, n=1, seed=params.seed + i) for i in range(8)]
        results.append([tokens(llm, [prompt], [single])[0] for single in singles])
    return results


def test_eight_completions_are_eight_single_runs(llm, eight_alone):
    """Computed with one prompt: its full blocks are shared and the rest is copied."""
    llm.engine.reset_prefix_cache()
    before = llm.engine.stats()
    assert completions(llm) == eight_alone
    after = llm.engine.stats()
    assert after["num_block_copies"] - before["num_block_copies"] >= 7 * (len(KINDS) - 1)
    assert after["prefix_cache_queries"] - before["prefix_cache_queries"] == sum(map(len, group_requests()[0]))


def test_a_batch_of_32_mixed_requests_with_a_cold_and_a_warm_cache(llm, alone):
    prompts, params = requests()
    llm.engine.reset_prefix_cache()
    assert tokens(llm, prompts, params) == alone
    hits = llm.engine.stats()["prefix_cache_hits"]
    assert tokens(llm, prompts, params) == alone
    assert llm.engine.stats()["prefix_cache_hits"] > hits


def test_a_warm_prefix_is_computed_once_and_changes_no_token(llm, alone):
    prompts, params = requests()
    longest = max(range(COUNT), key=lambda i: len(prompts[i]))
    llm.engine.reset_prefix_cache()
    assert llm.warm_prefix(prompts[longest][:40]) == llm.warm_prefix(prompts[longest][:40]) == 40
    out = llm.generate(prompts[longest], params[longest], use_tqdm=False)[0]
    assert (out.num_cached_tokens, out.outputs[0].token_ids) == (40, alone[longest])
    assert not llm.reset_prefix_cache()
    assert llm.unpin(prompts[longest][:40])
    assert llm.reset_prefix_cache()


def test_other_weights_give_the_tokens_of_an_engine_that_began_with_them(llm, alone):
    prompts, params = requests()
    old = tiny_models.weights("mistral")
    new = {name: one[..., ::-1].copy() for name, one in old.items()}
    with make_llm(params=new) as other:
        expected = tokens(other, prompts[:4], params[:4])
    llm.update_weights(new)
    assert tokens(llm, prompts[:4], params[:4]) == expected != alone[:4]
    kept = llm.warm_prefix([5] * 20)
    with pytest.raises(ConfigError, match="0 unfinished requests and 2 pinned blocks; let the requests end and unpin"):
        llm.update_weights(old)
    assert kept == 16
    assert llm.unpin([5] * 20)
    name = next(iter(old))
    with pytest.raises(CheckpointError, match=re.escape(name)):
        llm.update_weights(old | {name: old[name][:, :5]})
    llm.update_weights(old)
    assert tokens(llm, prompts[:4], params[:4]) == alone[:4]
    assert llm.engine.stats()["num_compilations_after_ready"] == 0


def test_prompts_in_chunks_of_at_most_32(alone, eight_alone):
    """And of what running requests leave of that."""
    prompts, params = requests()
    with make_llm(max_num_batched_tokens=32) as llm:
        assert tokens(llm, prompts, params) == alone
        assert completions(llm) == eight_alone
        assert llm.engine.stats()["num_block_copies"] > 0


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_preempted_half_way_and_computed_again(alone, eight_alone, prefix_caching):
    prompts, params = requests()
    with make_llm(num_gpu_blocks_override=40, enable_prefix_caching=prefix_caching) as llm:
        assert tokens(llm, prompts, params) == alone
        num_preemptions = llm.engine.stats()["num_preemptions"]
        assert num_preemptions > 0
        assert completions(llm) == eight_alone
        assert llm.engine.stats()["num_preemptions"] > num_preemptions
        assert llm.engine.stats()["num_block_copies"] > 0


@pytest.mark.parametrize("options", [{}, {"enable_prefix_caching": False}])
def test_swapped_half_way_and_brought_back(alone, options):
    prompts, params = requests()
    small = {"num_gpu_blocks_override": 40, "swap_space": 0.001, "preemption_mode": "swap"}
    with make_llm(**small, **options) as llm:
        assert tokens(llm, prompts, params) == alone
        stats = llm.engine.stats()
        assert stats["num_preemptions_swapped"] > 0
        assert stats["swap_in_blocks"] > 0
        assert (stats["swap_failures"], stats["num_compilations_after_ready"]) == (0, 0)


def test_without_the_iteration_ahead(alone):
    prompts, params = requests()
    with make_llm(async_scheduling=False) as llm:
        assert tokens(llm, prompts, params) == alone


def test_a_six_turn_chat_recomputes_only_new_tokens_and_less_than_a_block(llm):
    rng = np.random.default_rng(9)
    llm.engine.reset_prefix_cache()
    history = []
    greedy = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    for turn in range(6):
        question = rng.integers(3, 128, 7).tolist()
        known = len(history)
        history += question
        out = llm.generate(prompt_token_ids=[history], sampling_params=greedy, use_tqdm=False)[0]
        # the last answer's final token was never an input, so its keys do not exist yet
        assert len(history) - out.num_cached_tokens < len(question) + 1 + llm.engine.config.block_size
        assert out.num_cached_tokens >= known - llm.engine.config.block_size if turn else True
        history += out.outputs[0].token_ids


def test_wasted_slots_are_at_most_half_a_block_a_sequence_lookahead_apart(llm):
    prompts, params = requests()
    engine = llm.engine
    for i, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
        engine.add_request(f"waste{i}", prompt, one)
    wasted = []
    while engine.has_unfinished_requests():
        for seen in engine.step().scheduled:
            wasted.append(len(seen.block_table) * 8 - seen.context_len - seen.num_scheduled_tokens)
    assert np.mean(wasted) <= 8 / 2


def test_float32_is_what_these_tests_ran_in(llm):
    assert all(leaf.dtype == np.float32 for leaf in jax.tree.leaves(llm.engine._runner._kv_cache))
