"""The embedded SmolLM2-135M-Instruct through the whole engine, against what transformers computed once and for all.

A float32 token may differ only where transformers' own two best logits are within 1e-4 of each other.
"""

import json
import math
from pathlib import Path

import pytest

from pagedjax import LLM, SamplingParams
from tests import demo

pytestmark = pytest.mark.slow

GOLDEN = json.loads((Path(__file__).parent / "oracles/golden/smollm2.json").read_text())
NAMES = list(GOLDEN["prompts"])
TIE = 1e-4


@pytest.fixture(scope="module")
def llm():
    with demo.compiling_once():
        llm = LLM(**demo.OPTIONS, show_progress=False)
    with llm:
        yield llm


def greedy(count, **options):
    return SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, **options)


def assert_same_tokens(name, token_ids):
    golden = GOLDEN["prompts"][name]
    for i, (ours, theirs) in enumerate(zip(token_ids, golden["greedy"], strict=False)):
        if ours != theirs:
            assert golden["margins"][i] < TIE, f"{name}: token {i} is {ours}, transformers says {theirs}"
            print(f"{name}: token {i} is a tie within {TIE} in the reference")
            return


@pytest.mark.parametrize(("count", "longest"), [(24, 600), pytest.param(40, 1000, marks=pytest.mark.fuzz)])
def test_greedy_tokens_are_those_of_transformers_for_every_prompt(llm, count, longest):
    """In a batch; one prompt of 540 tokens comes in chunks, two of about 800 are left to the marker."""
    names = [name for name in NAMES if len(GOLDEN["prompts"][name]["token_ids"]) <= longest]
    prompts = [GOLDEN["prompts"][name]["token_ids"] for name in names]
    outs = llm.generate(prompt_token_ids=prompts, sampling_params=greedy(count), use_tqdm=False)
    assert len(names) >= 20
    for name, out in zip(names, outs, strict=True):
        assert len(out.outputs[0].token_ids) == count
        assert_same_tokens(name, out.outputs[0].token_ids)


def test_text_prompts_and_chats_become_the_token_ids_of_transformers(llm):
    for name in NAMES:
        golden = GOLDEN["prompts"][name]
        if golden["text"] is not None:
            assert llm.engine.tokenizer.encode(golden["text"]) == golden["token_ids"], name


def test_a_request_alone_gives_the_tokens_it_gives_in_a_batch(llm):
    for name in NAMES[1:4]:
        llm.engine.reset_prefix_cache()
        out = llm.generate(
            prompt_token_ids=[GOLDEN["prompts"][name]["token_ids"]], sampling_params=greedy(8), use_tqdm=False
        )
        assert_same_tokens(name, out[0].outputs[0].token_ids)


def test_sampled_tokens_are_the_same_alone_in_a_batch_of_32_and_with_a_warm_cache(llm):
    kinds = [{}, {"top_k": 20}, {"top_p": 0.8}, {"min_p": 0.05}, {"repetition_penalty": 1.2}, {"presence_penalty": 0.5}]
    params = [
        SamplingParams(temperature=0.8, seed=i, max_tokens=8, ignore_eos=True, **kinds[i % len(kinds)])
        for i in range(32)
    ]
    prompts = [GOLDEN["prompts"][NAMES[i % 16]]["token_ids"] for i in range(32)]
    llm.engine.reset_prefix_cache()
    together = llm.generate(prompt_token_ids=prompts, sampling_params=params, use_tqdm=False)
    for i in (0, 1, 2, 3, 4, 5):
        alone = llm.generate(prompt_token_ids=[prompts[i]], sampling_params=params[i], use_tqdm=False)
        assert alone[0].outputs[0].token_ids == together[i].outputs[0].token_ids
    assert len({tuple(out.outputs[0].token_ids) for out in together}) > 16


def test_perplexity_of_the_fixed_paragraph_is_that_of_transformers(llm):
    golden = GOLDEN["perplexity"]
    out = llm.generate(
        prompt_token_ids=[golden["token_ids"]],
        sampling_params=SamplingParams(max_tokens=1, prompt_logprobs=0),
        use_tqdm=False,
    )[0]
    logprobs = [
        entry[token].logprob for token, entry in zip(golden["token_ids"][1:], out.prompt_logprobs[1:], strict=True)
    ]
    assert math.exp(-sum(logprobs) / len(logprobs)) == pytest.approx(golden["perplexity"], rel=1e-3)


def test_nothing_was_compiled_after_ready(llm):
    assert llm.engine.stats()["num_compilations_after_ready"] == 0


def test_a_system_prompt_that_is_kept_warm_is_found_by_every_chat(llm):
    llm.reset_prefix_cache()
    system = {"role": "system", "content": "You are a terse geographer who answers in one short sentence. " * 3}
    num_kept = llm.warm_prefix([system])
    outs = llm.chat([[system, {"role": "user", "content": text}] for text in ("Rome?", "Lima?")], greedy(1))
    assert num_kept >= 32
    assert [out.num_cached_tokens for out in outs] == [num_kept, num_kept]
    assert llm.unpin([system])
