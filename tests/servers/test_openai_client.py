"""The official openai client against the server: what it parses is what users get."""

import asyncio

import openai
import pytest

USER = [{"role": "user", "content": "hi"}]  # rendered as "user:hi\nassistant:", which the fake engine repeats


async def test_chat_answers_with_text_reason_and_usage(client):
    answer = await client.chat.completions.create(model="fake", messages=USER, max_tokens=7)
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == "user:hi"
    assert answer.choices[0].finish_reason == "length"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (18, 7, 25)
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


async def test_chat_without_max_tokens_fills_the_context(client, fake):
    answer = await client.chat.completions.create(model="fake", messages=USER)
    assert answer.usage.total_tokens == fake.config.max_model_len


async def test_chat_stream_begins_with_the_role_and_ends_with_the_reason(client):
    stream = await client.chat.completions.create(model="fake", messages=USER, max_completion_tokens=7, stream=True)
    chunks = [chunk async for chunk in stream]
    assert (chunks[0].choices[0].delta.role, chunks[0].choices[0].delta.content) == ("assistant", "")
    assert "".join(chunk.choices[0].delta.content for chunk in chunks) == "user:hi"
    assert [chunk.choices[0].finish_reason for chunk in chunks][:-1] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices[0].finish_reason == "length"
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert all(chunk.usage is None for chunk in chunks)


async def test_chat_stream_with_usage_ends_with_a_chunk_without_choices(client):
    stream = await client.chat.completions.create(
        model="fake", messages=USER, max_tokens=3, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.total_tokens == 18 + 3
    assert chunks[-2].choices[0].finish_reason == "length"


async def test_chat_with_n_gives_every_choice_its_role_text_and_reason(client):
    stream = await client.chat.completions.create(model="fake", messages=USER, max_tokens=4, n=3, stream=True)
    texts, reasons, roles = ["", "", ""], {}, []
    async for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content
            reasons[choice.index] = choice.finish_reason
            roles += [choice.index] if choice.delta.role else []
    assert texts == ["user", "vtfs", "wugt"]
    assert reasons == {0: "length", 1: "length", 2: "length"}
    assert roles == [0, 1, 2]


async def test_chat_logprobs_have_tokens_bytes_and_the_best_alternatives(client):
    answer = await client.chat.completions.create(
        model="fake", messages=USER, max_tokens=2, logprobs=True, top_logprobs=1
    )
    content = answer.choices[0].logprobs.content
    assert [(entry.token, entry.logprob, entry.bytes) for entry in content] == [("u", -1.0, [117]), ("s", -1.0, [115])]
    assert [[(top.token, top.logprob) for top in entry.top_logprobs] for entry in content] == [
        [("v", -0.5)],
        [("t", -0.5)],
    ]


async def test_an_answer_can_be_sent_back_in_the_next_turn(client, fake):
    first = await client.chat.completions.create(model="fake", messages=USER, max_tokens=2)
    messages = [*USER, first.choices[0].message, {"role": "user", "content": "more"}]
    await client.chat.completions.create(model="fake", messages=messages, max_tokens=1)
    assert bytes(fake.added[1][1]) == b"user:hi\nassistant:us\nuser:more\nassistant:"


async def test_text_parts_are_one_text(client, fake):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    await client.chat.completions.create(model="fake", messages=[{"role": "user", "content": parts}], max_tokens=1)
    assert bytes(fake.added[0][1]) == b"user:a\nb\nassistant:"


async def test_completion_answers_every_prompt_in_order(client):
    answer = await client.completions.create(model="fake", prompt=["abc", "xyz"], max_tokens=4, n=2)
    assert [(choice.index, choice.text) for choice in answer.choices] == [
        (0, "abca"),
        (1, "bcdb"),
        (2, "xyzx"),
        (3, "yz{y"),
    ]
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (6, 16)
    assert answer.id.startswith("cmpl-")


@pytest.mark.parametrize("prompt", ["ab", ["ab"], [97, 98], [[97, 98]]])
async def test_completion_takes_every_form_of_prompt(client, prompt):
    answer = await client.completions.create(model="fake", prompt=prompt, max_tokens=3)
    assert answer.choices[0].text == "aba"


async def test_completion_defaults_to_16_tokens(client):
    answer = await client.completions.create(model="fake", prompt="ab")
    assert answer.usage.completion_tokens == 16


async def test_completion_stream_carries_all_prompts(client):
    stream = await client.completions.create(
        model="fake", prompt=["abc", "xyz"], max_tokens=5, stream=True, stream_options={"include_usage": True}
    )
    texts, reasons = ["", ""], {}
    async for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason
    assert texts == ["abcab", "xyzxy"]
    assert reasons == {0: "length", 1: "length"}
    assert chunk.usage.total_tokens == 16


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_with_logprobs_scores_the_prompt_too(client, stream):
    answer = await client.completions.create(
        model="fake", prompt="abc", max_tokens=2, echo=True, logprobs=1, stream=stream
    )
    choices = [chunk.choices[0] async for chunk in answer] if stream else answer.choices
    joined = {name: [] for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")}
    for choice in choices:
        for name, values in joined.items():
            values += getattr(choice.logprobs, name)
    assert "".join(choice.text for choice in choices) == "abcab"
    assert joined["tokens"] == ["a", "b", "c", "a", "b"]
    assert joined["token_logprobs"] == [None, -2.0, -2.0, -1.0, -1.0]
    assert joined["top_logprobs"] == [None, {"b": -2.0}, {"c": -2.0}, {"a": -1.0, "b": -0.5}, {"b": -1.0, "c": -0.5}]
    assert joined["text_offset"] == [0, 1, 2, 3, 4]


async def test_echo_of_several_choices_repeats_the_prompt_in_each(client):
    answer = await client.completions.create(model="fake", prompt=[97, 98], max_tokens=1, echo=True, n=2, logprobs=0)
    assert [choice.text for choice in answer.choices] == ["aba", "abb"]
    assert answer.choices[1].logprobs.tokens == ["a", "b", "b"]


async def test_prompt_logprobs_have_vllms_shape(client):
    answer = await client.completions.create(model="fake", prompt="ab", max_tokens=1, extra_body={"prompt_logprobs": 0})
    expected = [None, {"98": {"logprob": -2.0, "rank": 1, "decoded_token": "b"}}]
    assert answer.choices[0].prompt_logprobs == expected
    answer = await client.chat.completions.create(
        model="fake", messages=USER, max_tokens=1, extra_body={"prompt_logprobs": 0}
    )
    assert answer.prompt_logprobs[:2] == [None, {"115": {"logprob": -2.0, "rank": 1, "decoded_token": "s"}}]


async def test_a_stop_token_is_the_stop_reason(client):
    answer = await client.completions.create(model="fake", prompt="abc", extra_body={"stop_token_ids": [98]})
    assert (answer.choices[0].finish_reason, answer.choices[0].stop_reason) == ("stop", 98)


async def test_models_lists_the_one_model_with_its_context(client):
    page = await client.models.list()
    assert [(model.id, model.max_model_len, model.object) for model in page.data] == [("fake", 64, "model")]
    assert (await client.models.retrieve("fake")).id == "fake"
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        await client.models.retrieve("other/name")


async def test_an_unknown_model_is_not_found(client):
    with pytest.raises(openai.NotFoundError, match="this server has 'fake'") as caught:
        await client.chat.completions.create(model="gpt-4", messages=USER)
    assert (caught.value.param, caught.value.type, caught.value.status_code) == ("model", "NotFoundError", 404)


async def test_many_clients_at_once_get_their_own_answers(client):
    async def ask(i):
        answer = await client.completions.create(model="fake", prompt=f"<{i}>", max_tokens=len(f"<{i}>"))
        return answer.choices[0].text

    assert await asyncio.gather(*map(ask, range(40))) == [f"<{i}>" for i in range(40)]


async def test_every_sampling_field_reaches_the_engine(client, fake):
    sampling = {
        "n": 2,
        "temperature": 0,
        "top_p": 0.5,
        "top_k": 7,
        "min_p": 0.1,
        "seed": 3,
        "presence_penalty": 1,
        "frequency_penalty": -1.5,
        "repetition_penalty": 1.1,
        "logit_bias": {"5": 2, "6": -1.5},
        "allowed_token_ids": [5, 6],
        "bad_words": ["x"],
        "min_tokens": 1,
        "stop": "end",
        "stop_token_ids": [9],
        "ignore_eos": True,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "prompt_logprobs": 2,
        "max_tokens": 4,
        "logprobs": 3,
    }
    extra = {"priority": 0, "cache_salt": "s", "user": "u", **sampling}
    await client.completions.create(model="fake", prompt="ab", extra_body=extra)
    _, ids, params, priority, cache_salt = fake.added[0]
    assert (ids, priority, cache_salt) == ([97, 98], 0, "s")
    expected = sampling | {"stop": ("end",), "stop_token_ids": (9,), "logit_bias": {5: 2.0, 6: -1.5}}
    assert {name: getattr(params, name) for name in sampling} == expected


async def test_template_fields_reach_the_template(client, fake):
    extra = {"chat_template_kwargs": {"enable_thinking": False}, "continue_final_message": True}
    messages = [*USER, {"role": "assistant", "content": "we"}]
    await client.chat.completions.create(model="fake", messages=messages, max_tokens=1, extra_body=extra)
    name, _, adds_prompt, continues, kwargs = fake.tokenizer.calls[0]
    assert (name, adds_prompt, continues, kwargs) == ("render_chat", False, True, {"enable_thinking": False})
    assert fake.tokenizer.calls[1] == ("encode", "user:hi\nassistant:we", False)


async def test_null_means_absent(client, fake):
    names = ("temperature", "n", "stop", "logit_bias", "stream", "seed", "logprobs", "tools", "max_tokens")
    await client.chat.completions.create(model="fake", messages=USER, extra_body=dict.fromkeys(names))
    assert fake.added[0][2].temperature == 1.0
