"""Structured output and forced tool calls with the embedded model, through the server and the official client."""

import asyncio
import json
import re

import jsonschema
import openai
import pytest
from aiohttp.test_utils import TestClient, TestServer

from pagedjax import AsyncEngine, EngineConfig, LLMEngine
from servers import ServerConfig, create_app
from tests import demo

pytestmark = pytest.mark.slow

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "likes": {"type": "array", "items": {"enum": ["tea", "coffee", "milk"]}, "minItems": 1, "maxItems": 2},
    },
    "required": ["name", "age", "likes"],
    "additionalProperties": False,
}
WEATHER = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER | {"additionalProperties": False}}}
]
MESSAGES = [{"role": "user", "content": "Describe a person who lives in Paris and asks for the weather."}]
SCHEMA = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}


@pytest.fixture(scope="module")
def answers():
    """Everything asked at once of one server: forms of every kind beside plain requests."""
    return asyncio.run(ask_everything())


async def ask_everything():
    with demo.compiling_once():
        engine = AsyncEngine(LLMEngine(EngineConfig(**demo.OPTIONS)))
    try:
        async with TestClient(TestServer(create_app(engine, ServerConfig()))) as http:
            base_url = str(http.make_url("/v1"))
            async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
                return await ask(client) | {"stats": engine.stats()}
    finally:
        await engine.shutdown()


async def ask(client):
    def chat(**options):
        options = {"temperature": 1.0, "max_tokens": 100} | options
        return client.chat.completions.create(model="demo", messages=MESSAGES, **options)

    async def stream(**options):
        return [chunk async for chunk in await chat(stream=True, **options)]

    def plain():
        return chat(temperature=0, max_tokens=16)

    alone = await plain()
    tools = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    named = {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "get_weather"}}}
    asked = {
        "plain": plain(),
        "date": chat(extra_body={"structured_outputs": {"regex": "[0-9]{4}-[01][0-9]"}}),
        "choice": chat(extra_body={"structured_outputs": {"choice": ["sunny", "rainy"]}}),
        "grammar": chat(extra_body={"structured_outputs": {"grammar": 'root ::= "x" ("," "y")* "."'}}, seed=1),
        "named": chat(**named),
        "schema stream": stream(response_format=SCHEMA, seed=9),
        "schema whole": chat(response_format=SCHEMA, seed=9),
        "required stream": stream(**tools, seed=3),
        "required whole": chat(**tools, seed=3),
    }
    asked |= {f"schema {i}": chat(response_format=SCHEMA, seed=i) for i in range(3)}
    found = dict(zip(asked, await asyncio.gather(*asked.values()), strict=True))
    return found | {"alone": alone}


def content(answer):
    return answer.choices[0].message.content


def test_outputs_of_a_schema_parse_and_validate(answers):
    for i in range(3):
        assert answers[f"schema {i}"].choices[0].finish_reason == "stop"
        jsonschema.validate(json.loads(content(answers[f"schema {i}"])), PERSON)


def test_the_other_kinds_have_their_form(answers):
    assert re.fullmatch("[0-9]{4}-[01][0-9]", content(answers["date"]))
    assert content(answers["choice"]) in ("sunny", "rainy")
    assert re.fullmatch(r"x(,y)*\.?", content(answers["grammar"]))


def test_forced_calls_have_arguments_of_their_schema(answers):
    for name in ("named", "required whole"):
        (choice,) = answers[name].choices
        (call,) = choice.message.tool_calls
        assert call.function.name == "get_weather"
        jsonschema.validate(json.loads(call.function.arguments), WEATHER)
        assert choice.finish_reason == ("stop" if name == "named" else "tool_calls")


def test_what_streams_adds_up_to_the_whole(answers):
    text = "".join(chunk.choices[0].delta.content or "" for chunk in answers["schema stream"])
    assert text == content(answers["schema whole"])
    parts = [part for chunk in answers["required stream"] for part in chunk.choices[0].delta.tool_calls or []]
    (call,) = answers["required whole"].choices[0].message.tool_calls
    assert [part.function.name for part in parts if part.id] == [call.function.name]
    assert "".join(part.function.arguments for part in parts) == call.function.arguments


def test_a_plain_request_beside_them_answers_as_it_does_alone(answers):
    assert content(answers["plain"]) == content(answers["alone"])


def test_nothing_was_compiled_after_the_start(answers):
    assert answers["stats"]["num_compilations_after_ready"] == 0
