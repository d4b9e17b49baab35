"""The server over the real engine, with the model whose tokens are known by hand: that the two fit together."""

import asyncio
import itertools
import re
import threading

import openai
import pytest
from aiohttp.test_utils import TestClient, TestServer

from pagedjax import AsyncEngine
from servers import ServerConfig, create_app, generation
from tests.fakes import byte_tokenizer, continuation, fake_engine
from tests.servers.monitoring import missing_series

pytestmark = pytest.mark.slow  # it compiles an engine

MESSAGES = [{"role": "user", "content": "hi"}]
GREEDY = {"temperature": 0, "max_tokens": 20, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def answers():
    """Everything that the tests look at, asked of one server in one go: an engine takes seconds to compile."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generation, "GRACE_SECONDS", 60.0)  # however late the engine is, it says itself what was too late
        return asyncio.run(ask_everything())


async def ask_everything():
    drafts = {"method": "ngram", "num_speculative_tokens": 2}
    llm_engine = fake_engine(speculative_config=drafts, swap_space=0.01)  # so that there is every metric
    control = Control(llm_engine)
    engine = AsyncEngine(llm_engine)
    async with TestClient(TestServer(create_app(engine, ServerConfig()))) as http:
        base_url = str(http.make_url("/v1"))
        async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
            found = await ask(client, http)
        is_counted = watch_for_an_abort(engine)
        await leave(http, control)
        assert await asyncio.to_thread(control.is_idle.wait, 60)
        await asyncio.wait_for(is_counted.wait(), 60)
        found["metrics"] = await (await http.get("/metrics")).text()
    await engine.shutdown()
    return found | {"stats": engine.stats()}


def watch_for_an_abort(engine):
    """An event for its count: outputs are counted in the event loop, a round behind an engine that has nothing left."""
    is_counted = asyncio.Event()

    def note(output):
        if any(completion.finish_reason == "abort" for completion in output.outputs):
            is_counted.set()

    engine.add_observer(note)  # after the metrics' own
    return is_counted


async def ask(client, http):
    def complete(prompt, **options):
        return client.completions.create(model="fake", prompt=prompt, **{**GREEDY, **options})

    found = {"plain": await complete("hello")}
    found["many"] = await asyncio.gather(*(complete(f"prompt {i}") for i in range(12)))
    found["stream"] = [chunk async for chunk in await complete("hello", stream=True, logprobs=2, echo=True)]
    found["echo"] = await complete("hello", logprobs=2, echo=True)
    found["chat"] = await client.chat.completions.create(model="fake", messages=MESSAGES, n=2, **GREEDY)
    late = await http.post("/v1/completions", json={"prompt": "hello"}, headers={"X-Request-Timeout": "0.000001"})
    found["late"] = (late.status, (await late.json())["error"]["message"])
    beams = {"use_beam_search": True, "ignore_eos": True, "best_of": 4}
    found["beams"] = await complete("hello", n=2, logprobs=2, extra_body=beams)
    found["refused"] = await http.post("/v1/completions", json={"prompt": "x" * 129})
    return found


async def leave(http, control):
    """Begin a chat, and leave before its first token."""
    control.is_held.set()
    control.is_idle.clear()  # it has had nothing to do so far
    answer = await http.post("/v1/chat/completions", json={"messages": MESSAGES, "stream": True})
    await answer.content.readline()
    answer.close()


class Control:
    """Holds an engine's steps back until it hears an abort, and knows when it has nothing left to do."""

    def __init__(self, engine):
        self.is_held, self.is_idle = threading.Event(), threading.Event()
        self._step, self._abort, self._has_work = engine.step, engine.abort, engine.has_unfinished_requests
        engine.step, engine.abort, engine.has_unfinished_requests = self.step, self.abort, self.has_work

    def step(self):
        return [] if self.is_held.is_set() else self._step()

    def abort(self, request_ids):
        self._abort(request_ids)
        self.is_held.clear()

    def has_work(self):
        has_work = self._has_work()
        (self.is_idle.clear if has_work else self.is_idle.set)()
        return has_work


def text_after(prompt):
    tokenizer = byte_tokenizer()
    return tokenizer.decode(continuation(tokenizer.encode(prompt), 20), skip_special_tokens=True)


def test_a_request_without_time_is_ended_by_the_engine(answers):
    status, message = answers["late"]
    assert (status, message) == (
        504,
        "the request has reached its deadline of 1e-06 s after 0 tokens; allow it more time or ask for fewer tokens",
    )


def test_completions_are_the_models(answers):
    assert answers["plain"].choices[0].text == text_after("hello")
    assert answers["plain"].usage.completion_tokens == 20


def test_requests_at_once_get_what_they_get_alone(answers):
    assert [answer.choices[0].text for answer in answers["many"]] == [text_after(f"prompt {i}") for i in range(12)]


def test_a_stream_adds_up_to_the_plain_answer_with_its_logprobs(answers):
    whole = answers["echo"].choices[0]
    assert whole.text == "hello" + text_after("hello")
    choices = [chunk.choices[0] for chunk in answers["stream"]]
    assert "".join(choice.text for choice in choices) == whole.text
    for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
        parts = [getattr(choice.logprobs, name) for choice in choices]
        assert list(itertools.chain.from_iterable(parts)) == getattr(whole.logprobs, name)
    assert len(whole.logprobs.tokens) == 25


def test_chat_goes_through_the_template(answers):
    expected = text_after("[user]hi[assistant]")
    assert [choice.message.content for choice in answers["chat"].choices] == [expected, expected]


def test_a_prompt_that_is_too_long_is_refused(answers):
    assert answers["refused"].status == 400


def test_nothing_is_left_after_a_client_has_left(answers):
    assert answers["stats"]["num_requests_running"] == 0
    assert answers["stats"]["kv_cache_usage_perc"] == 0
    assert answers["stats"]["num_compilations_after_ready"] == 0


def test_the_reasons_add_up(answers):
    lines = [line for line in answers["metrics"].splitlines() if line.startswith("vllm:request_success_total")]
    counts = {line.split('finished_reason="')[1].split('"')[0]: float(line.split()[-1]) for line in lines}
    assert counts["length"] == 1 + 12 + 2 + 1 + 1
    assert (counts["abort"], counts["timeout"]) == (1, 1)
    assert sum(counts.values()) == counts["length"] + 2


def test_the_dashboard_and_the_alerts_find_all_they_ask_for(answers):
    assert missing_series(answers["metrics"]) == []


def test_engine_counts_are_conserved(answers):
    """Prompt tokens add up over their sources, iterations over the steps, and cached tokens are counted once."""
    values = {}
    for line in answers["metrics"].splitlines():
        if line.startswith("vllm:"):
            name, _, labels = line.rpartition(" ")[0].partition("{")
            values[name, *re.findall(r'(?:source|reason|le)="([^"]*)"', labels)] = float(line.rpartition(" ")[2])
    tokens, cached = values["vllm:prompt_tokens_total",], values["vllm:prompt_tokens_cached_total",]
    assert values["vllm:prompt_tokens_by_source_total", "local_compute"] == tokens - cached
    assert values["vllm:prompt_tokens_by_source_total", "local_cache_hit"] == cached > 0
    assert values["vllm:request_prefill_kv_computed_tokens_sum",] == values["vllm:request_prompt_tokens_sum",] - cached
    num_iterations = values["vllm:iteration_tokens_total_count",]
    assert values["vllm:iteration_step_time_seconds_count",] == num_iterations > 0
    assert values["vllm:iteration_tokens_total_bucket", "+Inf"] == num_iterations
    assert values["vllm:device_busy_seconds_total",] > 0
    assert values["vllm:estimated_read_bytes_per_gpu_total",] > num_iterations
    assert values["vllm:gpu_prefix_cache_hits_total",] == values["vllm:prefix_cache_hits_total",] >= cached
    assert values["vllm:time_per_output_token_seconds_count",] == values["vllm:inter_token_latency_seconds_count",]


def test_a_beam_search_answers_with_its_best_hypotheses(answers):
    first, second = answers["beams"].choices
    ids = byte_tokenizer().encode("hello")
    assert first.text == byte_tokenizer().decode(continuation(ids, 20))
    assert second.text != first.text
    totals = [sum(choice.logprobs.token_logprobs) for choice in (first, second)]
    assert totals[0] > totals[1]
    assert answers["beams"].usage.completion_tokens == 40
