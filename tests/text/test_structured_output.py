"""Forms of output are compiled once, apart from everything else, and what makes no sense is refused in words."""

import time

import numpy as np
import pytest

from pagedjax.errors import InvalidRequestError
from pagedjax.structured_outputs import MAX_GRAMMAR_CHARS, ReasoningTokens, StructuredOutputsParams
from pagedjax.text.structured_output import GrammarCompiler, compiler
from pagedjax.text.tokenizer import Tokenizer
from tests.fakes import EOS, VOCAB_SIZE, byte_tokenizer
from tests.text import tokenizers as tokenizer_kinds

THINK, END_THINK = 257, 258  # <extra0>, <extra1>


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


@pytest.fixture(scope="module")
def thinking():
    """A vocabulary in which the two markers around reasoning are one token each."""
    hf = byte_tokenizer().hf
    hf.add_tokens(["<extra0>", "<extra1>"])
    return GrammarCompiler(Tokenizer(hf), vocab_size=VOCAB_SIZE, eos_token_ids=frozenset([EOS]))


@pytest.fixture(scope="module")
def compiled(tokenizer):
    return GrammarCompiler(tokenizer, vocab_size=VOCAB_SIZE, eos_token_ids=frozenset([EOS]))


def allowed(compiled, grammar):
    bits = np.unpackbits(compiled.masks([grammar])[0].view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits[:VOCAB_SIZE]).tolist())


def texts(tokenizer, ids):
    return {tokenizer.decode([token_id]) for token_id in ids}


def follow(compiled, tokenizer, grammar, text):
    for token_id in tokenizer.encode(text):
        assert token_id in allowed(compiled, grammar), text
        grammar.accept(token_id)


@pytest.mark.parametrize(
    ("form", "text", "first"),
    [
        ({"json": {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]}}, '{"a":1', "{"),
        ({"json": '{"enum": ["x", "y"]}'}, '"x', '"'),
        ({"json_object": True}, '{"k": [1, null]', "{"),
        ({"regex": "[0-9]{2}-?z"}, "12", "0123456789"),
        ({"choice": ["yes", "no", "näh"]}, "ye", "yn"),
        ({"grammar": 'root ::= "a" root | "b"'}, "aa", "ab"),
        ({"grammar": 'start: "x" | "y" start'}, "y", "xy"),
    ],
)
def test_each_kind_allows_what_it_says(compiled, tokenizer, form, text, first):
    grammar = compiled.start(StructuredOutputsParams(**form))
    assert texts(tokenizer, allowed(compiled, grammar)) == set(first)
    follow(compiled, tokenizer, grammar, text)
    assert not grammar.is_finished
    assert EOS not in allowed(compiled, grammar)


def test_a_form_that_admits_nothing_more_is_finished(compiled, tokenizer):
    grammar = compiled.start(StructuredOutputsParams(choice=["yes", "no"]))
    follow(compiled, tokenizer, grammar, "yes")
    assert grammar.is_finished


def test_eos_is_allowed_exactly_where_the_form_may_end(compiled, tokenizer):
    grammar = compiled.start(StructuredOutputsParams(regex="[0-9]{2,}"))
    follow(compiled, tokenizer, grammar, "1")
    assert EOS not in allowed(compiled, grammar)
    follow(compiled, tokenizer, grammar, "2")
    assert EOS in allowed(compiled, grammar)
    assert not grammar.is_finished
    grammar.accept(EOS)
    assert grammar.is_finished


def test_outputs_of_one_form_do_not_share_their_place_in_it(compiled, tokenizer):
    one, other = (compiled.start(StructuredOutputsParams(regex="ab")) for _ in range(2))
    follow(compiled, tokenizer, one, "a")
    assert texts(tokenizer, allowed(compiled, one)) == {"b"}
    assert texts(tokenizer, allowed(compiled, other)) == {"a"}


def test_json_without_whitespace_has_none(compiled, tokenizer):
    form = StructuredOutputsParams(json_object=True, disable_any_whitespace=True)
    grammar = compiled.start(form)
    follow(compiled, tokenizer, grammar, '{"a":')
    assert not {" ", "\n"} & texts(tokenizer, allowed(compiled, grammar))


def test_whitespace_in_json_comes_to_an_end(compiled, tokenizer):
    """A small model under a schema may prefer white space for ever."""
    grammar = compiled.start(StructuredOutputsParams(json_object=True))
    follow(compiled, tokenizer, grammar, '{"a":\n' + " " * 63)
    assert not {" ", "\n"} & texts(tokenizer, allowed(compiled, grammar))
    follow(compiled, tokenizer, grammar, "1}")
    assert grammar.is_finished


def test_whitespace_follows_its_pattern(compiled, tokenizer):
    grammar = compiled.start(StructuredOutputsParams(json_object=True, whitespace_pattern="\t"))
    follow(compiled, tokenizer, grammar, '{"a":')
    assert {"\t", "1"} <= texts(tokenizer, allowed(compiled, grammar))
    assert " " not in texts(tokenizer, allowed(compiled, grammar))


def test_a_vocabulary_wider_than_the_tokenizers_is_masked_to_its_end(tokenizer):
    compiled = GrammarCompiler(tokenizer, vocab_size=VOCAB_SIZE + 100, eos_token_ids=frozenset([EOS]))
    grammar = compiled.start(StructuredOutputsParams(regex="a"))
    masks = compiled.masks([grammar])
    assert masks.shape == (1, -(-(VOCAB_SIZE + 100) // 32))
    assert np.unpackbits(masks.view(np.uint8)).sum() == 1


def test_open_reasoning_is_free_but_cannot_end_the_output(thinking, tokenizer):
    grammar = thinking.start(reasoned("[0-9]", is_open=True))
    assert allowed(thinking, grammar) == set(range(VOCAB_SIZE)) - {EOS}
    follow(thinking, tokenizer, grammar, "well, 7 ")
    assert not grammar.is_finished
    grammar.accept(END_THINK)
    assert texts(tokenizer, allowed(thinking, grammar)) == set("0123456789")
    follow(thinking, tokenizer, grammar, "7")
    assert grammar.is_finished


@pytest.mark.parametrize("thinks", [True, False])
def test_the_first_token_decides_whether_there_is_reasoning(thinking, tokenizer, thinks):
    grammar = thinking.start(reasoned("[0-9]", is_open=False))
    assert allowed(thinking, grammar) == {THINK, *tokenizer.encode("0123456789")}
    if thinks:
        grammar.accept(THINK)
        follow(thinking, tokenizer, grammar, "hm")
        grammar.accept(END_THINK)
    follow(thinking, tokenizer, grammar, "3")
    assert grammar.is_finished


def reasoned(regex, *, is_open):
    return StructuredOutputsParams(regex=regex, reasoning=ReasoningTokens("<extra0>", "<extra1>", is_open))


def test_a_reasoning_marker_of_several_tokens_is_refused(compiled):
    form = StructuredOutputsParams(regex="a", reasoning=ReasoningTokens("<think>", "</think>", True))
    with pytest.raises(InvalidRequestError, match="is 7 tokens of this model"):
        compiled.start(form)


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({}, "exactly one of json, regex, choice, grammar, json_object; given: none"),
        ({"json_object": False}, "given: none"),
        ({"regex": "a", "choice": ["b"]}, "given: regex, choice"),
        ({"regex": ""}, "not empty"),
        ({"regex": 5}, "must be a string"),
        ({"choice": []}, "list of strings"),
        ({"choice": ["a", ""]}, "none of them empty"),
        ({"choice": ["a"] * 1025}, "has 1025 entries, the limit is 1024"),
        ({"json": "{"}, "is not JSON"),
        ({"json": "[1]"}, "must be a JSON schema"),
        ({"json": 5}, "must be a JSON schema"),
        ({"json": "[" * 50_000}, "is not JSON"),
        ({"json_object": 1}, "true or false"),
        ({"regex": "a" * (MAX_GRAMMAR_CHARS + 1)}, f"the limit is {MAX_GRAMMAR_CHARS}"),
        ({"json_object": True, "whitespace_pattern": "a" * 257}, "the limit is 256"),
    ],
)
def test_values_that_are_no_form_are_refused_at_once(form, message):
    with pytest.raises(InvalidRequestError, match=message) as caught:
        StructuredOutputsParams(**form)
    assert caught.value.param == "structured_outputs"
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({"regex": "("}, "regex cannot be used: .*unclosed group"),
        ({"regex": r"(a)\1"}, "regex cannot be used"),
        ({"json": {"type": "strin"}}, "Invalid type: strin"),
        ({"json": {"propertyNames": {}}}, "Unimplemented keys"),
        ({"json": {"$ref": "#"}}, "no output can fulfil it"),
        ({"json": {"$ref": "http://example.com/schema"}}, "json cannot be used"),
        ({"grammar": "start: nowhere"}, "grammar cannot be used"),
        ({"grammar": "start: " + "(" * 9000 + '"a"' + ")" * 9000}, "too deeply nested"),
    ],
)
def test_forms_that_make_no_sense_are_refused_in_words(compiled, form, message):
    params = StructuredOutputsParams(**form)
    for _ in range(2):  # the second time from the cache
        with pytest.raises(InvalidRequestError, match=f"(?s){message}") as caught:
            compiled.start(params)
        assert caught.value.param == "structured_outputs"
        assert len(str(caught.value)) < 400


def test_choices_that_overlap_are_refused_with_what_lets_them_pass(compiled):
    """The message named an option that is named nowhere else."""
    schema = {"oneOf": [{"type": "object", "properties": {name: {"type": "string"}}} for name in "ab"]}
    with pytest.raises(InvalidRequestError, match=r'oneOf .* Set "x-guidance": {"coerce_one_of": true} at'):
        compiled.start(StructuredOutputsParams(json=schema))
    compiled.start(StructuredOutputsParams(json=schema | {"x-guidance": {"coerce_one_of": True}}))


def test_a_form_is_compiled_once(compiled, monkeypatch):
    form = StructuredOutputsParams(regex="only once")
    assert not compiled.is_compiled(form)
    compiled.compile(form)
    assert compiled.is_compiled(form)
    monkeypatch.setattr(compiler.subprocess, "run", None)
    compiled.start(StructuredOutputsParams(regex="only once"))


def test_compiling_is_killed_when_it_takes_too_long(tokenizer):
    """The library would take longer for so many alternatives than the time there is, as it does to start."""
    compiled = GrammarCompiler(tokenizer, vocab_size=VOCAB_SIZE, eos_token_ids=frozenset([EOS]), compile_seconds=0.03)
    alternatives = " | ".join(f'"{i}"' for i in range(11_000))
    began = time.monotonic()
    with pytest.raises(InvalidRequestError, match=r"took more than 0\.03 s"):
        compiled.start(StructuredOutputsParams(grammar=f"start: {alternatives}"))
    assert time.monotonic() - began < 10


def test_a_compiling_process_that_dies_costs_its_request_alone(compiled, monkeypatch):
    monkeypatch.setattr(compiler.sys, "executable", "/bin/false")
    with pytest.raises(InvalidRequestError, match="too much memory"):
        compiled.start(StructuredOutputsParams(regex="whoever dies"))


def test_without_the_library_the_error_names_the_extra(tokenizer, monkeypatch):
    monkeypatch.setattr(compiler.importlib.util, "find_spec", lambda name: None)
    compiled = GrammarCompiler(tokenizer, vocab_size=VOCAB_SIZE, eos_token_ids=frozenset([EOS]))
    with pytest.raises(InvalidRequestError, match=r"install pagedjax\[structured\]"):
        compiled.start(StructuredOutputsParams(regex="a"))


def test_without_a_tokenizer_or_an_end_structured_output_is_refused(tokenizer):
    for has, ends in ((None, frozenset([EOS])), (tokenizer, frozenset())):
        compiled = GrammarCompiler(has, vocab_size=VOCAB_SIZE, eos_token_ids=ends)
        with pytest.raises(InvalidRequestError, match="needs a tokenizer and an end-of-sequence token"):
            compiled.start(StructuredOutputsParams(regex="a"))


@pytest.mark.parametrize("kind", tokenizer_kinds.KINDS)
def test_vocabularies_of_every_kind_can_be_masked(kind):
    """The library reads two kinds by itself; the others failed when the engine started."""
    tokenizer = tokenizer_kinds.tokenizer_of(kind)
    compiled = GrammarCompiler(tokenizer, vocab_size=tokenizer.vocab_size, eos_token_ids=tokenizer.eos_token_ids)
    grammar, token_ids = compiled.start(StructuredOutputsParams(regex=".{3,8}")), []
    while not grammar.is_finished:
        mask = compiled.masks([grammar])[0]
        bits = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        token_ids.append(int(bits[-1]))
        grammar.accept(token_ids[-1])
        assert grammar.error is None
    assert 3 <= len(tokenizer.decode(token_ids, skip_special_tokens=True)) <= 8


def test_a_form_that_the_vocabulary_cannot_express_is_refused():
    tokenizer = tokenizer_kinds.tokenizer_of("whole-words")
    compiled = GrammarCompiler(tokenizer, vocab_size=tokenizer.vocab_size, eos_token_ids=tokenizer.eos_token_ids)
    with pytest.raises(InvalidRequestError, match="no output can fulfil it"):
        compiled.start(StructuredOutputsParams(choice=["hello", "what"]))
