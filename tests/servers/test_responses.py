"""/v1/responses through the official client, and its events on the wire."""

import json

import openai
import pytest

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
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input"),
        ({"input": [{"role": "user", "content": 5}]}, "input"),
        ({"input": [{"role": "user", "content": "a", "contents": "b"}]}, "input"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{"}]}, "messages"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"top_logprobs": 21}, "logprobs"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
    ],
)
async def test_what_is_wrong_or_not_supported_is_named(http, fake, fields, param):
    response = await http.post(RESPONSES, json={"input": HI} | fields)
    error = (await response.json())["error"]
    assert (response.status, error["param"]) == (400, param), error
    assert fake.added == []


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
