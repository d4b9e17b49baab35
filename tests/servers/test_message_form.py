"""Tools, reasoning and forms of output over HTTP. The fake engine answers a chat with its prompt, `role:content`."""

import json
import typing
from pathlib import Path

import openai
import pytest
from aiohttp.test_utils import TestClient, TestServer

from pagedjax import ConfigError, InvalidRequestError, StructuredOutputsParams
from pagedjax.async_engine import AsyncEngine
from pagedjax.structured_outputs import KINDS
from pagedjax.text.structured_output import GrammarCompiler
from servers import ServerConfig, create_app
from servers.reasoning import REASONING_PARSERS
from servers.tool_parsers import TOOL_PARSERS
from tests.fakes import byte_tokenizer
from tests.servers.fakes import FakeEngine

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "Of a city.", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "time"}},
]
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>'
OTHER = '<tool_call>{"name": "time", "arguments": {}}</tool_call>'


@pytest.fixture
async def serve():
    """Start servers over a fake engine; `await serve(flags)` gives the engine and the official client."""
    started = []

    async def start(**options):
        fake = FakeEngine(max_model_len=2048)
        engine = AsyncEngine(fake)
        http = TestClient(TestServer(create_app(engine, ServerConfig(**options))))
        await http.start_server()
        client = openai.AsyncOpenAI(base_url=str(http.make_url("/v1")), api_key="none", max_retries=0)
        started.append((engine, http, client))
        return fake, client

    yield start
    for engine, http, client in started:
        await client.close()
        await http.close()
        await engine.shutdown()


def hermes(serve, **options):
    return serve(enable_auto_tool_choice=True, tool_call_parser="hermes", **options)


def chat(client, content, **options):
    """Ask for exactly the content back, after the role that the template writes before it."""
    options = {"max_tokens": len(f"user:{content}".encode()), "temperature": 0} | options
    return client.chat.completions.create(model="fake", messages=[{"role": "user", "content": content}], **options)


async def streamed(client, content, **options):
    """Return content, reasoning, calls and finish reason that the chunks of a stream add up to."""
    content_, reasoning, calls, finish = "", "", [], None
    async for chunk in await chat(client, content, stream=True, **options):
        (choice,) = chunk.choices
        content_ += choice.delta.content or ""
        reasoning += getattr(choice.delta, "reasoning", None) or ""
        for part in choice.delta.tool_calls or []:
            if part.id:
                assert (part.index, part.type) == (len(calls), "function")
                calls.append([part.id, part.function.name, ""])
            calls[part.index][2] += part.function.arguments
        finish = choice.finish_reason or finish
    return content_, reasoning, calls, finish


async def test_calls_are_found_in_a_whole_answer_and_in_a_stream(serve):
    _, client = await hermes(serve)
    text = f"Wait. {CALL}\n{OTHER}"
    (choice,) = (await chat(client, text, tools=TOOLS)).choices
    message = choice.message
    assert message.content == "user:Wait."
    assert [(call.type, call.function.name) for call in message.tool_calls] == [
        ("function", "weather"),
        ("function", "time"),
    ]
    assert json.loads(message.tool_calls[0].function.arguments) == {"city": "Paris"}
    content, _, calls, _ = await streamed(client, text, tools=TOOLS)
    assert content == message.content
    assert [call[1:] for call in calls] == [
        [call.function.name, call.function.arguments] for call in message.tool_calls
    ]
    assert len({call[0] for call in calls} | {call.id for call in message.tool_calls}) == 4


async def test_an_answer_of_calls_alone_has_no_content_and_says_so_when_it_ends(serve):
    fake, client = await hermes(serve)
    fake.tokenizer.render_chat = lambda messages, **kwargs: CALL + "\x00"
    for stop in ([0], None):
        options = {"extra_body": {"stop_token_ids": stop}, "max_tokens": len(CALL) + bool(stop)}
        (choice,) = (await chat(client, "x", tools=TOOLS, **options)).choices
        assert choice.message.content in (None, "\x00")
        _, _, calls, finish = await streamed(client, "x", tools=TOOLS, **options)
        assert finish == choice.finish_reason == ("tool_calls" if stop else "length")
        assert [call[1] for call in calls] == ["weather"]


async def test_a_choice_of_none_leaves_the_text_as_it_is(serve):
    fake, client = await hermes(serve)
    message = (await chat(client, CALL, tools=TOOLS, tool_choice="none")).choices[0].message
    assert (message.content, message.tool_calls) == (f"user:{CALL}", None)
    assert fake.tokenizer.calls[0][-1] == {"tools": TOOLS}, "the template sees them all the same"


async def test_tools_can_be_kept_from_the_template_where_calls_are_forbidden(serve):
    fake, client = await hermes(serve, exclude_tools_when_tool_choice_none=True)
    await chat(client, "a", tools=TOOLS, tool_choice="none")
    await chat(client, "a", tools=TOOLS)
    assert [call[-1] for call in fake.tokenizer.calls if call[0] == "render_chat"] == [{}, {"tools": TOOLS}]


async def test_without_parallel_calls_the_first_one_stands_alone(serve):
    _, client = await hermes(serve)
    options = {"tools": TOOLS, "parallel_tool_calls": False}
    message = (await chat(client, CALL + OTHER, **options)).choices[0].message
    assert [call.function.name for call in message.tool_calls] == ["weather"]
    _, _, calls, _ = await streamed(client, CALL + OTHER, **options)
    assert [call[1:] for call in calls] == [["weather", '{"city": "Paris"}']]


async def test_each_choice_has_its_own_calls(serve):
    _, client = await hermes(serve)
    choices = (await chat(client, CALL, tools=TOOLS, n=2)).choices  # the second one's bytes are one higher: no call
    assert [choice.message.tool_calls is not None for choice in choices] == [True, False]


async def test_a_required_call_is_forced_by_a_schema_and_parsed(serve):
    fake, client = await serve()  # needs no flag
    fake.tokenizer.render_chat = lambda messages, **kwargs: '[{"name": "weather", "parameters": {"city": "Rome"}}]'
    options = {"tools": TOOLS, "tool_choice": "required", "max_tokens": 52}
    message = (await chat(client, "x", **options)).choices[0].message
    assert [(call.function.name, call.function.arguments) for call in message.tool_calls] == [
        ("weather", '{"city": "Rome"}')
    ]
    _, _, calls, _ = await streamed(client, "x", **options)
    assert [call[1:] for call in calls] == [["weather", '{"city": "Rome"}']]
    schema = fake.added[0][2].structured_outputs.json
    assert schema["items"]["anyOf"][0]["properties"]["name"] == {"const": "weather"}
    assert schema["$defs"]["0"] == PARAMETERS
    assert schema["$defs"]["1"] == {"type": "object", "properties": {}}


async def test_a_named_call_is_its_arguments(serve):
    fake, client = await serve()
    fake.tokenizer.render_chat = lambda messages, **kwargs: '{"city": "Oslo"}'
    choice = {"type": "function", "function": {"name": "weather"}}
    options = {"tools": TOOLS, "tool_choice": choice, "max_tokens": 16}
    message = (await chat(client, "x", **options)).choices[0].message
    assert [(call.function.name, call.function.arguments) for call in message.tool_calls] == [
        ("weather", '{"city": "Oslo"}')
    ]
    _, _, calls, _ = await streamed(client, "x", **options)
    assert [call[1:] for call in calls] == [["weather", '{"city": "Oslo"}']]
    assert fake.added[0][2].structured_outputs.json == PARAMETERS


async def test_the_conversation_goes_on_with_calls_and_their_results(serve):
    fake, client = await hermes(serve)
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    messages = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning": "hm"},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]
    await client.chat.completions.create(model="fake", messages=messages, tools=TOOLS, max_tokens=5)
    rendered = fake.tokenizer.calls[0][1]
    assert rendered[1]["tool_calls"] == [call]
    assert rendered[1]["reasoning_content"] == "hm"
    assert rendered[2] == messages[2]


@pytest.fixture(scope="module")
def compiled():
    return GrammarCompiler(byte_tokenizer(), vocab_size=263, eos_token_ids=frozenset([256]))


def follows(compiled, form, text):
    """Whether the form admits the text, as a whole."""
    grammar, token_ids = compiled.start(form), byte_tokenizer().encode(text)
    for token_id in [*token_ids, 256]:
        if not compiled.masks([grammar])[0][token_id // 32] >> (token_id % 32) & 1:
            return False
        grammar.accept(token_id)
    return True


STRICT = [{"type": "function", "function": TOOLS[0]["function"] | {"strict": True}}, TOOLS[1]]
SCHEMA = {"type": "object", "properties": {"answer": {"type": "integer"}}, "required": ["answer"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
WRONG = '<tool_call>{"name": "weather", "arguments": {"city": 5}}</tool_call>'
LLAMA_CALL = '{"name": "weather", "parameters": {"city": "Rome"}}'


@pytest.mark.parametrize(
    ("parser", "options", "admitted", "refused"),
    [
        ("hermes", {"tools": STRICT}, ["", "Hm < 5.", CALL, f"a {CALL}\n{OTHER} b <tool"], [WRONG, "<tool_call>x"]),
        ("hermes", {"tools": STRICT, "parallel_tool_calls": False}, [f"a {CALL}"], [WRONG]),
        (
            "hermes",
            {"tools": TOOLS, "response_format": FORMAT},
            ['{"answer": 5}', CALL, f"{CALL}\n{OTHER}", WRONG],
            ["text", "", '{"answer": "x"}', '{"answer": 5}' + CALL],
        ),
        (
            "hermes",
            {"tools": STRICT, "response_format": {"type": "json_object"}, "parallel_tool_calls": False},
            ["{}", CALL],
            [WRONG, CALL + OTHER],
        ),
        (
            "llama3_json",
            {"tools": STRICT},
            ["", "text {}", LLAMA_CALL, f"{LLAMA_CALL}; {LLAMA_CALL}"],
            ['{"name": "weather", "parameters": {"city": 5}}', '{"answer": 5}'],
        ),
        (
            "llama3_json",
            {"tools": STRICT, "response_format": FORMAT, "parallel_tool_calls": False},
            ['{"answer": 5}', LLAMA_CALL],
            ["text", f"{LLAMA_CALL}; {LLAMA_CALL}", '{"name": "weather", "parameters": {"city": 5}}'],
        ),
    ],
)
async def test_strict_tools_and_forms_of_content_stand_side_by_side(
    serve, compiled, parser, options, admitted, refused
):
    fake, client = await serve(enable_auto_tool_choice=True, tool_call_parser=parser)
    await chat(client, "x", **options)
    form = fake.added[0][2].structured_outputs
    assert [text for text in admitted if not follows(compiled, form, text)] == []
    assert [text for text in refused if follows(compiled, form, text)] == []


async def test_what_a_parser_cannot_join_is_refused(serve):
    _, client = await serve(enable_auto_tool_choice=True, tool_call_parser="pythonic")
    with pytest.raises(openai.BadRequestError, match="pythonic knows no strict tools"):
        await chat(client, "x", tools=STRICT)
    _, client = await hermes(serve)
    for form in ({"regex": "a"}, {"json": {}, "disable_any_whitespace": True}):
        with pytest.raises(openai.BadRequestError, match="no place for calls"):
            await chat(client, "x", tools=TOOLS, extra_body={"structured_outputs": form})


async def test_errors_name_the_field_that_the_client_sent(serve):
    fake, client = await serve()

    def refuse(sampling_params):
        raise InvalidRequestError("structured_outputs.json cannot be used: why", param="structured_outputs")

    fake.prepare = refuse
    required = {"tools": TOOLS, "tool_choice": "required"}
    for field, body in (("response_format", {"response_format": FORMAT}), ("tools", required)):
        with pytest.raises(openai.BadRequestError, match=f"{field} cannot be used: why") as caught:
            await chat(client, "x", extra_body=body)
        assert caught.value.param == field
    with pytest.raises(openai.BadRequestError, match="response_format cannot be used"):
        await client.completions.create(model="fake", prompt="x", extra_body={"response_format": FORMAT})


@pytest.mark.parametrize("parser", ["deepseek_r1", "qwen3"])
async def test_reasoning_is_apart_from_content(serve, parser):
    fake, client = await serve(reasoning_parser=parser)
    fake.tokenizer.render_chat = lambda messages, **kwargs: "<think>\nhm </think>\nyes"
    message = (await chat(client, "x", max_tokens=23)).choices[0].message
    assert (message.reasoning, message.content) == ("hm", "yes")
    content, reasoning, _, _ = await streamed(client, "x", max_tokens=23)
    assert (reasoning, content) == ("hm", "yes")
    cut = (await chat(client, "x", max_tokens=10)).choices[0].message
    assert (cut.reasoning, cut.content) == ("hm", None)


async def test_calls_are_looked_for_after_the_reasoning_alone(serve):
    fake, client = await hermes(serve, reasoning_parser="qwen3")
    text = f"<think>{OTHER}?</think>{CALL}"
    fake.tokenizer.render_chat = lambda messages, **kwargs: text
    message = (await chat(client, "x", tools=TOOLS, max_tokens=len(text))).choices[0].message
    assert message.reasoning == f"{OTHER}?"
    assert [call.function.name for call in message.tool_calls] == ["weather"]
    content, reasoning, calls, _ = await streamed(client, "x", tools=TOOLS, max_tokens=len(text))
    assert (content, reasoning, [call[1] for call in calls]) == ("", message.reasoning, ["weather"])


@pytest.mark.parametrize(
    ("prompt", "is_open"), [("ask<think>\n", True), ("ask", False), ("ask<think>\n\n</think>\n\n", None)]
)
async def test_a_form_holds_from_the_end_of_reasoning_on(serve, prompt, is_open):
    fake, client = await serve(reasoning_parser="qwen3")
    fake.tokenizer.render_chat = lambda messages, **kwargs: prompt
    await chat(client, "x", response_format={"type": "json_object"})
    reasoning = fake.added[0][2].structured_outputs.reasoning
    assert (None if reasoning is None else reasoning.is_open) == is_open


@pytest.mark.parametrize(("side", "length", "is_open"), [("left", 9, True), ("right", 9, False), ("right", 99, True)])
async def test_reasoning_that_the_end_of_a_prompt_opens_is_known_unless_that_is_cut_off(serve, side, length, is_open):
    """The end of every truncated prompt was forgotten, and what the model thought became the content."""
    fake, client = await serve(reasoning_parser="qwen3")
    fake.tokenizer.render_chat = lambda messages, **kwargs: "ask something<think>\n"
    truncated = {"truncate_prompt_tokens": length, "truncation_side": side}
    await chat(client, "x", response_format={"type": "json_object"}, extra_body=truncated)
    assert fake.added[0][2].structured_outputs.reasoning.is_open == is_open


@pytest.mark.parametrize(
    ("body", "form"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": PARAMETERS}}},
            {"json": PARAMETERS},
        ),
        ({"structured_outputs": {"regex": "a+"}}, {"regex": "a+"}),
        ({"structured_outputs": {"choice": ["a", "b"], "json": None}}, {"choice": ["a", "b"]}),
        ({"structured_outputs": {"grammar": 'root ::= "a"'}}, {"grammar": 'root ::= "a"'}),
        (
            {"structured_outputs": {"json": PARAMETERS, "disable_any_whitespace": True}},
            {"json": PARAMETERS, "disable_any_whitespace": True},
        ),
    ],
)
async def test_forms_reach_the_engine_from_both_endpoints(serve, body, form):
    fake, client = await serve()
    expected = None if form is None else StructuredOutputsParams(**form)
    await client.completions.create(model="fake", prompt="a", max_tokens=1, extra_body=body)
    await chat(client, "a", extra_body=body)
    assert [params.structured_outputs for _, _, params, _, _ in fake.added] == [expected] * 2


def tool(**function):
    return {"type": "function", "function": {"name": "f"} | function}


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"tools": TOOLS}, "tool_choice", "--enable-auto-tool-choice"),
        ({"tools": TOOLS, "tool_choice": "auto"}, "tool_choice", "--enable-auto-tool-choice"),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice", "none, auto, required"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice", "one of"),
        ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
        ({"tools": "weather"}, "tools", "an array"),
        ({"tools": [1]}, "tools", "tools[0] is 1"),
        ({"tools": [{"type": "function"}]}, "tools", "must be"),
        ({"tools": [{"type": "mcp", "function": {"name": "f"}}]}, "tools", "must be"),
        ({"tools": [tool(name="")]}, "tools", "1 to 64 letters"),
        ({"tools": [tool(name="a b")]}, "tools", "1 to 64 letters"),
        ({"tools": [tool(parameters=[])]}, "tools", "a JSON schema"),
        ({"tools": [tool(strict="yes")]}, "tools", "true or false"),
        ({"tools": [tool(arguments={})]}, "tools", "is no field of tools[0].function"),
        ({"tools": [tool() | {"x": 1}]}, "tools", "is no field of tools[0]"),
        ({"tools": [tool(), tool()]}, "tools", "twice"),
        ({"tools": [tool()] * 129}, "tools", "the limit is 128"),
        ({"tools": TOOLS, "tool_choice": "none", "parallel_tool_calls": 1}, "parallel_tool_calls", "true or false"),
        (
            {"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}},
            "tool_choice",
            "leave out response_format",
        ),
        ({"response_format": "json"}, "response_format", "an object"),
        ({"response_format": {}}, "response_format", "text, json_object, json_schema"),
        ({"response_format": {"type": "structural_tag"}}, "response_format", "text, json_object, json_schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "name and schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}}, "response_format", "JSON schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"shema": {}}}},
            "response_format",
            "did you mean 'schema'?",
        ),
        ({"response_format": {"type": "json_object", "schema": {}}}, "response_format", "is no field"),
        ({"structured_outputs": []}, "structured_outputs", "an object"),
        ({"structured_outputs": {}}, "structured_outputs", "exactly one of"),
        ({"structured_outputs": {"regexp": "a"}}, "structured_outputs", "did you mean 'regex'?"),
        ({"structured_outputs": {"reasoning": {}, "regex": "a"}}, "structured_outputs", "is no field"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs", "is no field"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs", "cannot be used"),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "structured_outputs",
            "leave one out",
        ),
    ],
)
async def test_what_makes_no_sense_is_refused_before_queueing(serve, body, param, message):
    fake, client = await serve()
    with pytest.raises(openai.BadRequestError) as caught:
        await chat(client, "a", extra_body=body)
    assert caught.value.param == param
    assert message in caught.value.message
    assert fake.added == []


@pytest.mark.parametrize(("flag", "parsers"), [("tool_call", TOOL_PARSERS), ("reasoning", REASONING_PARSERS)])
def test_the_flags_choose_among_the_parsers_there_are(flag, parsers):
    hint = typing.get_type_hints(ServerConfig)[f"{flag}_parser"]
    assert set(typing.get_args(typing.get_args(hint)[0])) == set(parsers)


def test_the_page_of_forms_names_every_kind_and_parser():
    page = (Path(__file__).parents[2] / "docs" / "structured_output.md").read_text(encoding="utf-8")
    for name in (*KINDS, *TOOL_PARSERS, *REASONING_PARSERS):
        assert f"`{name}`" in page or f" {name}`" in page, name


def test_looking_for_calls_needs_a_parser():
    with pytest.raises(ConfigError, match="--tool-call-parser"):
        ServerConfig(enable_auto_tool_choice=True)
    with pytest.raises(ConfigError, match="choose one of"):
        ServerConfig(tool_call_parser="mistral")
