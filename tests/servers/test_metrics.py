"""Metrics under vLLM's names, and the laws that their counts obey."""

import asyncio
import random

import pytest
from aiohttp.test_utils import TestClient, TestServer
from prometheus_client.parser import text_string_to_metric_families

from servers import ServerConfig, create_app

LABELS = {"model_name": "fake", "engine": "0"}


async def scrape(http):
    response = await http.get("/metrics")
    assert response.status == 200
    assert response.content_type == "text/plain"
    families = text_string_to_metric_families((await response.read()).decode())
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value for family in families for sample in family.samples
    }


def value(samples, name, **labels):
    return samples[(name, *sorted({**LABELS, **labels}.items()))]


def finished(samples):
    return {
        dict(key[1:])["finished_reason"]: count
        for key, count in samples.items()
        if key[0] == "vllm:request_success_total"
    }


def watch_for_end(engine, count):
    """An event that is set when so many requests have ended and been counted."""
    ended, event = [], asyncio.Event()

    def note(output):
        if output.finished:
            ended.append(output.request_id)
        if len(ended) == count:
            event.set()

    engine.add_observer(note)  # after the metrics' own
    return event


async def test_names_that_dashboards_read_are_there_before_the_first_request(http):
    samples = await scrape(http)
    for name in (
        "num_requests_running",
        "num_requests_waiting",
        "num_requests_swapped",
        "kv_cache_usage_perc",
        "cpu_cache_usage_perc",
        "swap_out_blocks_total",
        "swap_in_blocks_total",
        "swap_out_bytes_total",
        "swap_in_bytes_total",
        "num_preemptions_total",
        "prefix_cache_queries_total",
        "prefix_cache_hits_total",
        "prompt_tokens_total",
        "generation_tokens_total",
        "time_to_first_token_seconds_count",
        "inter_token_latency_seconds_count",
        "request_time_per_output_token_seconds_count",
        "e2e_request_latency_seconds_count",
        "request_queue_time_seconds_count",
        "request_inference_time_seconds_count",
        "request_prefill_time_seconds_count",
        "request_decode_time_seconds_count",
        "request_prompt_tokens_count",
        "request_generation_tokens_count",
        "request_max_num_generation_tokens_count",
        "request_params_max_tokens_count",
        "request_params_n_count",
    ):
        assert value(samples, f"vllm:{name}") == 0, name
    assert finished(samples) == {"stop": 0, "length": 0, "abort": 0, "timeout": 0, "error": 0}


async def test_the_cache_configuration_is_in_labels(http, engine):
    """Without the number of blocks, which routers read beside the size of each."""
    samples = await scrape(http)
    (info,) = (dict(key[1:]) for key in samples if key[0] == "vllm:cache_config_info")
    assert (info["block_size"], info["enable_prefix_caching"]) == ("16", "True")
    assert info["num_gpu_blocks"] == str(len((await engine.inspect()).num_block_refs))


async def test_one_request_is_counted_once_everywhere(http):
    await (await http.post("/v1/completions", json={"prompt": "abc", "max_tokens": 5})).read()
    samples = await scrape(http)
    assert finished(samples) == {"stop": 0, "length": 1, "abort": 0, "timeout": 0, "error": 0}
    assert value(samples, "vllm:prompt_tokens_total") == 3
    assert value(samples, "vllm:generation_tokens_total") == 5
    assert value(samples, "vllm:request_prompt_tokens_sum") == 3
    assert value(samples, "vllm:request_generation_tokens_sum") == 5
    assert value(samples, "vllm:request_params_max_tokens_sum") == 5
    assert value(samples, "vllm:request_time_per_output_token_seconds_count") == 1
    assert value(samples, "vllm:e2e_request_latency_seconds_sum") > 0


@pytest.mark.parametrize("is_stream", [True, False])
@pytest.mark.parametrize("n", [1, 3])
async def test_times_between_tokens_are_counted_of_every_request(http, fake, is_stream, n):
    """Those of requests that did not stream were not."""
    fake.step_seconds = 0.001
    body = {"prompt": "abc", "max_tokens": 20, "n": n, "stream": is_stream}
    await (await http.post("/v1/completions", json=body)).read()
    samples = await scrape(http)
    name = "vllm:inter_token_latency_seconds"
    assert value(samples, f"{name}_count") == 19
    assert value(samples, f"{name}_sum") == pytest.approx(value(samples, "vllm:request_decode_time_seconds_sum"))


async def test_parallel_completions_are_one_request(http):
    body = {"prompt": "abc", "max_tokens": 5, "n": 3, "stream": True}
    await (await http.post("/v1/completions", json=body)).read()
    samples = await scrape(http)
    assert finished(samples)["length"] == 1
    assert value(samples, "vllm:request_params_n_sum") == 3
    assert value(samples, "vllm:request_generation_tokens_sum") == 15
    assert value(samples, "vllm:request_max_num_generation_tokens_sum") == 5


async def test_refused_requests_are_not_counted(http):
    assert (await http.post("/v1/completions", json={"prompt": [260]})).status == 400
    assert sum(finished(await scrape(http)).values()) == 0


async def test_an_aborted_request_without_a_token_has_no_first_token_time(http, engine, fake):
    last = watch_for_end(engine, 1)
    fake.gate.clear()
    response = await http.post(
        "/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}], "stream": True}
    )
    response.close()
    await last.wait()
    samples = await scrape(http)
    assert finished(samples)["abort"] == 1
    assert value(samples, "vllm:time_to_first_token_seconds_count") == 0
    assert value(samples, "vllm:request_generation_tokens_sum") == 0


async def test_counts_are_conserved_over_a_mixed_load(http, engine, fake):
    """The finish reasons add up to the requests, and first-token times to the requests that had a token."""
    last = watch_for_end(engine, 40)
    draw = random.Random(1)
    fake.config = type(fake.config)(model="fake", max_model_len=10**9)  # what clients leave must not end before

    async def ask(i):
        body = {"prompt": f"prompt {i}", "max_tokens": draw.randint(1, 20), "stream": draw.random() < 0.5}
        if i % 4 == 0:
            body["stop_token_ids"] = [ord("m")]
        if i % 4 == 1:
            body |= {"max_tokens": 10**6, "stream": True}
        response = await http.post("/v1/completions", json=body)
        if i % 4 == 1:
            await response.content.readline()  # a token has come
            response.close()
        else:
            await response.read()

    await asyncio.gather(*map(ask, range(40)))
    await last.wait()
    samples = await scrape(http)
    counts = finished(samples)
    assert counts["abort"] >= 1
    assert counts["stop"] >= 1
    assert sum(counts.values()) == len(fake.added) == 40
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds"):
        assert value(samples, f"vllm:{name}_count") == 40, name
    assert value(samples, "vllm:request_generation_tokens_sum") == value(samples, "vllm:generation_tokens_total")


async def test_old_names_are_there_for_dashboards_that_use_them(http):
    await (await http.post("/v1/completions", json={"prompt": "abc", "max_tokens": 5, "stream": True})).read()
    samples = await scrape(http)
    for old, new in (
        ("gpu_cache_usage_perc", "kv_cache_usage_perc"),
        ("gpu_prefix_cache_queries_total", "prefix_cache_queries_total"),
        ("time_per_output_token_seconds_count", "inter_token_latency_seconds_count"),
    ):
        assert value(samples, f"vllm:{old}") == value(samples, f"vllm:{new}")


async def test_a_failed_request_counts_as_corrupted(http):
    await (await http.post("/v1/completions", json={"prompt": "ab!", "seed": 666, "max_tokens": 50})).read()
    samples = await scrape(http)
    assert finished(samples)["error"] == value(samples, "vllm:corrupted_requests_total") == 1


async def test_http_requests_are_counted_by_route_and_never_by_what_clients_make_up(http):
    await http.post("/v1/completions", json={"prompt": "abc", "max_tokens": 1})
    await http.post("/v1/completions", json={"prompt": ""})
    for i in range(3):
        await http.request("PROPFIND", f"/made/up/{i}")
        await http.get(f"/v1/models/unknown{i}")
    samples = await scrape(http)
    counts = {tuple(sorted(dict(key[1:]).items())): n for key, n in samples.items() if key[0] == "http_requests_total"}
    assert counts == {
        (("handler", "/v1/completions"), ("method", "POST"), ("status", "2xx")): 1,
        (("handler", "/v1/completions"), ("method", "POST"), ("status", "4xx")): 1,
        (("handler", "/v1/models/{model}"), ("method", "GET"), ("status", "4xx")): 3,
        (("handler", "none"), ("method", "other"), ("status", "4xx")): 3,
    }


async def test_refusals_of_a_full_queue_are_counted(engine, fake):
    config = ServerConfig(max_num_queued_tokens=4)
    async with TestClient(TestServer(create_app(engine, config))) as http:
        fake.gate.clear()
        running = asyncio.create_task(http.post("/v1/completions", json={"prompt": "abc", "max_tokens": 1}))
        await fake.until(lambda: fake.added)
        assert (await http.post("/v1/completions", json={"prompt": "abc"})).status == 503
        fake.gate.set()
        await running
        text = await (await http.get("/metrics")).text()
    assert 'vllm:admission_rejections_total{model_name="fake",reason="max_num_queued_tokens"} 1.0' in text
    assert 'vllm:admission_rejections_total{model_name="fake",reason="max_num_queued_reqs"} 0.0' in text
