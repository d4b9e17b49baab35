"""Fields that shape prompts and answers, over both endpoints that generate."""

import asyncio
import json
import re

import pytest
from aiohttp.test_utils import TestClient, TestServer

from servers import ServerConfig, create_app
from tests.fakes import byte_tokenizer

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "hi"}]
IDS = list(b"user:hi\nassistant:")


async def ask(http, path, **body):
    response = await http.post(path, json=body)
    assert response.status == 200, await response.text()
    return await response.json()


async def stream(http, path, **body):
    response = await http.post(path, json=body | {"stream": True})
    events = (await response.text()).removesuffix("\n\n").split("\n\n")
    assert events[-1] == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events[:-1]]


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({"truncate_prompt_tokens": 3}, "nop"),
        ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, "abc"),
        ({"truncate_prompt_tokens": 50}, "abcdefghijklmnop"),
        ({"truncate_prompt_tokens": -1, "max_tokens": 60}, "mnop"),
    ],
)
@pytest.mark.parametrize("prompt", ["abcdefghijklmnop", list(b"abcdefghijklmnop")])
async def test_truncation_keeps_the_end_or_the_start(http, fake, prompt, given, kept):
    await ask(http, COMPLETIONS, **{"prompt": prompt, "max_tokens": 1, **given})
    assert fake.added[0][1] == list(kept.encode())


async def test_truncation_makes_prompts_fit_that_are_too_long(http, fake):
    answer = await ask(http, COMPLETIONS, prompt=[97] * 1000, truncate_prompt_tokens=10, max_tokens=2)
    assert answer["usage"]["prompt_tokens"] == len(fake.added[0][1]) == 10


async def test_a_chat_is_truncated_after_its_template(http, fake):
    await ask(http, CHAT, messages=HI, max_tokens=1, truncate_prompt_tokens=10)
    assert fake.added[0][1] == list(b"assistant:")


async def test_the_echo_of_a_truncated_prompt_is_what_was_kept(http):
    answer = await ask(http, COMPLETIONS, prompt="abcdef", max_tokens=2, truncate_prompt_tokens=2, echo=True)
    assert answer["choices"][0]["text"] == "efef"


async def test_completions_return_token_ids_of_prompts_and_answers(http):
    answer = await ask(http, COMPLETIONS, prompt=["ab", "cd"], max_tokens=3, return_token_ids=True)
    ids = [(choice["prompt_token_ids"], choice["token_ids"]) for choice in answer["choices"]]
    assert ids == [([97, 98], [97, 98, 97]), ([99, 100], [99, 100, 99])]


async def test_streamed_token_ids_add_up_even_where_they_have_no_text(http):
    prompt = [97, 258, 98]
    chunks = await stream(http, COMPLETIONS, prompt=prompt, max_tokens=5, return_token_ids=True)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert choices[0]["prompt_token_ids"] == prompt
    assert all(choice["prompt_token_ids"] is None for choice in choices[1:])
    assert [one for choice in choices for one in choice["token_ids"]] == [97, 2, 98, 97, 2]


async def test_chats_return_token_ids_of_prompts_and_answers(http):
    answer = await ask(http, CHAT, messages=HI, max_tokens=3, return_token_ids=True)
    assert answer["prompt_token_ids"] == IDS
    assert answer["choices"][0]["token_ids"] == IDS[:3]
    chunks = await stream(http, CHAT, messages=HI, max_tokens=3, return_token_ids=True)
    assert chunks[0]["prompt_token_ids"] == IDS
    assert [one for chunk in chunks for one in chunk["choices"][0]["token_ids"]] == IDS[:3]


async def test_token_ids_stay_out_of_answers_that_did_not_ask(http):
    for path, prompt in ((CHAT, {"messages": HI}), (COMPLETIONS, {"prompt": "a"})):
        assert "token_ids" not in json.dumps(await ask(http, path, max_tokens=2, **prompt))


async def test_tokens_can_be_named_by_id(http):
    answer = await ask(
        http, COMPLETIONS, prompt="ab", max_tokens=2, logprobs=1, echo=True, return_tokens_as_token_ids=True
    )
    logprobs = answer["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["token_id:97", "token_id:98", "token_id:97", "token_id:98"]
    assert logprobs["text_offset"] == [0, 1, 2, 3]
    assert logprobs["top_logprobs"][2] == {"token_id:97": -1.0, "token_id:98": -0.5}
    answer = await ask(
        http, CHAT, messages=HI, max_tokens=1, logprobs=True, top_logprobs=1, return_tokens_as_token_ids=True
    )
    (entry,) = answer["choices"][0]["logprobs"]["content"]
    assert (entry["token"], entry["bytes"]) == ("token_id:117", [117])
    assert entry["top_logprobs"][0]["token"] == "token_id:118"


async def test_echo_in_a_chat_repeats_the_message_that_is_continued(http):
    messages = [*HI, {"role": "assistant", "content": [{"type": "text", "text": "well"}]}]
    body = {"messages": messages, "continue_final_message": True, "echo": True, "max_tokens": 4}
    answer = await ask(http, CHAT, **body)
    assert answer["choices"][0]["message"]["content"] == "welluser"
    chunks = await stream(http, CHAT, **body)
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks) == "welluser"


async def test_echo_of_a_users_message_is_nothing(http):
    answer = await ask(http, CHAT, messages=HI, echo=True, max_tokens=4)
    assert answer["choices"][0]["message"]["content"] == "user"


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": []}])
async def test_echo_of_a_message_without_content_is_nothing(http, content):
    """It was a 500: an assistant's message may hold nothing but calls."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [*HI, {"role": "assistant", "tool_calls": [call], **content}]
    answer = await ask(http, CHAT, messages=messages, echo=True, max_tokens=4)
    assert answer["choices"][0]["message"]["content"] == "user"


async def test_a_request_has_the_id_that_its_client_gave_it(http):
    assert (await ask(http, COMPLETIONS, prompt="a", request_id="mine.1"))["id"] == "cmpl-mine.1"
    answer = await http.post(CHAT, json={"messages": HI}, headers={"X-Request-Id": "theirs"})
    assert (await answer.json())["id"] == "chatcmpl-theirs"


async def test_an_id_that_is_in_use_is_refused_until_it_is_free(http, fake):
    fake.gate.clear()
    body = {"prompt": "ab", "request_id": "same", "stream": True, "max_tokens": 2}
    first = await http.post(COMPLETIONS, json=body)
    second = await http.post(COMPLETIONS, json=body)
    assert second.status == 400
    assert (await second.json())["error"]["param"] == "request_id"
    fake.gate.set()
    assert "[DONE]" in await first.text()
    assert (await http.post(COMPLETIONS, json=body)).status == 200


@pytest.mark.parametrize("given", ["Root=1-6789-x", "host/7Yx-000001", "", "y" * 129])
async def test_a_header_that_is_no_id_leaves_the_request_with_a_new_one(http, given):
    """Proxies write it in forms of their own: good requests were refused for a request_id that they did not hold."""
    answer = await http.post(CHAT, json={"messages": HI, "max_tokens": 1}, headers={"X-Request-Id": given})
    assert answer.status == 200
    assert re.fullmatch(r"chatcmpl-[0-9a-f]{32}", (await answer.json())["id"])


async def test_requests_under_one_header_at_once_have_ids_of_their_own(http, fake):
    """A proxy that tried again, or numbered a batch alike, had its second request refused."""
    fake.gate.clear()
    asked = [
        asyncio.create_task(http.post(CHAT, json={"messages": HI, "max_tokens": 1}, headers={"X-Request-Id": "theirs"}))
        for _ in range(3)
    ]
    await fake.until(lambda: len(fake.added) == 3)
    fake.gate.set()
    ids = [(await (await one).json())["id"] for one in asked]
    assert len(set(ids)) == 3
    assert "chatcmpl-theirs" in ids


async def test_an_id_of_the_body_is_taken_by_its_word_even_where_a_header_is_there(http):
    body, headers = {"prompt": "a", "max_tokens": 1}, {"X-Request-Id": "theirs"}
    answer = await http.post(COMPLETIONS, json=body | {"request_id": "mine"}, headers=headers)
    assert (await answer.json())["id"] == "cmpl-mine"
    refused = await http.post(COMPLETIONS, json=body | {"request_id": "not mine"}, headers=headers)
    assert (refused.status, (await refused.json())["error"]["param"]) == (400, "request_id")


async def test_ids_of_clients_never_meet_in_the_engine(http, fake):
    """A request "a" with two prompts once took the engine's id of a client's request "a-0"."""
    fake.gate.clear()
    first = await http.post(COMPLETIONS, json={"prompt": "x", "request_id": "a-0", "stream": True, "max_tokens": 1})
    second = await http.post(
        COMPLETIONS, json={"prompt": ["x", "y"], "request_id": "a", "stream": True, "max_tokens": 1}
    )
    fake.gate.set()
    assert ([first.status, second.status], len({added[0] for added in fake.added})) == ([200, 200], 3)
    assert "[DONE]" in await first.text() + await second.text()


async def test_tokenize_and_detokenize_are_inverses(http, fake):
    answer = await ask(http, "/tokenize", prompt="héllo")
    assert answer == {"count": 6, "max_model_len": 64, "tokens": list("héllo".encode()), "token_strs": None}
    assert fake.tokenizer.calls == [("encode", "héllo", True)]
    assert await ask(http, "/detokenize", tokens=answer["tokens"]) == {"prompt": "héllo"}


async def test_tokenize_renders_chats_and_spells_tokens(http, fake):
    answer = await ask(
        http, "/tokenize", messages=HI, return_token_strs=True, chat_template_kwargs={"x": 1}, add_special_tokens=False
    )
    assert answer["tokens"] == IDS
    assert "".join(answer["token_strs"]) == "user:hi\nassistant:"
    assert fake.tokenizer.calls[0][-1] == {"x": 1}


async def test_tokenize_renders_a_chat_with_its_tools(http, fake):
    tools = [{"type": "function", "function": {"name": "f"}}]
    await ask(http, "/tokenize", messages=HI, tools=tools)
    assert fake.tokenizer.calls[0][-1] == {"tools": tools}


async def test_load_counts_the_requests_in_work(http, fake):
    assert await (await http.get("/load")).json() == {"server_load": 0}
    fake.gate.clear()
    response = await http.post(COMPLETIONS, json={"prompt": ["a", "b"], "stream": True, "max_tokens": 2})
    assert await (await http.get("/load")).json() == {"server_load": 1}
    fake.gate.set()
    await response.text()
    assert await (await http.get("/load")).json() == {"server_load": 0}


@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
async def test_a_trusting_server_takes_templates(engine, fake, path):
    fake.tokenizer.hf = byte_tokenizer().hf
    config = ServerConfig(trust_request_chat_template=True)
    async with TestClient(TestServer(create_app(engine, config))) as client:
        body = {"messages": HI, "chat_template": "{{ messages[0].content }}?"}
        answer = await ask(client, path, **body)
        refused = await client.post(path, json=body | {"chat_template": "{{ messages.x.y }}"})
    if path == CHAT:
        assert fake.added[0][1] == list(b"hi?")
    else:
        assert answer["tokens"] == list(b"hi?")
    assert refused.status == 400


async def test_profiling_is_off_unless_a_directory_is_named(http):
    for path in ("/start_profile", "/stop_profile"):
        response = await http.post(path)
        assert response.status == 404
        assert "--profile-dir" in (await response.json())["error"]["message"]


async def test_a_trace_is_written_where_the_operator_says(engine, tmp_path):
    async with TestClient(TestServer(create_app(engine, ServerConfig(profile_dir=str(tmp_path))))) as client:
        assert (await client.post("/stop_profile")).status == 400
        assert (await client.post("/start_profile")).status == 200
        assert (await client.post("/start_profile")).status == 400
        assert (await client.post("/stop_profile")).status == 200
    assert list(tmp_path.rglob("*.xplane.pb"))


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_a_beam_search_is_asked_for_in_vllms_words(fake, engine, path):
    """The model's own defaults for sampling do not get in its way."""
    engine.default_sampling_params.update(temperature=0.6, top_p=0.9, top_k=20, repetition_penalty=1.1)
    prompt = {"messages": HI} if path == CHAT else {"prompt": "ab"}
    body = {"use_beam_search": True, "n": 2, "best_of": 3, "length_penalty": 0.5, "early_stopping": "never"}
    async with TestClient(TestServer(create_app(engine, ServerConfig()))) as client:
        answer = await ask(client, path, max_tokens=2, **prompt, **body)
    params = fake.added[0][2]
    assert len(answer["choices"]) == 2
    assert (params.use_beam_search, params.n, params.beam_width, params.temperature) == (True, 2, 3, 1.0)
    assert (params.length_penalty, params.early_stopping) == (0.5, "never")
