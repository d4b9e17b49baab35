"""Beam search in the engine: what transformers finds, whatever else goes on; shared blocks, clean ends, refusals."""

import json
from pathlib import Path

import pytest

from pagedjax import LLM, BeamSearchParams, InvalidRequestError, RequestOutputKind, SamplingParams
from pagedjax.loading.hf_config import model_config_from_hf
from tests.fakes import continuation, fake_engine, run_all
from tests.kept_executables import few_buckets, sharing_executables
from tests.oracles import beam_cases, tiny_models

GOLDEN = json.loads((Path(__file__).parent / "oracles" / "golden" / "beam_search.json").read_text())
PROMPT = [5, 250, 3, 17, 99, 4, 4, 4, 9, 8]
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)


def beams(width, max_tokens=12, **options):
    return SamplingParams(n=width, use_beam_search=True, max_tokens=max_tokens, **options)


def make_llm(case, **options):
    defaults = {"max_model_len": 96, "block_size": 8, "max_num_seqs": 16, "max_num_batched_tokens": 64}
    with sharing_executables(is_optimised=False), few_buckets():
        return LLM(
            params=tiny_models.weights(case),
            model_config=model_config_from_hf(tiny_models.CASES[case]),
            show_progress=False,
            **(defaults | options),
        )


def ask(search):
    prompt = next(p for p in tiny_models.prompts(search["case"]) if len(p) == search["prompt_length"])
    fields = {name: search[name] for name in ("length_penalty", "early_stopping", "min_tokens", "stop_token_ids")}
    return prompt, beams(search["width"], search["max_tokens"], **fields)


def check_is_golden(out, search):
    assert [one.token_ids for one in out.outputs] == search["sequences"], search
    penalties = [len(one.token_ids) ** search["length_penalty"] for one in out.outputs]
    scores = [one.cumulative_logprob / penalty for one, penalty in zip(out.outputs, penalties, strict=True)]
    assert scores == pytest.approx(search["scores"], rel=1e-4)
    is_stop = [one.token_ids[-1] in (2, *search["stop_token_ids"]) for one in out.outputs]
    assert [one.finish_reason for one in out.outputs] == ["stop" if stop else "length" for stop in is_stop]


def test_the_golden_searches_are_those_that_are_described():
    assert [{k: v for k, v in one.items() if k not in ("sequences", "scores")} for one in GOLDEN] == json.loads(
        json.dumps(beam_cases.searches())
    )
    assert len({json.dumps(one["sequences"]) for one in GOLDEN}) > 20


@pytest.fixture(scope="module")
def llm():
    with make_llm("mistral", num_gpu_blocks_override=120) as llm:
        yield llm


def test_searches_side_by_side_find_what_transformers_finds(llm):
    """More of them than there are rows and blocks, so that they wait for each other."""
    searches = [one for one in GOLDEN if one["case"] == "mistral"]
    outs = llm.generate(*map(list, zip(*map(ask, searches), strict=True)), use_tqdm=False)
    for out, search in zip(outs, searches, strict=True):
        check_is_golden(out, search)
    llm.engine.step()  # frees the blocks of the last one
    stats = llm.engine.stats()
    assert (stats["num_blocks_used"], stats["num_compilations_after_ready"]) == (0, 0)
    assert stats["num_block_copies"] > len(searches)
    llm.engine.check_integrity()


def test_a_search_beside_other_requests_and_resets_finds_the_same(llm):
    searches = [one for one in GOLDEN if one["case"] == "mistral"][::7]
    engine, finished = llm.engine, {}
    for i, search in enumerate(searches):
        engine.add_request(f"beam{i}", *ask(search))
        engine.add_request(f"n{i}", ask(search)[0], SamplingParams(n=3, seed=i, max_tokens=10, ignore_eos=True))
    steps, preemptions = 0, engine.stats()["num_preemptions"]
    while engine.has_unfinished_requests():
        finished |= {out.request_id: out for out in engine.step() if out.finished}
        engine.check_integrity()
        steps += 1
        if steps in (5, 9, 30):
            assert engine.reset_prefix_cache(reset_running_requests=True)
            engine.check_integrity()
    assert engine.stats()["num_preemptions"] > preemptions
    for i, search in enumerate(searches):
        check_is_golden(finished[f"beam{i}"], search)


@pytest.mark.parametrize(
    "case", ["qwen3", *(pytest.param(case, marks=pytest.mark.oracle) for case in ("llama3_rope", "gemma3", "smollm2"))]
)
def test_searches_of_other_families_find_what_transformers_finds(case):
    searches = [one for one in GOLDEN if one["case"] == case]
    with make_llm(case, max_num_batched_tokens=16, enable_prefix_caching=False, async_scheduling=False) as llm:
        for search in searches:
            prompt, params = ask(search)
            check_is_golden(llm.generate([prompt], params, use_tqdm=False)[0], search)
        assert llm.engine.stats()["num_compilations_after_ready"] == 0


def test_beam_search_returns_vllms_shape(llm):
    search = GOLDEN[0]
    prompt, params = ask(search)
    fields = ("max_tokens", "length_penalty", "early_stopping", "stop_token_ids")
    named = {name: getattr(params, name) for name in fields}
    (out,) = llm.beam_search([prompt], BeamSearchParams(beam_width=search["width"], logprobs=3, **named))
    assert [one.tokens for one in out.sequences] == [prompt + tokens for tokens in search["sequences"]]
    for one, sequence in zip(out.outputs, out.sequences, strict=True):
        assert sequence.cum_logprob == pytest.approx(
            sum(p[t].logprob for p, t in zip(one.logprobs, one.token_ids, strict=True))
        )
        assert all(p[t].rank >= 1 and len(p) in (3, 4) for p, t in zip(one.logprobs, one.token_ids, strict=True))
        assert (sequence.finish_reason, sequence.text) == (one.finish_reason, None)
    short = llm.beam_search([prompt, prompt], 3, 5, 0.5, True)
    assert [len(out.sequences) for out in short] == [3, 3]


@pytest.fixture(scope="module")
def shared_engine():
    return fake_engine(max_num_seqs=8, max_num_batched_tokens=64)


@pytest.fixture
def engine(shared_engine):
    yield shared_engine
    shared_engine.step()
    assert not shared_engine.has_unfinished_requests()
    assert shared_engine.stats()["num_blocks_used"] == 0
    shared_engine.check_integrity()


def test_the_best_of_a_search_without_an_end_is_greedy_where_that_is_most_likely(engine):
    out = run_all(engine, [("b", PROMPT, beams(4, ignore_eos=True))])["b"]
    assert out.outputs[0].token_ids == continuation(PROMPT, 12)
    assert out.outputs[0].text == engine.tokenizer.decode(continuation(PROMPT, 12))
    assert len({tuple(one.token_ids) for one in out.outputs}) == 4
    assert [one.index for one in out.outputs] == [0, 1, 2, 3]
    totals = [one.cumulative_logprob for one in out.outputs]
    assert totals == sorted(totals, reverse=True)


def test_best_of_is_the_width_and_n_what_is_returned(engine):
    wide = run_all(engine, [("b", PROMPT, beams(5, ignore_eos=True))])["b"]
    some = run_all(engine, [("b", PROMPT, beams(2, best_of=5, ignore_eos=True))])["b"]
    assert [one.token_ids for one in some.outputs] == [one.token_ids for one in wide.outputs[:2]]


def test_the_text_of_an_end_is_left_out_unless_it_is_asked_for(engine):
    for include in (False, True):
        params = beams(2, 8, stop_token_ids=range(60, 70), include_stop_str_in_output=include, early_stopping=True)
        ended = [one for one in run_all(engine, [("b", PROMPT, params)])["b"].outputs if one.finish_reason == "stop"]
        assert ended
        for one in ended:
            shown = one.token_ids if include else one.token_ids[:-1]
            assert (one.text, one.stop_reason) == (engine.tokenizer.decode(shown), one.token_ids[-1])


def test_prompt_logprobs_come_with_a_search(engine):
    params = beams(3, 6, prompt_logprobs=2)
    plain = run_all(engine, [("p", PROMPT, SamplingParams(max_tokens=1, prompt_logprobs=2))])["p"]
    assert run_all(engine, [("b", PROMPT, params)])["b"].prompt_logprobs == plain.prompt_logprobs


def test_logprobs_of_a_search_come_beside_requests_that_sample(engine):
    """Log probabilities of the rows beside it were looked up for the search too: a KeyError that ended the engine."""
    params = beams(3, 6, logprobs=2)
    alone = run_all(engine, [("b", PROMPT, params)])["b"]
    both = run_all(engine, [("b", PROMPT, params), ("p", PROMPT, SamplingParams(max_tokens=20, logprobs=1, seed=0))])
    assert [one.logprobs for one in both["b"].outputs] == [one.logprobs for one in alone.outputs]
    assert [len(one.logprobs) for one in both["b"].outputs] == [6, 6, 6]
    assert len(both["p"].outputs[0].logprobs) == 20


@pytest.mark.parametrize("after", range(9))
def test_a_search_is_aborted_in_every_state_of_its_life(engine, after):
    """Waiting, in the middle of its prompt, at its first choice, forked, in flight; the others go on."""
    for i in range(3):
        engine.add_request(f"g{i}", [i, 2], GREEDY)
    engine.add_request("b", list(range(100)), beams(3))
    engine.add_request("waiting", PROMPT, beams(8))
    seen = [output for _ in range(after) for output in engine.step()]
    engine.abort(["b", "waiting"])
    while engine.has_unfinished_requests():
        seen += engine.step()
        engine.check_integrity()
    ended = {out.request_id: out for out in seen if out.finished}
    assert [ended[name].outputs[0].finish_reason for name in ("b", "waiting")] == ["abort", "abort"]
    assert [ended[f"g{i}"].outputs[0].token_ids for i in range(3)] == [continuation([i, 2], 20) for i in range(3)]
    assert all(not one.token_ids for one in ended["b"].outputs)


def test_logits_that_are_not_finite_end_the_whole_search_alone():
    """And all completions of a prompt with such logits."""
    poison, params = continuation(PROMPT, 3)[2], SamplingParams(temperature=0, max_tokens=3)
    engine = fake_engine(poison=poison, max_num_batched_tokens=16)
    many = SamplingParams(n=3, max_tokens=3)
    outs = run_all(engine, [("b", PROMPT, beams(2)), ("many", [1, poison], many), ("good", [1, 2, 3], params)])
    assert [one.finish_reason for one in outs["b"].outputs] == ["error"] * 2
    assert [one.finish_reason for one in outs["many"].outputs] == ["error"] * 3
    assert "not finite" in outs["b"].error
    assert outs["good"].outputs[0].token_ids == continuation([1, 2, 3], 3)
    assert engine.stats()["num_blocks_used"] == 0


@pytest.mark.parametrize(
    ("options", "field", "message"),
    [
        ({"n": 0}, "n", "n is 0"),
        ({"n": 33}, "n", "33, the width of a beam search"),
        ({"n": 4, "best_of": 3}, "best_of", "best_of is 3"),
        ({"best_of": 0}, "best_of", "best_of is 0"),
        ({"n": 9}, "n", "width 9 .*max_num_seqs is 8"),
        ({"n": 2, "best_of": 9}, "best_of", "max_num_seqs is 8"),
        ({"temperature": 0.7}, "temperature", "0.7, which a beam search cannot take"),
        ({"top_p": 0.9}, "top_p", "0.9"),
        ({"top_k": 3}, "top_k", "3"),
        ({"min_p": 0.1}, "min_p", "0.1"),
        ({"presence_penalty": 1.0}, "presence_penalty", "1.0"),
        ({"frequency_penalty": 1.0}, "frequency_penalty", "1.0"),
        ({"repetition_penalty": 1.1}, "repetition_penalty", "1.1"),
        ({"logit_bias": {1: 1.0}}, "logit_bias", "beam search"),
        ({"allowed_token_ids": [1, 2]}, "allowed_token_ids", "beam search"),
        ({"bad_words": ["a"]}, "bad_words", "beam search"),
        ({"stop": ["a"]}, "stop", "beam search"),
        ({"logprobs": 21}, "logprobs", "21, the limit is 20"),
        ({"early_stopping": "always"}, "early_stopping", "'always'; it must be True, False or 'never'"),
        ({"length_penalty": float("nan")}, "length_penalty", "nan"),
        ({"length_penalty": 11}, "length_penalty", "at most 10"),
        ({"output_kind": RequestOutputKind.DELTA}, "output_kind", "do not stream it"),
        ({"n": 8, "max_tokens": 120}, "max_tokens", "may need 121 KV cache blocks, there are 64"),
        ({"use_beam_search": False, "length_penalty": 2.0}, "length_penalty", "only a beam search knows"),
        ({"use_beam_search": False, "early_stopping": True}, "early_stopping", "only a beam search knows"),
        ({"use_beam_search": False, "best_of": 3}, "best_of", "best_of is 3, n is 2"),
        ({"use_beam_search": 1}, "use_beam_search", "True or False"),
    ],
)
def test_what_does_not_fit_a_search_is_refused_before_anything_is_queued(engine, options, field, message):
    with pytest.raises(InvalidRequestError, match=message) as error:
        engine.add_request("bad", PROMPT, SamplingParams(**({"n": 2, "use_beam_search": True} | options)))
    assert error.value.param == field
    assert not engine.has_unfinished_requests()


def test_what_is_neutral_is_taken(engine):
    params = beams(2, 3, temperature=0.0, top_p=1.0, top_k=-1, min_p=0, seed=5, best_of=2)
    assert len(run_all(engine, [("b", PROMPT, params)])["b"].outputs) == 2
