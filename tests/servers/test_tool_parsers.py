"""Tool parsers: what they find in whole answers, and that no cut of the text into pieces changes it."""

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servers.tool_parsers import TOOL_PARSERS, Arguments, CallStart, NamedCall, RequiredCalls, Text

PARSERS = {**TOOL_PARSERS, "required": RequiredCalls, "named": lambda: NamedCall("f")}


def joined(parser, pieces):
    """Return the text and the calls that a parser tells, whatever the pieces."""
    text, calls = "", []
    for event in [event for piece in pieces for event in parser.push(piece)] + parser.finish():
        match event:
            case Text(more):
                text += more
            case CallStart(name):
                calls.append((name, ""))
            case Arguments(more):
                calls[-1] = (calls[-1][0], calls[-1][1] + more)
    return text, calls


def whole(name, text):
    return joined(PARSERS[name](), [text])


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("just text", ("just text", [])),
        ('<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', ("", [("f", '{"a": 1}')])),
        (
            'I look.\n<tool_call>{"name": "f", "arguments": {}}</tool_call>\n'
            '<tool_call>{"name": "g", "arguments": {"s": "}\\"{"}}</tool_call>\nDone.',
            ("I look.Done.", [("f", "{}"), ("g", '{"s": "}\\"{"}')]),
        ),
        ('<tool_call>{"arguments": {"a": [1, {}]}, "name": "f"}</tool_call>', ("", [("f", '{"a": [1, {}]}')])),
        ('<tool_call>{"name": "f"}</tool_call>', ("", [("f", "{}")])),
        ('<tool_call>{"name": "f", "arguments": null}</tool_call>', ("", [("f", "{}")])),
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', ("", [("f", '{"a": 1}')])),
        (
            '<tool_call>{"name": "f", "id": 7, "arguments": {"a": 1 } , "x": [2]}</tool_call>',
            ("", [("f", '{"a": 1 }')]),
        ),
        # the end tag missing, the text cut
        ('<tool_call>{"name": "f", "arguments": {"a": 1}}', ("", [("f", '{"a": 1}')])),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_', ("", [("f", '{"a": 1}')])),
        ('<tool_call>{"name": "f", "arguments": {"a": "unfi', ("", [("f", '{"a": "unfi')])),
        (
            '<tool_call>{"name": "f", "arguments": {}}<tool_call>{"name": "g", "arguments": {}}',
            ("", [("f", "{}"), ("g", "{}")]),
        ),
        # no calls
        ("<tool_call>nothing</tool_call>", ("<tool_call>nothing</tool_call>", [])),
        ('<tool_call>{"name": ', ('<tool_call>{"name": ', [])),
        ('<tool_call>{"nome": "f"}</tool_call>', ('<tool_call>{"nome": "f"}</tool_call>', [])),
        ('<tool_call>{"name": 5, "arguments": {}}', ('<tool_call>{"name": 5, "arguments": {}}', [])),
        ('<tool_call><tool_call>{"name": "f", "arguments": {}}', ("<tool_call>", [("f", "{}")])),
        (
            '<tool_call>{"name": ' + "[" * 50_000 + "]" * 50_000,
            ('<tool_call>{"name": ' + "[" * 50_000 + "]" * 50_000, []),
        ),
        ("a < b <tool <tool_cal", ("a < b <tool <tool_cal", [])),
        ("  spaces stay  ", ("  spaces stay  ", [])),
    ],
)
def test_hermes(answer, expected):
    assert whole("hermes", answer) == expected


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("It is 5 {degrees}.", ("It is 5 {degrees}.", [])),
        ('{"name": "f", "parameters": {"a": 1}}', ("", [("f", '{"a": 1}')])),
        ('<|python_tag|>{"name": "f", "parameters": {"a": 1}}', ("", [("f", '{"a": 1}')])),
        (
            ' {"name": "f", "arguments": {}}; {"name": "g", "parameters": {"x": "y"}}',
            ("", [("f", "{}"), ("g", '{"x": "y"}')]),
        ),
        ('{"name": "f", "parameters": {}}\n{"name": "g", "parameters": {}}\n', ("", [("f", "{}"), ("g", "{}")])),
        ('{"name": "f", "parameters": {}} and so on', ("and so on", [("f", "{}")])),
        ('{"answer": 42}', ('{"answer": 42}', [])),
        ('{"answer": 42} {"name": "f", "parameters": {}}', ('{"answer": 42} {"name": "f", "parameters": {}}', [])),
        ("<|python_tag|>print(1)", ("<|python_tag|>print(1)", [])),
        ("{not json", ("{not json", [])),
        ('{"name": "f", "para', ('{"name": "f", "para', [])),
        ("", ("", [])),
    ],
)
def test_llama(answer, expected):
    assert whole("llama3_json", answer) == expected


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("[f()]", ("", [("f", "{}")])),
        (
            "[f(city=\"Paris (F)\", days=3, deep={'a': [1, None, True]}), g.h(x=-1.5)]",
            ("", [("f", '{"city": "Paris (F)", "days": 3, "deep": {"a": [1, null, true]}}'), ("g.h", '{"x": -1.5}')]),
        ),
        (" [ f ( s = 'it\\'s' ) ,\n g(t=(1, 2)) ] \n", ("", [("f", '{"s": "it\'s"}'), ("g", '{"t": [1, 2]}')])),
        ("[f(a=1)] and more", ("and more", [("f", '{"a": 1}')])),
        ("[1] is a source", ("[1] is a source", [])),
        ("f(a=1)", ("f(a=1)", [])),
        ("[f(1)]", ("[f(1)]", [])),
        ("[f(a=b)]", ("[f(a=b)]", [])),
        ("[f(**{'a': 1})]", ("[f(**{'a': 1})]", [])),
        ("[f(a=1e999)]", ("[f(a=1e999)]", [])),
        ("[f(a={1})]", ("[f(a={1})]", [])),
        ("[f(a=__import__('os'))]", ("[f(a=__import__('os'))]", [])),
        ("[f(a=(1]", ("[f(a=(1]", [])),
        ("[f(a=1), g(b=", ("g(b=", [("f", '{"a": 1}')])),
        ("[f(a=1), wait", ("wait", [("f", '{"a": 1}')])),
        ("[f(a='\\d')]", ("", [("f", '{"a": "\\\\d"}')])),
        ("[" + "f" * 200 + "()]", ("[" + "f" * 200 + "()]", [])),
        ("[f(a=" + "[" * 5000 + "]" * 5000 + ")]", ("[f(a=" + "[" * 5000 + "]" * 5000 + ")]", [])),
    ],
)
def test_pythonic(answer, expected):
    text, calls = whole("pythonic", answer)
    assert (text.lstrip(" ,"), calls) == expected


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ('[{"name": "f", "parameters": {"a": 1}}]', [("f", '{"a": 1}')]),
        (
            '[ {"name": "f", "parameters": {}} ,\n{"name": "g", "parameters": {"a": [2]}}]',
            [("f", "{}"), ("g", '{"a": [2]}')],
        ),
        ('[{"name": "f", "parameters": {"a": ', [("f", '{"a": ')]),
        ('[{"name": "f", "pa', []),
    ],
)
def test_required(answer, expected):
    assert whole("required", answer) == ("", expected)


def test_named():
    assert whole("named", '{"a": 1}') == ("", [("f", '{"a": 1}')])


ANSWERS = [
    'I look.\n<tool_call>\n{"name": "f", "arguments": {"a": "\\"}é😀", "b": [1, {"c": null}]}}\n</tool_call>\n'
    '<tool_call>{"arguments": "{}", "name": "g"}</tool_call> bye <tool_call>oops<tool_call>{"name":"h"}',
    '<|python_tag|> {"name": "f", "parameters": {"a": 1.5e3, "b": "x;y"}} ; {"name": "g", "parameters": {}} end',
    '{"name" : "f" , "parameters" : {"q": "a\\\\"} , "x": true}',
    "[f(a='x\\'y', b=[1, 2]), g(), h(c={'k': 'é😀'})] done",
    "[f(a=1), g(b=c)]",
    '[{"name": "f", "parameters": {"a": 1}}, {"name": "g", "parameters": {}}]',
]


@pytest.mark.parametrize("name", PARSERS)
@pytest.mark.parametrize("answer", ANSWERS)
def test_every_single_cut_and_single_characters_give_the_whole(name, answer):
    expected = whole(name, answer)
    assert joined(PARSERS[name](), list(answer)) == expected
    for cut in range(len(answer) + 1):
        assert joined(PARSERS[name](), [answer[:cut], answer[cut:]]) == expected


FRAGMENTS = [
    "<tool_call>", "</tool_call>", "<tool", "{", "}", "[", "]", "(", ")", '"name"', '"arguments"', '"parameters"', ": ",
    ":", ",", '"f"', '"a"', "f", "g(", "a=", "1", "null", "'x'", "\\", '"', " ", "\n", ";", "<|python_tag|>", "é😀",
    '{"name": "f", "arguments": {"a": 1}}', "[f(a=1)", "text",
]  # fmt: skip


@pytest.mark.parametrize("name", PARSERS)
@given(fragments=st.lists(st.sampled_from(FRAGMENTS), max_size=12), seed=st.integers(0, 2**32))
def test_no_cut_changes_what_is_found(name, fragments, seed):
    answer, pieces = "".join(fragments), []
    rest, draw = answer, random.Random(seed)
    while rest:
        size = draw.randint(1, 5)
        pieces, rest = [*pieces, rest[:size]], rest[size:]
    text, calls = whole(name, answer)
    assert joined(PARSERS[name](), pieces) == (text, calls)
    assert all(called for called, _ in calls)


@given(answer=st.text(max_size=40))
@pytest.mark.parametrize("name", ["hermes", "llama3_json", "pythonic"])
def test_text_without_calls_comes_back_as_it_was(name, answer):
    if not any(mark in answer for mark in ("<tool_call>", "{", "[")):
        assert whole(name, answer) == (answer, [])


def test_nested_tags_take_time_in_proportion_to_the_text():
    answer = '<tool_call>{"a": ' * 4_000 + "]"
    text, calls = whole("hermes", answer)
    assert (len(text), calls) == (len(answer), [])


def test_the_schema_of_required_calls_keeps_references_within_each_function():
    tree = {"type": "object", "properties": {"children": {"type": "array", "items": {"$ref": "#"}}}}
    point = {"type": "object", "properties": {"x": {"$ref": "#/$defs/n"}}, "$defs": {"n": {"type": "integer"}}}
    schema = RequiredCalls.schema({"tree": tree, "point": point}, is_parallel=False)
    assert schema["$defs"]["0"]["properties"]["children"]["items"] == {"$ref": "#/$defs/0"}
    assert schema["$defs"]["1"]["properties"]["x"] == {"$ref": "#/$defs/1/$defs/n"}
    assert schema["maxItems"] == 1
    assert "maxItems" not in RequiredCalls.schema({"tree": tree}, is_parallel=True)
    assert json.dumps(tree) == json.dumps(
        {"type": "object", "properties": {"children": {"type": "array", "items": {"$ref": "#"}}}}
    ), "the client's schema is not changed"
