"""/v1/responses through the official client, and its events on the wire."""

import json

import openai
import pytest
from aiohttp.test_utils import TestClient, TestServer

from servers import ServerConfig, create_app

HI = "hi"  # rendered as "user:hi\nassistant:", which the fake engine repeats
RESPONSES = "/v1/responses"


async def test_a_text_is_answered_with_a_message_and_usage(client):
    answer = await client.responses.create(model="fake", input=HI, max_output_tokens=7)
    assert answer.output_text == "user:hi"
    assert (answer.object, answer.status, answer.model) == ("response", "incomplete", "fake")
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert (answer.usage.input_tokens, answer.usage.output_tokens, answer.usage.total_tokens) == (18, 7, 25)
    assert answer.usage.input_tokens_details.cached_tokens == 0
    assert (answer.output[0].role, answer.output[0].status) == ("assistant", "incomplete")


async def test_a_stop_makes_a_response_complete(client):
    answer = await client.responses.create(model="fake", input=HI, extra_body={"stop_token_ids": [ord(":")]})
    assert (answer.status, answer.incomplete_details, answer.error) == ("completed", None, None)
    assert answer.completed_at >= answer.created_at


async def test_the_stream_builds_the_same_response(client):
    events = [
        event async for event in await client.responses.create(model="fake", input=HI, max_output_tokens=7, stream=True)
    ]
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    assert "".join(event.delta for event in events[4:-4]) == events[-4].text == "user:hi"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    final = events[-1].response
    assert (final.output_text, final.usage.total_tokens) == ("user:hi", 25)
    assert final.output[0] == events[-2].item
    assert {event.item_id for event in events[3:-2]} == {final.output[0].id}
    assert (events[0].response.status, events[0].response.output) == ("in_progress", [])


async def test_the_clients_own_stream_helper_understands_the_events(client):
    async with client.responses.stream(model="fake", input=HI, extra_body={"stop_token_ids": [ord(":")]}) as stream:
        async for _ in stream:
            pass
        final = await stream.get_final_response()
    assert final.output_text == "user:"


async def test_instructions_messages_and_calls_become_a_chat(client, fake):
    call = {
        "type": "function_call",
        "call_id": "c1",
        "name": "f",
        "arguments": '{"x": 1}',
        "id": "fc",
        "status": "completed",
    }
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        call,
        call | {"call_id": "c2"},
        {"type": "function_call_output", "call_id": "c1", "output": "one"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "so", "annotations": []}]},
        {"role": "user", "content": "c"},
    ]
    fake.config = type(fake.config)(model="fake", max_model_len=128)
    await client.responses.create(model="fake", instructions="be brief", input=items, max_output_tokens=1)
    (_, messages, adds_prompt, _, _), _ = fake.tokenizer.calls
    assert adds_prompt
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "tool", "assistant", "user"]
    assert [one["id"] for one in messages[2]["tool_calls"]] == ["c1", "c2"]
    assert bytes(fake.added[0][1]).startswith(b"system:be brief\nuser:a\nb\n")


async def test_an_answer_can_be_sent_back(client, fake):
    first = await client.responses.create(model="fake", input=HI, max_output_tokens=4)
    items = [{"role": "user", "content": HI}, *(item.model_dump(exclude_none=True) for item in first.output)]
    await client.responses.create(
        model="fake", input=[*items, {"role": "user", "content": "more"}], max_output_tokens=1
    )
    assert bytes(fake.added[1][1]) == b"user:hi\nassistant:user\nuser:more\nassistant:"


async def test_logprobs_come_when_asked_for(client):
    answer = await client.responses.create(
        model="fake", input=HI, max_output_tokens=2, top_logprobs=2, include=["message.output_text.logprobs"]
    )
    entries = answer.output[0].content[0].logprobs
    assert [entry.token for entry in entries] == ["u", "s"]
    assert len(entries[0].top_logprobs) == 2
    plain = await client.responses.create(model="fake", input=HI, max_output_tokens=2)
    assert plain.output[0].content[0].logprobs == []


async def test_what_was_asked_is_in_the_answer_and_in_the_engine(client, fake):
    answer = await client.responses.create(
        model="fake", input=HI, temperature=0.5, top_p=0.9, metadata={"a": "b"}, store=False, extra_body={"top_k": 3}
    )
    assert (answer.temperature, answer.top_p, answer.metadata, answer.store) == (0.5, 0.9, {"a": "b"}, False)
    params = fake.added[0][2]
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (0.5, 0.9, 3, None)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"store": True}, "store"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"n": 2}, "n"),
        ({"messages": []}, "messages"),
        ({"input": []}, "input"),
        ({"input": None}, "input"),
        ({"input": [5]}, "input"),
        ({"input": [{"role": "wizard", "content": "a"}]}, "messages"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
        ({"input": [{"type": ["message"]}]}, "input"),
        ({"input": [{"type": "reasoning", "content": "so"}]}, "input"),
        ({"input": [{"type": "reasoning", "content": [{"type": "output_text", "text": "so"}]}]}, "input"),
        ({"input": [{"type": "reasoning", "encrypted_content": "x"}]}, "input"),
        ({"reasoning": {"effort": "low"}}, "reasoning"),
        ({"include": ["reasoning.encrypted_content"]}, "include"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input"),
        ({"input": [{"role": "user", "content": 5}]}, "input"),
        ({"input": [{"role": "user", "content": "a", "contents": "b"}]}, "input"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{"}]}, "messages"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"top_logprobs": 21}, "logprobs"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"continuous_usage_stats": True}}, "stream_options"),
    ],
)
async def test_what_is_wrong_or_not_supported_is_named(http, fake, fields, param):
    response = await http.post(RESPONSES, json={"input": HI} | fields)
    error = (await response.json())["error"]
    assert (response.status, error["param"]) == (400, param), error
    assert fake.added == []


async def test_options_of_streams_that_have_no_effect_are_refused_with_those_that_may_be_sent(client):
    """include_usage was taken and did nothing: a response has its usage at the end."""
    with pytest.raises(openai.BadRequestError, match=r'or send \{\} or send \{"include_obfuscation": false\}'):
        await client.responses.create(model="fake", input=HI, stream=True, stream_options={"include_usage": True})
    options = {"include_obfuscation": False}
    stream = await client.responses.create(
        model="fake", input=HI, max_output_tokens=1, stream=True, stream_options=options
    )
    assert [event async for event in stream][-1].response.usage.output_tokens == 1


async def test_a_failure_in_the_stream_is_an_error_event(client, http):
    body = {"input": "ab!", "seed": 666, "stream": True}
    text = await (await http.post(RESPONSES, json=body)).text()
    last = text.removesuffix("\n\n").split("\n\n")[-1]
    assert last.startswith("event: error\ndata: ")
    assert json.loads(last.partition("data: ")[2])["code"] == "500"
    with pytest.raises(openai.APIError, match="not finite"):
        async for _ in await client.responses.create(model="fake", input="ab!", extra_body={"seed": 666}, stream=True):
            pass


async def test_an_aborted_response_is_incomplete(http, fake):
    fake.gate.clear()
    response = await http.post(RESPONSES, json={"input": HI, "stream": True, "request_id": "one"})
    await http.post("/abort", json={"request_id": "resp_one"})
    text = await response.text()
    assert "event: response.incomplete" in text
    assert '"incomplete_details":{"reason":"abort"}' in text


PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "name": "weather", "parameters": PARAMETERS}, {"type": "function", "name": "time"}]
CALLS = 'Hm.<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}<tool_call>{"name": "time"}</tool_call>'


@pytest.fixture
async def ask(fake, engine):
    """Ask a server that looks for reasoning and calls; its engine answers with the text it is given."""
    config = ServerConfig(enable_auto_tool_choice=True, tool_call_parser="hermes", reasoning_parser="qwen3")
    fake.config = type(fake.config)(model="fake", max_model_len=1024)

    async def ask(text, **options):
        fake.tokenizer.render_chat = lambda messages, **kwargs: text
        options = {"max_output_tokens": len(text)} | options
        return await client.responses.create(model="fake", input=HI, **options)

    async with TestClient(TestServer(create_app(engine, config))) as http:
        base_url = str(http.make_url("/v1"))
        async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
            yield ask


async def test_reasoning_text_and_calls_are_items(ask):
    answer = await ask(f"<think>so</think>{CALLS}", tools=TOOLS)
    assert [item.type for item in answer.output] == ["reasoning", "message", "function_call", "function_call"]
    assert answer.output[0].content[0].text == "so"
    assert answer.output_text == "Hm."
    assert [(item.name, item.arguments) for item in answer.output[2:]] == [
        ("weather", '{"city": "Rome"}'),
        ("time", "{}"),
    ]
    assert len({item.call_id for item in answer.output[2:]}) == 2
    assert [item.status for item in answer.output] == ["completed"] * 3 + ["incomplete"]


async def test_reasoning_can_be_sent_back(ask, client, fake):
    """A client that sends the output back, as conversations go, got a 400 for the kind of its first item."""
    said, called = [
        (await ask(f"<think>{text}", tools=TOOLS)).output for text in ("so</think>Hm.", f"but</think>{CALLS[3:]}")
    ]
    assert [item.type for item in (*said, *called)] == ["reasoning", "message", "reasoning", *["function_call"] * 2]
    results = [{"type": "function_call_output", "call_id": call.call_id, "output": "1"} for call in called[1:]]
    rendered = []
    fake.tokenizer.render_chat = lambda messages, **kwargs: rendered.extend(messages) or "x"
    items = [{"role": "user", "content": HI}, *said, {"role": "user", "content": HI}, *called, *results, said[0]]
    await client.responses.create(model="fake", input=items, reasoning={"effort": None}, max_output_tokens=1)
    assert [message.get("reasoning") for message in rendered] == [None, "so", None, "but", None, None]
    assert [message.get("reasoning_content") for message in rendered] == [None, "so", None, "but", None, None]
    assert (rendered[1]["content"][0]["text"], len(rendered[3]["tool_calls"])) == ("Hm.", 2)


async def test_the_events_of_items_build_the_same_response(ask):
    text = f"<think>so</think>{CALLS}"
    events = [event async for event in await ask(text, tools=TOOLS, stream=True)]
    final, whole = events[-1].response, await ask(text, tools=TOOLS)
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert done == final.output
    volatile = {"id", "call_id"}
    assert [item.model_dump(exclude=volatile) for item in final.output] == [
        item.model_dump(exclude=volatile) for item in whole.output
    ]
    added = [event for event in events if event.type == "response.output_item.added"]
    assert [event.output_index for event in added] == [0, 1, 2, 3]
    for item in done:
        deltas = [event.delta for event in events if event.type.endswith(".delta") and event.item_id == item.id]
        content = item.arguments if item.type == "function_call" else item.content[0].text
        assert "".join(deltas) == content
    assert [event.sequence_number for event in events] == list(range(len(events)))


@pytest.mark.parametrize(
    ("text", "options", "spelled"),
    [
        ("<think>hm</think>\nok", {}, ["ok"]),
        ("ok", {}, ["ok"]),
        ("<think>hm", {}, []),
        (f"<think>so</think>{CALLS}", {"tools": TOOLS}, ['Hm.<tool_call>{"name": "weather", "arguments": {']),  # a call
    ],
)
async def test_log_probabilities_are_the_messages_alone(ask, text, options, spelled):
    """Without a stream they were those of the reasoning and the calls, too."""
    answer = await ask(text, top_logprobs=1, **options)
    contents = [item.content[0] for item in answer.output if item.type == "message"]
    assert ["".join(entry.token for entry in content.logprobs) for content in contents] == spelled


async def test_an_answer_with_nothing_to_say_is_an_empty_message(ask):
    events = [event async for event in await ask("<think>", stream=True)]
    (item,) = events[-1].response.output
    assert (item.type, item.content[0].text) == ("message", "")


@pytest.mark.parametrize(
    ("fields", "json"),
    [
        ({"tool_choice": {"type": "function", "name": "weather"}, "tools": TOOLS}, PARAMETERS),
        ({"text": {"format": {"type": "json_schema", "name": "n", "schema": PARAMETERS}}}, PARAMETERS),
        ({"text": {"format": {"type": "json_object"}}}, None),
    ],
)
async def test_forms_reach_the_engine(ask, fake, fields, json):
    await ask("<think></think>", extra_body=fields)
    form = fake.added[0][2].structured_outputs
    assert (form.json, form.json_object) == (json, True if json is None else None)


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools", "only tools of type function"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools", "1 to 64 letters"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "x"}}, "tool_choice", "must be none, auto"),
        (
            {"tools": TOOLS, "tool_choice": "required", "text": {"format": {"type": "json_object"}}},
            "tool_choice",
            "own form",
        ),
        ({"text": {"format": {"type": "xml"}}}, "text", "text.format.type is 'xml'"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text", "JSON schema"),
        ({"text": {"format": 5}}, "text", "an object with a type"),
        ({"text": {"formats": {}}}, "text", "is no field of text"),
        ({"text": {"verbosity": "low"}}, "text", "verbosity"),
    ],
)
async def test_forms_that_make_no_sense_are_named(ask, fake, fields, param, message):
    with pytest.raises(openai.BadRequestError, match=message) as caught:
        await ask("x", extra_body=fields)
    assert caught.value.param == param
    assert fake.added == []
