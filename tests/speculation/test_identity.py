"""Speculation changes no token: float32, every proposer, in mixed batches, against the same engine without.

A tiny Mistral with random weights, whose window of 8 every prompt crosses. Prompts and outputs repeat themselves, so
that n-grams are found. Each test asserts that drafts were accepted in it.
"""

import numpy as np
import pytest

from pagedjax import LLM, SamplingParams
from pagedjax.loading.hf_config import model_config_from_hf
from tests.oracles import tiny_models

KINDS = [
    {"temperature": 0.0},
    {"temperature": 0.5},
    {"temperature": 0.7, "top_k": 7},
    {"temperature": 0.6, "top_p": 0.7},
    {"temperature": 0.8, "min_p": 0.1},
    {"temperature": 0.3, "repetition_penalty": 1.1, "frequency_penalty": 0.1},
    {"temperature": 0.5, "logit_bias": {5: 4.0}, "min_tokens": 4, "stop_token_ids": [7, 9]},
    {"temperature": 0.0, "presence_penalty": 0.2, "logprobs": 2},
    {"temperature": 0.4, "allowed_token_ids": list(range(20, 40))},
]
COUNT = 54
OPTIONS = {
    "max_model_len": 96, "block_size": 8, "max_num_seqs": 8, "max_num_batched_tokens": 32,
    "num_gpu_blocks_override": 40,
}  # fmt: skip
NGRAM = {
    "method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3,
    "is_adaptive": False,
}  # fmt: skip


def make_llm(speculative_config=None, **options):
    return LLM(
        params=tiny_models.weights("mistral"),
        model_config=model_config_from_hf(tiny_models.CASES["mistral"]),
        speculative_config=speculative_config,
        show_progress=False,
        **(OPTIONS | options),
    )


def requests():
    rng = np.random.default_rng(5)
    prompts = [rng.integers(3, 128, int(rng.integers(2, 12))).tolist() * int(rng.integers(1, 6)) for _ in range(COUNT)]
    params = [
        SamplingParams(seed=i, max_tokens=8 + i % 24, ignore_eos=True, **KINDS[i % len(KINDS)]) for i in range(COUNT)
    ]
    return prompts, params


def generate(llm, prompts, params):
    outs = llm.generate(prompt_token_ids=prompts, sampling_params=params, use_tqdm=False)
    llm.engine.check_integrity()
    return outs


def tokens(llm, prompts, params):
    return [out.outputs[0].token_ids for out in generate(llm, prompts, params)]


def num_accepted(llm):
    return llm.engine.stats()["spec_decode_num_accepted_tokens"]


@pytest.fixture(scope="module")
def plain():
    """Outputs without speculation."""
    with make_llm() as llm:
        return generate(llm, *requests())


@pytest.fixture(scope="module")
def llm():
    with make_llm(NGRAM) as llm:
        yield llm
        assert llm.engine.stats()["num_compilations_after_ready"] == 0


@pytest.fixture(autouse=True)
def _drafts_are_accepted(request):
    if "llm" not in request.fixturenames:
        yield
        return
    llm = request.getfixturevalue("llm")
    before = num_accepted(llm)
    yield
    assert num_accepted(llm) > before


def test_a_mixed_batch_in_chunks_with_too_few_blocks(llm, plain):
    expected = [out.outputs[0].token_ids for out in plain]
    assert tokens(llm, *requests()) == expected
    assert llm.engine.stats()["num_preemptions"] > 0


def test_each_alone_with_a_cold_and_a_warm_cache(llm, plain):
    prompts, params = requests()
    llm.engine.reset_prefix_cache()
    hits = llm.engine.stats()["prefix_cache_hits"]
    for i in [*range(9), *range(9)]:
        assert tokens(llm, [prompts[i]], [params[i]]) == [plain[i].outputs[0].token_ids]
    assert llm.engine.stats()["prefix_cache_hits"] > hits
