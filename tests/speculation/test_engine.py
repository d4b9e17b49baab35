"""The engine with a draft model over the fake model: right in most positions, wrong in every fifth.

What the fake model generates is known by hand, and it reads every token back from the cache, so one wrong slot, length
or table shows. Requests end in the middle of accepted runs in every way there is.
"""

import gc
import json
import re
import weakref

import pytest

from pagedjax import SamplingParams
from pagedjax.execution import buckets
from pagedjax.loading import LoadedModel
from pagedjax.structured_outputs import StructuredOutputsParams
from tests.fakes import FAKE_CONFIG, FakeModel, continuation, fake_engine, run_all
from tests.speculation.every_kind import comparable, requests_of_every_kind

WORDY = [29] + [1] * 38  # is followed by 7 tokens of printable text
DRAFT = {"method": "draft_model", "model": "fake", "num_speculative_tokens": 3, "is_adaptive": False}


def greedy(**options):
    return SamplingParams(**({"temperature": 0.0, "max_tokens": 24, "ignore_eos": True} | options))


@pytest.fixture(scope="module")
def engine():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(buckets.SAMPLE_BUCKETS, "cpu", ())  # one bucket: these are slow to compile
        engine = fake_engine(speculative_config=DRAFT, draft_errs_every=5)
    yield engine
    assert engine.stats()["num_compilations_after_ready"] == 0
    draft = weakref.ref(engine._runner._draft)
    engine.shutdown()
    gc.collect()
    assert draft() is None, "an engine that was shut down holds its draft model's weights"


@pytest.fixture(autouse=True)
def _drafts_are_accepted(engine):
    before = engine.stats()["spec_decode_num_accepted_tokens"]
    yield
    assert engine.stats()["spec_decode_num_accepted_tokens"] > before
    assert engine.stats()["num_blocks_used"] == 0


def test_more_requests_than_rows_are_right_in_fewer_steps(engine):
    prompts = [[i, 2 * i, 3] * (1 + i % 7) for i in range(10)]
    before = engine.host_times.num_steps
    outs = run_all(engine, [(str(i), prompt, greedy()) for i, prompt in enumerate(prompts)])
    assert [outs[str(i)].outputs[0].token_ids for i in range(10)] == [continuation(one, 24) for one in prompts]
    assert engine.host_times.num_steps - before < 3 * 24 * 0.75


def test_of_a_draft_that_errs_at_every_fifth_position_all_others_are_accepted(engine):
    """Also after steps that accepted every draft, the last of which the draft model has not read."""
    engine.speculation_trace(clear=True)
    run_all(engine, [("a", [1, 2, 3], greedy(max_tokens=60))])
    accepted = [one.num_accepted for step in engine.speculation_trace() for one in step.verified]
    first = accepted.index(0)  # the newest token is at the last of five positions
    assert accepted[first:-2] == ([0, 3] * 60)[: len(accepted) - 2 - first]
    assert len(accepted) > 20


def test_a_prompt_is_read_for_drafts_in_parts_beside_the_others(engine, monkeypatch):
    """All of it was read in the first step with drafts, and everybody's next token came as much later."""
    sizes, proposer = [], engine._runner._speculator._proposer
    read = proposer._read
    monkeypatch.setattr(
        proposer,
        "_read",
        lambda state, pieces, *rest: (sizes.append([n for *_, n in pieces]), read(state, pieces, *rest)),
    )
    engine.speculation_trace(clear=True)
    prompts = {"short": [9, 8, 7], "long": [3, *range(89)]}
    outs = run_all(engine, [(name, prompt, greedy(max_tokens=30)) for name, prompt in prompts.items()])
    for name, prompt in prompts.items():
        assert outs[name].outputs[0].token_ids == continuation(prompt, 30)
    assert max(map(sum, sizes)) == 32
    assert [n for part in sizes for n in part if n > 8][:2] == [32, 32]
    accepted = [
        one.num_accepted for step in engine.speculation_trace() for one in step.verified if one.request_id == "long"
    ]
    first = accepted.index(0)
    assert accepted[first:-2] == ([0, 3] * 60)[: len(accepted) - 2 - first]
    assert len(accepted) > 8


def test_refused_drafts_are_no_tokens_of_an_iteration(engine):
    """They were counted in the histogram, which showed up to K tokens too many a request and step."""
    before, drafts = engine.histograms()["iteration_tokens_total"], engine.stats()["spec_decode_num_draft_tokens"]
    run_all(engine, [("a", [1, 2, 3], greedy(max_tokens=40)), ("b", [4, 5], greedy(max_tokens=30))])
    after = engine.histograms()["iteration_tokens_total"]
    assert engine.stats()["spec_decode_num_draft_tokens"] - drafts > 40
    assert after.sum - before.sum == 3 + 40 + 2 + 30 - 2, "each request's last token is not computed"


@pytest.mark.parametrize("max_tokens", range(1, 9))
def test_max_tokens_within_an_accepted_run(engine, max_tokens):
    requests = [("a", [5, 6, 7], greedy(max_tokens=max_tokens)), ("b", [9, 9], greedy())]
    outs = run_all(engine, requests)
    out = outs["a"].outputs[0]
    assert (out.token_ids, out.finish_reason) == (continuation([5, 6, 7], max_tokens), "length")


@pytest.mark.parametrize("place", range(1, 9))
def test_stop_token_within_an_accepted_run(engine, place):
    right = continuation([5, 6, 7], 24)
    outs = run_all(engine, [("a", [5, 6, 7], greedy(stop_token_ids=[right[place]]))])
    out = outs["a"].outputs[0]
    assert (out.token_ids, out.finish_reason, out.stop_reason) == (right[: place + 1], "stop", right[place])


@pytest.mark.parametrize("place", range(1, 7))
def test_stop_string_within_an_accepted_run_with_logprobs(engine, place):
    """All that comes after the stop in the same step is dropped: tokens, text and log probabilities."""
    for _ in range(2):  # the draft model has the prompt from then on: equal steps, to the last bit
        base = run_all(engine, [("a", WORDY, greedy(logprobs=1, max_tokens=7))])["a"].outputs[0]
    assert base.token_ids == continuation(WORDY, 7)
    assert base.text == ";/_E'(\\"
    stop, end = base.text[place - 1 : place + 1], place + 1
    out = run_all(engine, [("a", WORDY, greedy(logprobs=1, stop=[stop]))])["a"].outputs[0]
    assert (out.text, out.token_ids) == (base.text[: end - 2], base.token_ids[:end])
    assert (out.finish_reason, out.stop_reason) == ("stop", stop)
    assert out.logprobs == base.logprobs[:end]


def test_structured_output_and_plain_requests_beside_each_other(engine):
    form = StructuredOutputsParams(regex="(ab|cd){4,12}e")
    schema = StructuredOutputsParams(json={"type": "object", "properties": {"a": {"enum": ["yes", "no"]}},
                                           "required": ["a"], "additionalProperties": False})  # fmt: skip
    requests = [
        ("regex", [1, 2], greedy(structured_outputs=form, ignore_eos=False, max_tokens=40)),
        ("json", [4, 2], greedy(structured_outputs=schema, ignore_eos=False, max_tokens=60)),
        ("plain", [7, 7], greedy()),
    ]
    outs = run_all(engine, requests)
    assert re.fullmatch("(ab|cd){4,12}e", outs["regex"].outputs[0].text)
    assert json.loads(outs["json"].outputs[0].text)["a"] in ("yes", "no")
    assert outs["plain"].outputs[0].token_ids == continuation([7, 7], 24)
    for request_id, prompt, params in requests[:2]:
        alone = run_all(engine, [(request_id, prompt, params)])
        assert alone[request_id].outputs[0].token_ids == outs[request_id].outputs[0].token_ids


def test_requests_of_every_kind_beside_each_other_give_what_they_give_without_drafts(engine):
    """Also beams, forms, bans, penalties, several completions, log probabilities of prompts and outputs."""
    requests, plain = requests_of_every_kind(seed=5, count=40), fake_engine()
    expected = run_all(plain, requests)
    plain.shutdown()
    outs = run_all(engine, requests)
    for request_id, prompt, params in requests:
        assert comparable(outs[request_id]) == comparable(expected[request_id]), (prompt, params)


def test_preempted_with_drafts_in_flight(engine):
    prompts = [[i, 1, i] for i in range(4)]
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, greedy(max_tokens=40))
    finished, num_preemptions = {}, engine.stats()["num_preemptions"]
    for count in range(200):
        finished |= {out.request_id: out for out in engine.step() if out.finished}
        if count in (4, 9):
            assert engine.reset_prefix_cache(reset_running_requests=True)
        engine.check_integrity()
    assert engine.stats()["num_preemptions"] >= num_preemptions + 8
    assert [finished[str(i)].outputs[0].token_ids for i in range(4)] == [continuation(one, 40) for one in prompts]


def test_an_aborted_request_leaves_the_others_alone(engine):
    engine.add_request("a", [1, 2], greedy(max_tokens=50))
    engine.add_request("b", [3, 4], greedy(max_tokens=30))
    finished = {}
    for count in range(100):
        finished |= {out.request_id: out for out in engine.step() if out.finished}
        if count == 3:
            engine.abort("a")
    assert finished["a"].outputs[0].finish_reason == "abort"
    assert finished["b"].outputs[0].token_ids == continuation([3, 4], 30)


def test_a_prefix_that_was_generated_with_drafts_is_found_and_right(engine):
    first = run_all(engine, [("a", [8, 1, 8], greedy(max_tokens=40))])["a"].outputs[0].token_ids
    prompt = [8, 1, 8, *first]
    again = run_all(engine, [("b", prompt, greedy(max_tokens=20))])["b"]
    assert again.num_cached_tokens >= 40
    assert again.outputs[0].token_ids == continuation(prompt, 20)


def test_the_trace_tells_each_step_s_proposals(engine):
    engine.speculation_trace(clear=True)
    run_all(engine, [("a", [1, 2, 3], greedy(max_tokens=30))])
    verified = [one for step in engine.speculation_trace() for one in step.verified]
    right = continuation([1, 2, 3], 40)
    place = 1
    for one in verified:
        assert list(one.draft_token_ids[: one.num_accepted]) == right[place : place + one.num_accepted]
        place += one.num_accepted + 1
    assert place >= 25


def test_other_weights_make_it_measure_anew(engine, monkeypatch):
    model = LoadedModel(FAKE_CONFIG, FakeModel())
    monkeypatch.setattr("pagedjax.engine.load_model", lambda config, **given: model)
    controller = engine._speculation._controller
    controller.reason = "of the old weights"
    engine.update_weights({})
    assert controller.reason == "speculation off: nothing is measured yet"
    outs = run_all(engine, [("a", [1, 2, 3], greedy())])
    assert outs["a"].outputs[0].token_ids == continuation([1, 2, 3], 24)
