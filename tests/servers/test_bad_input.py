"""Hostile and mistaken requests: each is a 400 that names the field, and the engine hears of none of them."""

import gzip
import io
import json

import pytest

CHAT, COMPLETIONS, TOKENIZE = "/v1/chat/completions", "/v1/completions", "/tokenize"
HI = [{"role": "user", "content": "hi"}]


def nested(depth):
    return "[" * depth + "]" * depth


# Path, body, offending field, what the message must say.
FIELDS = [
    (COMPLETIONS, {"prompt": ""}, "prompt", "prompt is empty"),
    (COMPLETIONS, {"prompt": []}, "prompt", "not empty"),
    (COMPLETIONS, {"prompt": [""]}, "prompt", "prompt is empty"),
    (COMPLETIONS, {"prompt": ["a", ""]}, "prompt", "prompt is empty"),
    (COMPLETIONS, {"prompt": [[]]}, "prompt", "prompt is empty"),
    (COMPLETIONS, {"prompt": ["a", 1]}, "prompt", "must be a string"),
    (COMPLETIONS, {"prompt": [1.5]}, "prompt", "must be a string"),
    (COMPLETIONS, {"prompt": [True]}, "prompt", "must be a string"),
    (COMPLETIONS, {"prompt": {"text": "a"}}, "prompt", "must be a string"),
    (COMPLETIONS, {"prompt": 5}, "prompt", "must be a string"),
    (COMPLETIONS, {"prompt": ["a"] * 1025}, "prompt", "1025 prompts, the limit is 1024"),
    (COMPLETIONS, {}, "prompt", "prompt is missing"),
    (COMPLETIONS, {"prompt": None}, "prompt", "prompt is missing"),
    (COMPLETIONS, {"prompt": "x" * 64}, "prompt", "64 tokens, max_model_len is 64"),
    (COMPLETIONS, {"prompt": [1] * 1000}, "prompt", "1000 tokens, max_model_len is 64"),
    (COMPLETIONS, {"prompt": "x" * 10**6}, "prompt", "1000000 characters"),
    (COMPLETIONS, {"prompt": [260]}, "prompt", "ids are 0..259"),
    (COMPLETIONS, {"prompt": [-1]}, "prompt", "ids are 0..259"),
    (COMPLETIONS, {"prompt": [10**400]}, "prompt", "ids are 0..259"),
    (COMPLETIONS, {"prompt": "a", "temperature": -1}, "temperature", "at least 0.0 and at most 2.0"),
    (COMPLETIONS, {"prompt": "a", "temperature": float("nan")}, "temperature", "a finite number"),
    (COMPLETIONS, {"prompt": "a", "temperature": float("inf")}, "temperature", "a finite number"),
    (COMPLETIONS, {"prompt": "a", "temperature": 10**400}, "temperature", "a finite number"),
    (COMPLETIONS, {"prompt": "a", "temperature": "hot"}, "temperature", "a finite number"),
    (COMPLETIONS, {"prompt": "a", "temperature": True}, "temperature", "a finite number"),
    (COMPLETIONS, {"prompt": "a", "temperature": 3}, "temperature", "at most 2.0"),
    (COMPLETIONS, {"prompt": "a", "top_p": 0}, "top_p", "above 0.0"),
    (COMPLETIONS, {"prompt": "a", "top_p": 1.1}, "top_p", "at most 1.0"),
    (COMPLETIONS, {"prompt": "a", "top_k": -2}, "top_k", "at least -1"),
    (COMPLETIONS, {"prompt": "a", "top_k": 1.0}, "top_k", "an integer"),
    (COMPLETIONS, {"prompt": "a", "top_k": 10**30}, "top_k", "at most"),
    (COMPLETIONS, {"prompt": "a", "min_p": 2}, "min_p", "at most 1.0"),
    (COMPLETIONS, {"prompt": "a", "n": 0}, "n", "at least 1"),
    (COMPLETIONS, {"prompt": "a", "n": 10**6}, "n", "at most 128"),
    (COMPLETIONS, {"prompt": "a", "n": "2"}, "n", "an integer"),
    (COMPLETIONS, {"prompt": "a", "seed": 2**70}, "seed", "at most"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 0}, "max_tokens", "at least 1"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": -5}, "max_tokens", "at least 1"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 10**300}, "max_tokens", "at most"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 10**400}, "max_tokens", "at most"),  # larger than every float
    (COMPLETIONS, {"prompt": "a", "seed": -(10**4000)}, "seed", "at least"),
    (COMPLETIONS, {"prompt": "a", "min_tokens": 99}, "min_tokens", "above max_tokens 16"),
    (COMPLETIONS, {"prompt": "a", "repetition_penalty": 0}, "repetition_penalty", "above 0.0"),
    (COMPLETIONS, {"prompt": "a", "presence_penalty": 9}, "presence_penalty", "at most 2.0"),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias", "token id"),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {"1": "x"}}, "logit_bias", "finite number"),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {"1": 101}}, "logit_bias", "at most 100"),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {"260": 1}}, "logit_bias", "0..259"),
    (COMPLETIONS, {"prompt": "a", "logit_bias": [1]}, "logit_bias", "an object"),
    (COMPLETIONS, {"prompt": "a", "logit_bias": dict.fromkeys(map(str, range(301)), 1)}, "logit_bias", "at most 300"),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {"9" * 30: 1}}, "logit_bias", "token id"),
    (COMPLETIONS, {"prompt": "a", "allowed_token_ids": []}, "allowed_token_ids", "empty"),
    (COMPLETIONS, {"prompt": "a", "allowed_token_ids": [1, "2"]}, "allowed_token_ids", "list of token ids"),
    (COMPLETIONS, {"prompt": "a", "stop": ""}, "stop", "1 to 1024 characters"),
    (COMPLETIONS, {"prompt": "a", "stop": 5}, "stop", "list of strings"),
    (COMPLETIONS, {"prompt": "a", "stop": ["a"] * 65}, "stop", "the limit is 64"),
    (COMPLETIONS, {"prompt": "a", "stop_token_ids": [999]}, "stop_token_ids", "0..259"),
    (COMPLETIONS, {"prompt": "a", "bad_words": "x"}, "bad_words", "list of strings"),
    (COMPLETIONS, {"prompt": "a", "logprobs": 99}, "logprobs", "the limit is 20"),
    (COMPLETIONS, {"prompt": "a", "logprobs": True}, "logprobs", "an integer"),
    (COMPLETIONS, {"prompt": "a", "prompt_logprobs": -1}, "prompt_logprobs", "at least 0"),
    (COMPLETIONS, {"prompt": "a", "prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "cannot be streamed"),
    (COMPLETIONS, {"prompt": "a", "stream": "yes"}, "stream", "true or false"),
    (COMPLETIONS, {"prompt": "a", "stream": 1}, "stream", "true or false"),
    (COMPLETIONS, {"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options", "stream: true"),
    (
        COMPLETIONS,
        {"prompt": "a", "stream": True, "stream_options": {"include_usages": True}},
        "stream_options",
        "did you mean 'include_usage'",
    ),
    (
        COMPLETIONS,
        {"prompt": "a", "stream": True, "stream_options": {"include_usage": 1}},
        "stream_options.include_usage",
        "true or false",
    ),
    (COMPLETIONS, {"prompt": "a", "priority": 1}, "priority", "--scheduling-policy priority"),
    (COMPLETIONS, {"prompt": "a", "cache_salt": ""}, "cache_salt", "not empty"),
    (COMPLETIONS, {"prompt": "a", "model": 5}, "model", "a string"),
    (COMPLETIONS, {"prompt": "a", "temprature": 1}, "temprature", "did you mean 'temperature'?"),
    (COMPLETIONS, {"prompt": "a", "guided_json": {}}, "guided_json", "is no field of this endpoint"),
    (COMPLETIONS, {"prompt": "a", "z" * 10**5: 1}, "z" * 64, "remove it"),
    (COMPLETIONS, {"prompt": "a", "messages": HI}, "messages", "is no field of this endpoint"),
    (COMPLETIONS, {"prompt": "a", "suffix": "b"}, "suffix", "not supported"),
    (COMPLETIONS, {"prompt": "a", "best_of": 3}, "best_of", "only a beam search returns fewer"),
    (COMPLETIONS, {"prompt": "a", "use_beam_search": 1}, "use_beam_search", "true or false"),
    (COMPLETIONS, {"prompt": "a", "use_beam_search": True, "stream": True}, "stream", "cannot be streamed"),
    (CHAT, {"messages": HI, "use_beam_search": True, "stream": True}, "stream", "cannot be streamed"),
    (COMPLETIONS, {"prompt": "a", "use_beam_search": True, "n": 33}, "n", "at most 32"),
    (COMPLETIONS, {"prompt": "a", "use_beam_search": True, "n": 0}, "n", "at least 1"),
    (COMPLETIONS, {"prompt": "a", "use_beam_search": True, "n": 2, "best_of": 1}, "best_of", "at least n (2)"),
    (COMPLETIONS, {"prompt": "a", "use_beam_search": True, "temperature": 0.5}, "temperature", "cannot take"),
    (COMPLETIONS, {"prompt": "a", "use_beam_search": True, "stop": "x"}, "stop", "cannot take"),
    (COMPLETIONS, {"prompt": "a", "use_beam_search": True, "logprobs": 21}, "logprobs", "the limit is 20"),
    (COMPLETIONS, {"prompt": "a", "use_beam_search": True, "early_stopping": "no"}, "early_stopping", "'never'"),
    (COMPLETIONS, {"prompt": "a", "length_penalty": 2}, "length_penalty", "only a beam search knows"),
    (
        CHAT,
        {"messages": HI, "use_beam_search": True, "response_format": {"type": "json_object"}},
        "response_format",
        "cannot take",
    ),
    (COMPLETIONS, {"prompt": "\ud800"}, None, "surrogate"),
    (CHAT, {}, "messages", "messages is missing"),
    (CHAT, {"messages": []}, "messages", "at least one message"),
    (CHAT, {"messages": "hi"}, "messages", "list"),
    (CHAT, {"messages": ["hi"]}, "messages", "messages[0]: it must be an object"),
    (CHAT, {"messages": [{"role": "wizard", "content": "hi"}]}, "messages", "system, developer, user"),
    (CHAT, {"messages": [{"role": ["user"], "content": "hi"}]}, "messages", "must be one of"),
    (CHAT, {"messages": [{"content": "hi"}]}, "messages", "must be one of"),
    (CHAT, {"messages": [*HI, {"role": "user"}]}, "messages", "messages[1] has no content"),
    (CHAT, {"messages": [{"role": "user", "content": None}]}, "messages", "no content"),
    (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages", "list of text parts"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages", "image_url"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages", "supported"),
    (CHAT, {"messages": [{"role": "user", "contents": "hi"}]}, "messages", "did you mean 'content'?"),
    (CHAT, {"messages": [{"role": "user", "content": "a", "refusal": "no"}]}, "messages", "refusal"),
    (CHAT, {"messages": [{"role": "assistant", "content": "a", "tool_calls": 5}]}, "messages", "tool_calls"),
    (CHAT, {"messages": [{"role": "user", "content": "x" * 10**6}]}, "messages", "characters"),
    (CHAT, {"messages": HI, "chat_template": "{{ 1 }}"}, "chat_template", "--trust-request-chat-template"),
    (TOKENIZE, {"messages": HI, "chat_template": "{{ 1 }}"}, "chat_template", "--trust-request-chat-template"),
    (TOKENIZE, {"messages": HI, "prompt": "a"}, "prompt", "either prompt or messages"),
    (TOKENIZE, {}, "prompt", "either prompt or messages"),
    (TOKENIZE, {"prompt": "x" * 10**6}, "prompt", "characters"),
    (TOKENIZE, {"prompt": ["a"]}, "prompt", "a string"),
    ("/detokenize", {}, "tokens", "tokens is missing"),
    ("/detokenize", {"tokens": ["a"]}, "tokens", "list of token ids"),
    ("/detokenize", {"tokens": [-1]}, "tokens", "0..259"),
    ("/detokenize", {"tokens": [10**30]}, "tokens", "0..259"),
    ("/abort", {}, "request_id", "either request_id"),
    ("/abort", {"request_id": "a", "all": True}, "request_id", "either request_id"),
    ("/abort", {"request_id": 5}, "request_id", "list of strings"),
    (CHAT, {"messages": HI, "session_id": "s"}, "session_id", "not supported"),
    (CHAT, {"messages": HI, "request_id": "a b"}, "request_id", "letters, digits"),
    (CHAT, {"messages": HI, "request_id": "x" * 129}, "request_id", "1 to 128"),
    (CHAT, {"messages": HI, "truncation_side": "middle"}, "truncation_side", "one of left, right"),
    (COMPLETIONS, {"prompt": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "at least 1"),
    (COMPLETIONS, {"prompt": "a", "truncate_prompt_tokens": 64}, "truncate_prompt_tokens", "below max_model_len 64"),
    (CHAT, {"messages": HI, "top_logprobs": 2}, "top_logprobs", "logprobs: true"),
    (CHAT, {"messages": HI, "logprobs": True, "top_logprobs": 21}, "top_logprobs", "at most 20"),
    (CHAT, {"messages": HI, "logprobs": 5}, "logprobs", "true or false"),
    (CHAT, {"messages": HI, "max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens", "send one"),
    (CHAT, {"messages": HI, "max_completion_tokens": 0}, "max_completion_tokens", "at least 1"),
    (CHAT, {"messages": HI, "chat_template_kwargs": []}, "chat_template_kwargs", "an object"),
    (CHAT, {"messages": HI, "chat_template_kwargs": {"self": 1}}, "chat_template_kwargs", "'self'"),
    (CHAT, {"messages": HI, "chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs", "'chat_template'"),
    (CHAT, {"messages": HI, "prompt": "a"}, "prompt", "is no field of this endpoint"),
]

# Raw body, what the message must say.
BODIES = [
    (b"", "the body is empty"),
    (b"  \n", "the body is empty"),
    (b"{", "is not JSON"),
    (b"[1, 2]", "is a JSON array; send an object"),
    (b'"text"', "is a JSON string"),
    (b"null", "is a JSON null"),
    (b"NaN", "is a JSON number"),
    (b"\xff\xfe{}", "not UTF-8 at byte 0"),
    ('{"prompt": "é"}'.encode("latin-1"), "not UTF-8 at byte 12"),
    ('{"prompt": "a"}'.encode("utf-16"), "not UTF-8"),
    (b"\xef\xbb\xbf{}", "is not JSON"),
    (b'{"prompt": ' + nested(90_000).encode() + b"}", "nested deeper than 64"),
    (b'{"prompt": ' + nested(800).encode() + b"}", "nested deeper than 64"),
    (b'{"a":' * 500 + b"1" + b"}" * 500, "nested deeper than 64"),
    (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", "is not JSON"),
    (b'{"prompt": [' + b"[]," * 100_001 + b"[]]}", "arrays and objects, the limit is 100000"),
    (b'{"prompt": "a", "stop": ["' + b"[" * 200_000 + b'"]}', "stop holds"),  # brackets in a string are none
    (b'{"prompt": "a", "allowed_token_ids": [' + b"1," * 300_000 + b"1]}", "at most 262144 token ids"),
    (b'{"prompt": "a", "temperature": 1e999}', "temperature is inf"),
    (b'{"prompt": "a", "temperature": -Infinity}', "temperature is -inf"),
    (b"{'prompt': 'a'}", "is not JSON"),
]


async def refuse(http, fake, path, **request):
    response = await http.post(path, **request)
    body = await response.json()
    assert response.status == 400, body
    assert body["error"].keys() == {"message", "type", "param", "code"}
    assert (body["error"]["type"], body["error"]["code"]) == ("BadRequestError", 400)
    assert len(body["error"]["message"]) < 600
    assert fake.added == []
    return body["error"]


@pytest.mark.parametrize(
    ("path", "body", "param", "message"), FIELDS, ids=[f"{i}-{case[2]}"[:40] for i, case in enumerate(FIELDS)]
)
async def test_a_bad_field_is_named(http, fake, path, body, param, message):
    headers = {"Content-Type": "application/json"}
    error = await refuse(http, fake, path, data=json.dumps(body).encode(), headers=headers)
    assert error["param"] == param
    assert message in error["message"]


@pytest.mark.parametrize(("body", "message"), BODIES, ids=[case[0][:20].hex() for case in BODIES])
async def test_a_bad_body_is_refused(http, fake, body, message):
    headers = {"Content-Type": "application/json"}
    error = await refuse(http, fake, COMPLETIONS, data=body, headers=headers)
    assert message in error["message"]


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", "", "application/jsonx"])
async def test_another_content_type_is_refused(http, fake, content_type):
    headers = {"Content-Type": content_type}
    error = await refuse(http, fake, COMPLETIONS, data=b'{"prompt": "a"}', headers=headers)
    assert "Content-Type: application/json" in error["message"]


async def test_a_charset_beside_the_content_type_is_fine(http):
    headers = {"Content-Type": "application/json; charset=utf-8"}
    response = await http.post(COMPLETIONS, data=b'{"prompt": "a"}', headers=headers)
    assert response.status == 200


async def test_broken_compression_is_refused(http, fake):
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    error = await refuse(http, fake, COMPLETIONS, data=b"this is not gzip", headers=headers)
    assert "Content-Encoding" in error["message"]


async def test_a_bomb_is_stopped_at_the_size_limit(http, fake):
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    response = await http.post(COMPLETIONS, data=gzip.compress(b" " * (8 << 20)), headers=headers)
    assert response.status in (400, 413)
    assert fake.added == []


async def test_a_body_over_the_limit_says_which_flag_raises_it(http, fake):
    body = io.BytesIO(b" " * (5 << 20))
    response = await http.post(COMPLETIONS, data=body, headers={"Content-Type": "application/json"})
    assert response.status == 413
    assert "--max-request-bytes" in (await response.json())["error"]["message"]


async def test_one_bad_prompt_among_good_ones_stops_them_all(http, fake):
    fake.gate.clear()
    response = await http.post(COMPLETIONS, json={"prompt": [[97], [260]], "max_tokens": 50})
    assert response.status == 400
    await fake.until(lambda: fake.aborted)
    assert fake.aborted == [fake.added[0][0]]


async def test_a_refused_stream_is_a_plain_400(http):
    response = await http.post(COMPLETIONS, json={"prompt": [260], "stream": True})
    assert response.status == 400
    assert response.content_type == "application/json"


async def test_unknown_paths_and_methods_have_error_bodies(http):
    response = await http.get("/v1/nothing")
    assert (response.status, (await response.json())["error"]["type"]) == (404, "NotFoundError")
    response = await http.get(COMPLETIONS)
    assert (response.status, response.headers["Allow"]) == (405, "POST")
    assert "use POST" in (await response.json())["error"]["message"]


async def test_an_unexpected_failure_is_a_500_that_tells_no_details(http, fake):
    def broken(*args, **kwargs):
        raise ZeroDivisionError("secret")

    fake.tokenizer.encode = broken
    response = await http.post(COMPLETIONS, json={"prompt": "a"})
    assert response.status == 500
    error = (await response.json())["error"]
    assert (error["type"], error["code"]) == ("InternalServerError", 500)
    assert "secret" not in error["message"]


async def test_the_engine_answers_as_before_after_all_this(http):
    for body in ({"prompt": [260]}, {"prompt": ""}, {"prompt": "a", "n": 0}):
        assert (await http.post(COMPLETIONS, json=body)).status == 400
    response = await http.post(COMPLETIONS, json={"prompt": "ab", "max_tokens": 3})
    assert (await response.json())["choices"][0]["text"] == "aba"
