"""The official client, sync and async, and curl against the server with the demo model: over sixty calls."""

import asyncio
import json
import re
import shutil
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import openai
import pytest
from aiohttp import web

from pagedjax import AsyncEngine, EngineConfig, LLMEngine
from servers import ServerConfig, create_app
from tests import demo

pytestmark = pytest.mark.slow

PARIS = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
GREEDY = {"temperature": 0, "max_tokens": 7}
BRIEF = {"temperature": 0, "max_tokens": 4}
OPTIONS = (
    {},
    {"temperature": 1.3, "top_p": 0.5, "seed": 2},
    {"seed": 3, "presence_penalty": 0.5, "frequency_penalty": 0.5, "logit_bias": {"260": -100}},
    {"stop": ["France", "Paris"]},
    {"n": 2, "temperature": 1, "seed": 4, "max_tokens": 4},
    {"extra_body": {"top_k": 5, "min_p": 0.05, "repetition_penalty": 1.2}},
    {"extra_body": {"min_tokens": 5, "ignore_eos": True, "stop_token_ids": [30]}},
    {"extra_body": {"bad_words": ["Paris"]}},
    {"extra_body": {"allowed_token_ids": [260, 261, 262], "return_token_ids": True}},
)


@pytest.fixture(scope="module")
def url():
    """A server in a thread of its own, so that blocking clients can talk to it."""
    with demo.compiling_once():
        engine = AsyncEngine(LLMEngine(EngineConfig(**demo.OPTIONS)))
    loop, ready, found = asyncio.new_event_loop(), threading.Event(), {}

    async def start():
        found["runner"] = runner = web.AppRunner(create_app(engine, ServerConfig()), handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        found["port"] = runner.addresses[0][1]
        ready.set()

    async def stop():
        await found["runner"].cleanup()
        await engine.shutdown()
        loop.stop()

    thread = threading.Thread(target=lambda: (loop.run_until_complete(start()), loop.run_forever()))
    thread.start()
    assert ready.wait(60)
    yield f"http://127.0.0.1:{found['port']}"
    asyncio.run_coroutine_threadsafe(stop(), loop)
    thread.join()
    loop.close()


@pytest.fixture(scope="module")
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_the_model_knows_the_answer(client):
    answer = client.chat.completions.create(model="demo", messages=PARIS, **GREEDY)
    assert "Paris" in answer.choices[0].message.content
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_stream_adds_up_to_the_plain_answer(client, options):
    """Both endpoints, each plain and streamed: four calls an option, at once."""
    given = {"model": "demo", **GREEDY, **options}
    chat = partial(client.chat.completions.create, messages=PARIS, **given)
    complete = partial(client.completions.create, prompt="The capital of France is", **given)
    with ThreadPoolExecutor() as pool:
        asked = [pool.submit(ask) for ask in (chat, lambda: list(chat(stream=True)))]
        asked += [pool.submit(ask) for ask in (complete, lambda: list(complete(stream=True)))]
    plain, chunks, plain_completion, completion_chunks = [one.result() for one in asked]
    texts = dict.fromkeys(range(given.get("n", 1)), "")
    reasons = {}
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason
    assert [choice.message.content for choice in plain.choices] == list(texts.values())
    assert [choice.finish_reason for choice in plain.choices] == list(reasons.values())
    texts = dict.fromkeys(range(given.get("n", 1)), "")
    for chunk in completion_chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert [choice.text for choice in plain_completion.choices] == list(texts.values())
    assert plain_completion.usage.completion_tokens <= given["max_tokens"] * given.get("n", 1)


def test_responses_say_what_chats_say(client):
    chat = client.chat.completions.create(model="demo", messages=PARIS, **BRIEF)
    whole = client.responses.create(model="demo", input=PARIS[0]["content"], temperature=0, max_output_tokens=4)
    events = client.responses.create(
        model="demo", input=PARIS[0]["content"], temperature=0, max_output_tokens=4, stream=True
    )
    streamed = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert whole.output_text == streamed == chat.choices[0].message.content


def test_logprobs_of_both_endpoints_agree_with_the_text(client):
    chat = client.chat.completions.create(model="demo", messages=PARIS, logprobs=True, top_logprobs=3, **BRIEF)
    entries = chat.choices[0].logprobs.content
    assert bytes(byte for entry in entries for byte in entry.bytes).decode().startswith(chat.choices[0].message.content)
    assert all(entry.logprob == max(top.logprob for top in entry.top_logprobs) for entry in entries)
    text = client.completions.create(model="demo", prompt="The capital of France is", logprobs=2, echo=True, **BRIEF)
    choice = text.choices[0]
    assert "".join(choice.logprobs.tokens).startswith(choice.text)
    assert choice.logprobs.token_logprobs[0] is None
    assert all(value <= 0 for value in choice.logprobs.token_logprobs[1:])


def test_prompts_of_every_form_and_several_at_once(client, url):
    texts = ["One, two, three,", "The sky is"]
    both = client.completions.create(model="demo", prompt=texts, **BRIEF)
    alone = [client.completions.create(model="demo", prompt=text, **BRIEF).choices[0].text for text in texts]
    assert [choice.text for choice in both.choices] == alone
    ids = [client.post("/../tokenize", body={"prompt": text}, cast_to=object)["tokens"] for text in texts]
    from_ids = client.completions.create(model="demo", prompt=ids, **BRIEF)
    assert [choice.text for choice in from_ids.choices] == alone
    assert client.post("/../detokenize", body={"tokens": ids[0]}, cast_to=object)["prompt"] == texts[0]


async def test_async_clients_at_once_get_what_they_get_alone(url):
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:

        async def ask(i):
            answer = await client.completions.create(model="demo", prompt=f"{i} plus one is", **BRIEF)
            return answer.choices[0].text

        together = await asyncio.gather(*map(ask, range(4)))
        assert together == [await ask(i) for i in range(4)]


def test_errors_are_the_clients_own_classes(client):
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="a")
    with pytest.raises(openai.BadRequestError, match="max_model_len is 1024"):
        client.completions.create(model="demo", prompt="word " * 2000)
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model="demo", messages=PARIS, temperature=9)
    assert [model.id for model in client.models.list()] == ["demo"]
    assert client.models.retrieve("demo").id == "demo"


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl_is_enough(url):
    def curl(path, *options):
        command = ["curl", "--silent", "--show-error", "--no-buffer", *options, f"{url}{path}"]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout

    json_type = ("-H", "Content-Type: application/json", "-d")
    body = json.dumps({"messages": PARIS, **GREEDY})
    assert "Paris" in json.loads(curl("/v1/chat/completions", *json_type, body))["choices"][0]["message"]["content"]
    text = curl("/v1/chat/completions", *json_type, json.dumps({"messages": PARIS, **BRIEF, "stream": True}))
    assert text.endswith("data: [DONE]\n\n")
    assert "vllm:num_requests_running" in curl("/metrics")
    assert curl("/health", "-w", "%{http_code}") == "200"
    assert re.search("<title>pagedjax</title>", curl("/"))
    assert json.loads(curl("/v1/completions", *json_type, "{"))["error"]["code"] == 400
