"""The stream on the wire, and what becomes of clients that leave and of engines that die."""

import asyncio
import json

import pytest

from servers.streaming import TextTemplates, json_answer, large_json_answer, to_json

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "hi"}]
ENDLESS = 10**6  # more tokens than max_model_len allows; the tests hold the engine back


async def read_events(response):
    text = (await response.read()).decode()
    assert text.endswith("\n\n")
    events = text.removesuffix("\n\n").split("\n\n")
    assert all(event.startswith("data: ") for event in events)
    return [event.removeprefix("data: ") for event in events]


async def test_the_stream_is_events_that_end_with_done(http):
    response = await http.post(COMPLETIONS, json={"prompt": "a\né", "max_tokens": 4, "stream": True})
    assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
    assert response.headers["Cache-Control"] == "no-cache"
    events = await read_events(response)
    assert events[-1] == "[DONE]"
    assert all(json.loads(event)["object"] == "text_completion" for event in events[:-1])


async def test_chunks_are_compact_json(http):
    response = await http.post(COMPLETIONS, json={"prompt": "ab", "max_tokens": 1, "stream": True})
    (event, _) = await read_events(response)
    assert event == json.dumps(json.loads(event), separators=(",", ":"))


async def test_the_role_comes_before_the_first_token(http, fake):
    fake.gate.clear()
    response = await http.post(CHAT, json={"messages": HI, "max_tokens": 2, "stream": True})
    line = await response.content.readline()
    assert json.loads(line.removeprefix(b"data: "))["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    fake.gate.set()
    assert (await response.read()).endswith(b"data: [DONE]\n\n")


async def test_tokens_without_text_make_no_chunk(http, fake):
    fake.step_seconds = 0.005  # so that no deltas are joined
    prompt = [97, 258, 258, 98]  # 258 has no text
    response = await http.post(COMPLETIONS, json={"prompt": prompt, "max_tokens": 4, "stream": True})
    events = await read_events(response)
    assert all(json.loads(event)["choices"][0]["text"] for event in events[:-1])


async def test_continuous_usage_counts_up_on_every_chunk(http, fake):
    fake.step_seconds = 0.005
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"messages": HI, "max_tokens": 3, "stream": True, "stream_options": options}
    events = [json.loads(event) for event in (await read_events(await http.post(CHAT, json=body)))[:-1]]
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert (counts[0], counts[-1]) == (0, 3)
    assert counts == sorted(counts)


async def test_a_client_that_leaves_a_stream_aborts_its_request(http, fake):
    fake.gate.clear()
    response = await http.post(CHAT, json={"messages": HI, "stream": True})
    await response.content.readline()
    response.close()
    await fake.until(lambda: fake.aborted)
    assert len(fake.aborted) == 1


async def test_a_client_that_leaves_between_tokens_aborts_its_request(http, fake):
    fake.config = type(fake.config)(model="fake", max_model_len=10**9)
    fake.step_seconds = 0.002
    response = await http.post(COMPLETIONS, json={"prompt": "a", "max_tokens": ENDLESS, "stream": True})
    for _ in range(6):
        await response.content.readline()
    response.close()
    await fake.until(lambda: fake.aborted)
    assert len(fake.aborted) == 1


@pytest.mark.parametrize("body", [{"prompt": "a"}, {"prompt": ["a", "b", "c"]}])
async def test_a_client_that_leaves_without_streaming_aborts_all_its_requests(http, fake, body):
    fake.gate.clear()
    task = asyncio.create_task(http.post(COMPLETIONS, json=body))
    num_prompts = len(body["prompt"])
    await fake.until(lambda: len(fake.added) == num_prompts)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await fake.until(lambda: len(fake.aborted) == num_prompts)
    assert sorted(fake.aborted) == sorted(added[0] for added in fake.added)


async def test_a_client_that_leaves_a_stream_of_several_prompts_aborts_them_all(http, fake):
    fake.gate.clear()
    fake.step_seconds = 0.001
    response = await http.post(COMPLETIONS, json={"prompt": ["a", "b"], "stream": True, "echo": True})
    response.close()
    await fake.until(lambda: len(fake.aborted) == 2)
    assert len(set(fake.aborted)) == 2


@pytest.mark.parametrize("prompt", ["ab!", ["cd", "ab!", "ef"]])
async def test_a_failing_request_is_a_500(http, prompt):
    body = {"prompt": prompt, "seed": 666, "max_tokens": 50}
    response = await http.post(COMPLETIONS, json=body)
    assert response.status == 500
    assert "not finite" in (await response.json())["error"]["message"]


@pytest.mark.parametrize("prompt", ["ab!", ["ab!", "cd"]])
async def test_a_failure_in_the_stream_is_an_event_before_done(http, prompt):
    body = {"prompt": prompt, "seed": 666, "stream": True}
    response = await http.post(COMPLETIONS, json=body)
    assert response.status == 200
    events = await read_events(response)
    assert events[-1] == "[DONE]"
    error = json.loads(events[-2])["error"]
    assert (error["code"], error["type"]) == (500, "InternalServerError")
    assert "not finite" in error["message"]


async def test_an_engine_that_dies_fails_the_stream_and_then_the_health_check(http, fake):
    assert (await http.get("/health")).status == 200
    fake.gate.clear()
    response = await http.post(CHAT, json={"messages": HI, "stream": True})
    await response.content.readline()
    fake.error = RuntimeError("device lost")
    text = (await response.read()).decode()
    assert '"code":500' in text
    assert text.endswith("data: [DONE]\n\n")
    assert "device lost" not in text
    for path in ("/health", "/ping"):
        assert (await http.get(path)).status == 503
    late = await http.post(CHAT, json={"messages": HI})
    assert late.status == 500
    assert "engine has stopped" in (await late.json())["error"]["message"]


async def test_an_engine_that_dies_fails_waiting_requests(http, fake):
    fake.gate.clear()
    task = asyncio.create_task(http.post(COMPLETIONS, json={"prompt": ["a", "b"]}))
    await fake.until(lambda: len(fake.added) == 2)
    fake.error = RuntimeError("device lost")
    assert (await task).status == 500


def test_a_template_gives_what_encoding_the_whole_would():
    def build(index, text):
        return {"id": "x", "choices": [{"index": index, "delta": {"content": text}, "finish_reason": None}]}

    templates = TextTemplates(build)
    for index, text in [(0, "a"), (1, 'quote " and \\ and \n'), (0, "é\u2028\x00😀"), (1, "")]:
        assert templates.fill(index, text) == to_json(build(index, text))


def test_a_large_answer_is_the_same_answer():
    value = {"a": [{"b": "é\n", "c": [1.5, None, True]}], "d": {}}
    assert (large_json_answer(value).text, large_json_answer(value).headers) == (
        json_answer(value).text,
        json_answer(value).headers,
    )
