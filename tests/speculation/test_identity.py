"""Speculation changes no token: float32, every proposer, in mixed batches, against the same engine without.

A tiny Mistral with random weights, whose window of 8 every prompt crosses. Prompts and outputs repeat themselves, so
that n-grams are found. Each test asserts that drafts were accepted in it.
"""

import jax
import numpy as np
import pytest
from flax import nnx

from pagedjax import EngineConfig, LLMEngine, SamplingParams
from pagedjax.loading.arrays import model_from_params
from pagedjax.loading.hf_config import model_config_from_hf
from tests.fakes import byte_tokenizer, run_all
from tests.kept_executables import few_buckets, sharing_executables
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
    "model": "in memory", "generation_config": "vllm",
    "max_model_len": 96, "block_size": 8, "max_num_seqs": 8, "max_num_batched_tokens": 32,
    "num_gpu_blocks_override": 40,
}  # fmt: skip
FIXED = {"num_speculative_tokens": 3, "is_adaptive": False}
METHODS = {
    "ngram": {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3},
    "suffix": {"method": "suffix", "suffix_decoding_min_token_prob": 0.0, "suffix_decoding_max_spec_factor": 4.0},
    "draft_model": {"method": "draft_model", "model": "in memory"},
}


def model(noise=0.0):
    """The target, or a draft that is more or less like it."""
    random = np.random.default_rng(3)
    weights = tiny_models.weights("mistral")
    noisy = {name: one + noise * random.standard_normal(one.shape).astype(np.float32) for name, one in weights.items()}
    return model_from_params(noisy, model_config_from_hf(tiny_models.CASES["mistral"]), dtype=np.dtype("float32"))


def make_engine(method=None):
    """An engine with one bucket of each kind, for there are many engines to compile."""
    speculative = None if method is None else METHODS[method] | FIXED
    config = EngineConfig(**OPTIONS, speculative_config=speculative)
    draft = model() if method == "draft_model" else None
    with sharing_executables(is_optimised=False), few_buckets():
        return LLMEngine(config, loaded=model(), tokenizer=byte_tokenizer(), draft=draft)


def requests():
    rng = np.random.default_rng(5)
    prompts = [rng.integers(3, 128, int(rng.integers(2, 12))).tolist() * int(rng.integers(1, 6)) for _ in range(COUNT)]
    params = [
        SamplingParams(seed=i, max_tokens=8 + i % 24, ignore_eos=True, **KINDS[i % len(KINDS)]) for i in range(COUNT)
    ]
    return prompts, params


def generate(engine, prompts, params):
    """Final outputs, in order."""
    outs = run_all(engine, [(str(i), *both) for i, both in enumerate(zip(prompts, params, strict=True))])
    return [outs[str(i)].outputs[0] for i in range(len(prompts))]


def num_accepted(engine):
    return engine.stats()["spec_decode_num_accepted_tokens"]


@pytest.fixture(scope="module")
def plain():
    """Outputs without speculation."""
    engine = make_engine()
    outs = generate(engine, *requests())
    engine.shutdown()
    return outs


@pytest.fixture(scope="module")
def engines():
    """Makes each method's engine when it is first asked for."""
    made = {}

    def engine_of(method):
        made[method] = made.get(method) or make_engine(method)
        return made[method]

    yield engine_of
    for engine in made.values():
        assert engine.stats()["num_compilations_after_ready"] == 0
        engine.shutdown()


@pytest.fixture
def engine(engines, method):
    """The method's engine, which accepts drafts while the test runs."""
    engine = engines(method)
    before = num_accepted(engine)
    yield engine
    assert num_accepted(engine) > before


def assert_equal(outs, expected):
    assert [out.token_ids for out in outs] == [out.token_ids for out in expected]
    for out, other in zip(outs, expected, strict=True):
        assert (out.finish_reason, out.stop_reason) == (other.finish_reason, other.stop_reason)
        for entries, others in zip(out.logprobs or [], other.logprobs or [], strict=True):
            assert list(entries) == list(others)
            for token_id, entry in entries.items():  # logits of batches of other shapes differ in their last bits
                assert entry.logprob == pytest.approx(others[token_id].logprob, abs=1e-4)


every_method = pytest.mark.parametrize(
    "method", ["ngram", "draft_model", pytest.param("suffix", marks=pytest.mark.fuzz)]
)
draft_model = pytest.mark.parametrize("method", ["draft_model"])


@every_method
def test_a_mixed_batch_in_chunks_with_too_few_blocks(engine, plain):
    assert_equal(generate(engine, *requests()), plain)
    assert engine.stats()["num_preemptions"] > 0


@every_method
def test_each_alone_with_a_cold_and_a_warm_cache(engine, plain):
    prompts, params = requests()
    engine.reset_prefix_cache()
    hits = engine.stats()["prefix_cache_hits"]
    for i in [*range(9), *range(9)]:
        assert_equal(generate(engine, [prompts[i]], [params[i]]), [plain[i]])
    assert engine.stats()["prefix_cache_hits"] > hits


@pytest.mark.fuzz
@draft_model
def test_drafts_of_every_quality(engine, plain):
    """The target itself, the same with noise, and one that has nothing to do with it."""
    rates = []
    for noise in (0.0, 0.02, 3.0):
        use_draft(engine, noise)
        before = engine.stats()
        assert_equal(generate(engine, *requests()), plain)
        drafted, accepted = (
            engine.stats()[name] - before[name]
            for name in ("spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens")
        )
        rates.append(accepted / drafted)
    assert rates[0] > rates[1] > rates[2]
    assert rates[0] > 0.6  # drafts are drawn without penalties, biases and bans
    assert rates[2] < 0.2


@draft_model
def test_the_target_as_its_own_draft_is_always_right(engine):
    use_draft(engine, 0.0)
    prompts, _ = requests()
    params = [SamplingParams(seed=i, max_tokens=20, ignore_eos=True, **KINDS[i % 5]) for i in range(10)]
    engine.speculation_trace(clear=True)
    generate(engine, prompts[:10], params)
    verified = [one for step in engine.speculation_trace() for one in step.verified]
    assert sum(one.num_accepted for one in verified) == sum(len(one.draft_token_ids) for one in verified)


def use_draft(engine, noise):
    """Exchange the draft model's weights."""
    proposer = engine._runner._speculator._proposer
    proposer._leaves = tuple(jax.tree.leaves(nnx.state(model(noise).model)))
    proposer._right_blocks.clear()
