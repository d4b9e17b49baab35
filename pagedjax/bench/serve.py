"""`pagedjax bench serve`: drive an OpenAI-style server, ours or another, and time its streams from outside.

Requests arrive by a clock of their own, whether or not earlier ones were answered; --max-concurrency holds back those
that are too many at once. Prompts go out as token ids, except to a chat endpoint.
"""

import asyncio
import dataclasses
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from time import perf_counter
from typing import Any

import aiohttp
import numpy as np

from pagedjax.bench.arrivals import arrival_times
from pagedjax.bench.datasets import DatasetFlags, Sample, load_samples
from pagedjax.bench.load_driver import LoadDriver
from pagedjax.bench.result_file import write_json
from pagedjax.bench.serve_flags import LoadFlags, ResultFlags, ServerFlags, parse_pairs
from pagedjax.bench.serving_metrics import (
    figures,
    parse_goodput,
    parse_metrics,
    parse_percentiles,
    report_lines,
    without_details,
)
from pagedjax.config import EngineConfig
from pagedjax.errors import ConfigError
from pagedjax.text.tokenizer import Tokenizer, load_tokenizer

MAX_SHOWN_ERRORS = 10
CONFIGS = (ServerFlags, DatasetFlags, LoadFlags, ResultFlags)


def run(server: ServerFlags, dataset: DatasetFlags, load: LoadFlags, results: ResultFlags) -> int:
    """Measure once. Returns 1 if no request succeeded."""
    result = asyncio.run(benchmark(server, dataset, load))
    print("\n".join(lines_of(result, server, load)))
    if results.save_result or results.save_detailed:
        print(f"saved {save(result, server, load, results)}")
    return 0 if result["completed"] else 1


def lines_of(result: Mapping[str, Any], server: ServerFlags, load: LoadFlags) -> list[str]:
    """Return the report, with what went wrong before it."""
    errors = [error for error in result["errors"] if error][:MAX_SHOWN_ERRORS]
    lines = [f"Failed: {error}" for error in errors]
    if result["num_without_usage"]:
        lines.append(f"{result['num_without_usage']} answers had no usage; their tokens are counted by events")
    if result["num_at_once"]:
        lines.append(
            f"{result['num_at_once']} answers came in one event: their TTFT is that of the whole, TPOT and ITL cannot "
            "be measured. A server without a tokenizer streams ids where it is asked for them, ours with "
            """--extra-body '{"return_token_ids": true}'"""
        )
    if result["num_other_prompt_lens"]:
        lines.append(
            f"{result['num_other_prompt_lens']} prompts have another length by the server's usage than was sent"
        )
    if result["num_short_outputs"]:
        lines.append(f"{result['num_short_outputs']} outputs are shorter than asked for; --ignore-eos forbids that")
    return lines + report_lines(
        result,
        percentiles=parse_percentiles(server.metric_percentiles),
        metrics=parse_metrics(server.percentile_metrics),
        request_rate=load.request_rate,
        max_concurrency=load.max_concurrency,
    )


async def benchmark(server: ServerFlags, dataset: DatasetFlags, load: LoadFlags) -> dict[str, Any]:
    """Send the whole dataset and return the figures, with vLLM's keys, and what they were measured on.

    Raises:
      ConfigError: the server does not answer, or the dataset cannot be used.
    """
    tokenizer = load_tokenizer(EngineConfig(tokenizer=server.tokenizer)) if server.tokenizer else None
    samples = _samples(server, dataset, tokenizer, seed=server.seed)
    warm_ups: list[Sample] = []
    if server.num_warmups:
        small = dataclasses.replace(dataset, num_prompts=server.num_warmups)
        warm_ups = _samples(server, small, tokenizer, seed=server.seed + 1)
    rng = np.random.default_rng(server.seed)
    times = arrival_times(len(samples), rate=load.request_rate, burstiness=load.burstiness, rng=rng)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=30)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        model = await _model(session, server)
        driver = LoadDriver(session, server, model, tokenizer, load.max_concurrency)
        await driver.send_all(warm_ups, np.zeros(len(warm_ups)), "Warming up")
        outcomes, duration = await driver.send_all(samples, times, "Measuring")
    result = figures(
        outcomes,
        duration,
        percentiles=parse_percentiles(server.metric_percentiles),
        goodput=parse_goodput(server.goodput),
    )
    done = [pair for pair in zip(outcomes, samples, strict=True) if pair[0].error is None]
    result["num_short_outputs"] = sum(outcome.output_len < sample.output_len for outcome, sample in done)
    if server.is_chat:  # the template adds to what was sent
        done = []
    others = [1 for outcome, sample in done if sample.token_ids and outcome.prompt_len != len(sample.token_ids)]
    result["num_other_prompt_lens"] = len(others)
    return {**_setting(server, load, model, len(samples)), **result}


def save(result: Mapping[str, Any], server: ServerFlags, load: LoadFlags, results: ResultFlags) -> Path:
    """Write the figures to the file that the flags name and return its path."""
    kept = result if results.save_detailed else without_details(result)
    label = results.label or server.backend
    concurrency = "" if load.max_concurrency is None else f"-concurrency{load.max_concurrency}"
    model = str(result["model_id"]).split("/")[-1].replace(":", "-")
    name = f"{label}-{load.request_rate}qps{concurrency}-{model}-{result['date']}.json"
    directory = Path(results.result_dir or ".")
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / (results.result_filename or name)
    write_json(str(path), {**parse_pairs("metadata", results.metadata), "label": label, **kept})
    return path


def _samples(server: ServerFlags, dataset: DatasetFlags, tokenizer: Tokenizer | None, *, seed: int) -> list[Sample]:
    vocab_size = tokenizer.vocab_size if tokenizer is not None else server.vocab_size
    return load_samples(dataset, seed=seed, vocab_size=vocab_size, tokenizer=tokenizer, texts_suffice=True)


async def _model(session: aiohttp.ClientSession, server: ServerFlags) -> str:
    """Return the model to name once the server answers; if it was named, only wait for the server if asked to."""
    if server.model is not None and not server.ready_check_timeout_sec:
        return server.model
    until = perf_counter() + server.ready_check_timeout_sec
    while True:
        try:
            async with session.get(f"{server.base}/v1/models", headers=server.headers) as response:
                response.raise_for_status()
                return server.model or (await response.json())["data"][0]["id"]
        except (aiohttp.ClientError, OSError, ValueError, LookupError, TypeError) as error:
            if perf_counter() >= until:
                raise ConfigError(
                    f"{server.base}/v1/models gives no model: {error}; start the server, correct --host and --port, "
                    "or wait for it with --ready-check-timeout-sec"
                ) from error
        await asyncio.sleep(1.0)


def _setting(server: ServerFlags, load: LoadFlags, model: str, num_prompts: int) -> dict[str, Any]:
    return {
        "date": datetime.now().strftime("%Y%m%d-%H%M%S"),
        "backend": server.backend,
        "endpoint_type": server.backend,
        "model_id": model,
        "tokenizer_id": server.tokenizer,
        "num_prompts": num_prompts,
        "request_rate": load.request_rate if np.isfinite(load.request_rate) else "inf",
        "burstiness": load.burstiness if np.isfinite(load.burstiness) else "inf",
        "max_concurrency": load.max_concurrency,
    }
