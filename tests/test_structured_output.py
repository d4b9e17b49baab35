"""Structured output through the engine: however it is scheduled, an output has its form and no other one changes."""

import json
import random
import re

import jsonschema
import pytest

from pagedjax import InvalidRequestError, ReasoningTokens, SamplingParams, StructuredOutputsParams
from pagedjax.execution import buckets
from pagedjax.text.structured_output import GrammarCompiler
from pagedjax.text.tokenizer import Tokenizer
from tests.fakes import EOS, VOCAB_SIZE, byte_tokenizer, continuation, fake_engine, run_all

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
LETTERS = StructuredOutputsParams(regex="[a-z]{40}")


def params(form=None, **options):
    form = StructuredOutputsParams(**form) if isinstance(form, dict) else form
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 60, "structured_outputs": form} | options)


@pytest.fixture(scope="module")
def shared_engine():
    return fake_engine(max_num_seqs=8, max_num_batched_tokens=64)


@pytest.fixture
def engine(shared_engine):
    yield shared_engine
    assert not shared_engine.has_unfinished_requests()
    assert shared_engine.stats()["num_blocks_used"] == 0
    assert shared_engine.stats()["num_compilations_after_ready"] == 0


def one(engine, form, prompt="hello", **options):
    return run_all(engine, [("one", prompt, params(form, **options))])["one"].outputs[0]


def test_outputs_of_a_json_schema_parse_and_validate(engine):
    form = StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True)
    requests = [(str(i), f"p{i}", params(form, temperature=1.0, seed=i, max_tokens=100)) for i in range(10)]
    outputs = [out.outputs[0] for out in run_all(engine, requests).values()]
    assert len(outputs) == 10
    for output in outputs:
        assert output.finish_reason == "stop"
        jsonschema.validate(json.loads(output.text), SCHEMA)


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ({"regex": "[0-9]{3}-[a-z]{4}"}, "[0-9]{3}-[a-z]{4}"),
        ({"choice": ["yes", "no", "perhaps"]}, "yes|no|perhaps"),
        ({"grammar": 'root ::= "(" root ")" | "x"'}, r"\(*x\)*"),
    ],
)
def test_outputs_have_their_form_and_end_with_it(engine, form, pattern):
    output = one(engine, form, temperature=1.0, seed=3)
    assert re.fullmatch(pattern, output.text)
    assert (output.finish_reason, output.stop_reason) == ("stop", None)
    assert EOS not in output.token_ids, "nothing else could follow: the request ends without asking the model"


def test_each_token_is_the_best_of_those_allowed(engine):
    """The fake model's logits fall with the circular distance from its next token."""
    output = one(engine, {"regex": "[a-z]{20}"})
    letters, tokens = engine.tokenizer.encode("abcdefghijklmnopqrstuvwxyz"), engine.tokenizer.encode("hello")
    for token in output.token_ids:
        (wanted,) = continuation(tokens, 1)
        distance = {one: min(abs(one - wanted), VOCAB_SIZE - abs(one - wanted)) for one in letters}
        assert distance[token] == min(distance.values())
        tokens.append(token)


def test_requests_beside_a_grammar_get_the_tokens_they_get_alone(engine):
    batch = [engine.tokenizer.encode(f"prompt {i}") for i in range(8)]
    requests = [(f"free {i}", prompt, params(ignore_eos=True)) for i, prompt in enumerate(batch)]
    requests[1:1] = [(f"bound {i}", prompt, params(LETTERS)) for i, prompt in enumerate(batch)]
    outs = run_all(engine, requests)
    assert [outs[f"free {i}"].outputs[0].token_ids for i in range(8)] == [continuation(p, 60) for p in batch]
    alone = [one(engine, LETTERS, prompt).token_ids for prompt in batch]
    assert [outs[f"bound {i}"].outputs[0].token_ids for i in range(8)] == alone


def test_a_row_that_was_under_a_grammar_is_free_for_the_next_request(engine):
    one(engine, LETTERS)
    prompt = engine.tokenizer.encode("next")
    assert one(engine, None, prompt, ignore_eos=True).token_ids == continuation(prompt, 60)


@pytest.fixture(scope="module")
def small():
    """An engine whose blocks do not suffice for four long requests."""
    return fake_engine(num_gpu_blocks_override=18)


def test_preempted_requests_resume_where_their_form_stands(engine, small):
    requests = [(str(i), f"a prompt that fills blocks {i}", params(LETTERS)) for i in range(6)]
    outs = run_all(small, requests)
    assert small.stats()["num_preemptions"] > 0
    alone = [one(engine, LETTERS, prompt).text for _, prompt, _ in requests]
    assert [outs[str(i)].outputs[0].text for i in range(6)] == alone
    assert small.stats()["num_blocks_used"] == 0


def test_a_cached_prefix_and_chunks_change_nothing(engine):
    engine.reset_prefix_cache()
    prompt = "a long prompt of which blocks are cached; " * 2
    cold, warm = (run_all(engine, [("r", prompt, params(LETTERS))])["r"] for _ in range(2))
    assert warm.num_cached_tokens > 0 == cold.num_cached_tokens
    assert warm.outputs[0].text == cold.outputs[0].text
    assert re.fullmatch("[a-z]{40}", cold.outputs[0].text)


def test_completions_of_one_prompt_each_have_their_own_place(engine):
    form = StructuredOutputsParams(regex="[0-9]{2,5}(st|nd)")
    out = run_all(engine, [("n", "three", params(form, n=3, temperature=1.0, seed=5))])["n"]
    texts = [output.text for output in out.outputs]
    assert all(re.fullmatch("[0-9]{2,5}(st|nd)", text) for text in texts)
    assert len(set(texts)) > 1


def test_eos_ends_the_output_only_where_the_form_may_end(engine):
    output = one(engine, {"regex": "[0-9]{3,}"}, logit_bias={EOS: 100})
    assert re.fullmatch("[0-9]{3}", output.text)
    assert output.finish_reason == "stop"
    assert output.token_ids[-1] == EOS


def test_min_tokens_holds_eos_back_but_not_the_end_of_the_form(engine):
    output = one(engine, {"regex": "[0-9]{1,30}"}, logit_bias={EOS: 100}, min_tokens=5)
    assert len(output.token_ids) == 6
    assert one(engine, {"choice": ["yes"]}, min_tokens=5).text == "yes"


def test_max_tokens_cuts_the_form(engine):
    output = one(engine, LETTERS, max_tokens=7)
    assert (len(output.text), output.finish_reason) == (7, "length")


def test_stop_strings_and_stop_tokens_work_inside_a_form(engine):
    whole = one(engine, LETTERS).text
    assert one(engine, LETTERS, stop=[whole[4:6]]).text == whole[: whole.find(whole[4:6])]
    (stop_id,) = engine.tokenizer.encode(whole[3])
    output = one(engine, LETTERS, stop_token_ids=[stop_id])
    assert (output.stop_reason, output.text) == (stop_id, whole[: whole.find(whole[3])])


def test_allowed_token_ids_narrow_the_form(engine):
    ids = engine.tokenizer.encode("xyz!")
    assert re.fullmatch("[xyz]{40}", one(engine, LETTERS, allowed_token_ids=ids).text)


def test_log_probabilities_are_those_of_the_raw_logits(engine):
    free = one(engine, None, logprobs=3, ignore_eos=True, max_tokens=1).logprobs[0]
    bound = one(engine, {"regex": "[0-9]"}, logprobs=3).logprobs[0]
    top = [entry for entry in bound.items() if entry[1].rank <= 3]
    assert dict(top) == {token: entry for token, entry in free.items() if entry.rank <= 3}


def test_an_aborted_request_leaves_the_others_in_their_form(engine):
    for name in ("stays", "goes"):
        engine.add_request(name, "prompt", params(LETTERS))
    for _ in range(5):
        engine.step()
    engine.abort("goes")
    finished = {}
    while engine.has_unfinished_requests():
        finished |= {out.request_id: out.outputs[0] for out in engine.step() if out.finished}
    assert finished["goes"].finish_reason == "abort"
    assert re.fullmatch("[a-z]*", finished["goes"].text)
    assert finished["stays"].text == one(engine, LETTERS, "prompt").text


def test_random_requests_with_aborts_and_preemptions_keep_their_forms(small):
    patterns = ["[a-z]{5,30}", "alpha|beta", "[0-9]+(,[0-9]+){3}", None]
    draw, running, finished = random.Random(0), {}, []
    for number in range(60):
        pattern = draw.choice(patterns)
        options = {"max_tokens": draw.randint(3, 60), "min_tokens": draw.choice([0, 2]), "n": draw.choice([1, 2])}
        form = None if pattern is None else StructuredOutputsParams(regex=pattern)
        options |= {"temperature": draw.choice([0.0, 1.0]), "seed": number}
        small.add_request(str(number), "p" * draw.randint(1, 40), params(form, **options))
        running[str(number)] = pattern
    while running:
        if draw.random() < 0.05:
            small.abort(draw.choice(list(running)))
        for out in small.step():
            if out.finished:
                pattern = running.pop(out.request_id)
                finished += [(pattern, output) for output in out.outputs]
        small.check_integrity()
    ended = [(pattern, output.text) for pattern, output in finished if pattern and output.finish_reason == "stop"]
    assert len(ended) > 20
    assert [text for pattern, text in ended if not re.fullmatch(pattern, text)] == []
    assert {output.finish_reason for _, output in finished} == {"stop", "length", "abort"}
    small.step()
    assert small.stats()["num_blocks_used"] == 0
    assert small.stats()["num_compilations_after_ready"] == 0


def test_a_form_that_grows_beyond_its_limits_ends_its_own_request_alone(engine):
    """Seven hundred optional properties compile, but after the brace the parser holds more items than it may."""
    wide = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(700)}}
    outs = run_all(engine, [("wide", "x", params({"json": wide})), ("other", "y", params(LETTERS))])
    assert outs["wide"].outputs[0].finish_reason == "error"
    assert "form could not be followed" in outs["wide"].error
    assert re.fullmatch("[a-z]{40}", outs["other"].outputs[0].text)


def test_a_form_that_cannot_be_compiled_is_refused_before_queueing(engine):
    with pytest.raises(InvalidRequestError, match="unclosed group"):
        engine.add_request("bad", "prompt", params({"regex": "("}))
    assert not engine.has_unfinished_requests()


def test_a_form_begins_where_reasoning_ends(monkeypatch, engine):
    hf = byte_tokenizer().hf
    hf.add_tokens(["<extra0>", "<extra1>"])
    compiler = GrammarCompiler(Tokenizer(hf), vocab_size=VOCAB_SIZE, eos_token_ids=frozenset([EOS]))
    monkeypatch.setattr(engine._input, "grammar_compiler", compiler)
    form = StructuredOutputsParams(regex="[0-9]{4}", reasoning=ReasoningTokens("<extra0>", "<extra1>", is_open=True))
    (end,) = compiler._tokenizer.encode("<extra1>")
    token_ids = one(engine, form).token_ids
    assert end not in token_ids, "the model goes on thinking, which is free"
    assert token_ids == continuation(engine.tokenizer.encode("hello"), 60)
    token_ids = one(engine, form, logit_bias={end: 100}).token_ids
    assert token_ids[0] == end
    assert re.fullmatch("[0-9]{4}", engine.tokenizer.decode(token_ids[1:]))


def watched(monkeypatch, engine):
    """Record what the engine asks of its runner, and which executables run, from now on."""
    calls, runner = [], engine._runner

    def record(name):
        method = getattr(runner, name)
        monkeypatch.setattr(runner, name, lambda *args: calls.append(name) or method(*args))

    for name in ("dispatch", "sample", "read"):
        record(name)
    executables = {}
    for name, run in runner._executables.items():
        executables[name] = lambda *args, name=name, run=run: calls.append(name) or run(*args)
    monkeypatch.setattr(runner, "_executables", executables)
    return calls


def test_the_forward_pass_is_dispatched_before_the_step_before_it_is_read(monkeypatch, engine):
    """So that the host builds masks while the device computes: only sampling waits for them."""
    calls = watched(monkeypatch, engine)
    one(engine, {"regex": "[a-z]{4}"})
    order = [call for call in calls if call.split()[0] in ("forward", "read", "write", "sample") and call != "sample"]
    order = [call.split()[0] for call in order if not call.startswith(("write rows", "write sampler"))]
    first, step = ["forward", "write", "sample"], ["forward", "read", "write", "sample"]
    assert order == [*first, *step * 3, "forward", "read", "sample", "read"]  # the last forward pass is surplus


def test_a_batch_without_a_grammar_runs_what_it_always_ran(monkeypatch, engine):
    calls = watched(monkeypatch, engine)
    one(engine, None, ignore_eos=True, max_tokens=5)
    assert "sample" not in calls
    assert not [call for call in calls if call.startswith(("write masks", "sample 1 top_k", "sample 1 full"))]
    assert calls.count("dispatch") == 5


def test_forms_hold_where_plain_steps_sample_in_the_same_call(monkeypatch, engine):
    """As on a GPU; a batch with a grammar takes the general executables instead. Here also without running ahead."""
    monkeypatch.setitem(buckets.IS_FUSED, "cpu", True)
    fused = fake_engine(max_num_seqs=2, max_num_batched_tokens=16, async_scheduling=False)
    outs = run_all(fused, [("bound", "bound", params(LETTERS)), ("free", "free", params(ignore_eos=True))])
    assert outs["bound"].outputs[0].text == one(engine, LETTERS, "bound").text
    assert outs["free"].outputs[0].token_ids == continuation(fused.tokenizer.encode("free"), 60)
    assert fused.stats()["num_compilations_after_ready"] == 0


def test_something_that_is_no_form_is_refused():
    with pytest.raises(InvalidRequestError, match="must be a StructuredOutputsParams"):
        SamplingParams(structured_outputs={"regex": "a"})
