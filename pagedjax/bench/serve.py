"""`pagedjax bench serve`: drive an OpenAI-style server, ours or another, and time its streams from outside.

Requests arrive by a clock of their own, whether or not earlier ones were answered; --max-concurrency holds back those
that are too many at once. Prompts go out as token ids, except to a chat endpoint.
"""

import asyncio
import contextlib
import dataclasses
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

import aiohttp
import numpy as np
from tqdm import tqdm

from pagedjax.bench.arrivals import arrival_times
from pagedjax.bench.client import CHAT_SUFFIX, Outcome, send
from pagedjax.bench.datasets import DatasetFlags, Sample, load_samples
from pagedjax.bench.result_file import write_json
from pagedjax.bench.serving_metrics import (
    figures,
    parse_goodput,
    parse_metrics,
    parse_percentiles,
    report_lines,
    without_details,
)
from pagedjax.config import EngineConfig, check_range, option
from pagedjax.errors import ConfigError
from pagedjax.text.tokenizer import Tokenizer, load_tokenizer

SAMPLING_FIELDS = (
    "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty",
)  # fmt: skip
MAX_SHOWN_ERRORS = 10


@dataclass(frozen=True, kw_only=True)
class ServerFlags:
    """Which server, what every request says, and what is reported."""

    backend: Literal["openai", "openai-chat", "vllm"] = option("openai", "Completions (also as 'vllm') or chats.")
    base_url: str | None = option(None, "Address of the server, in place of --host and --port.")
    host: str = option("127.0.0.1", "Host of the server.")
    port: int = option(8000, "Port of the server.")
    endpoint: str | None = option(None, "Path of the requests; that of --backend if unset.")
    header: tuple[str, ...] = option((), "HTTP headers as KEY=VALUE; OPENAI_API_KEY adds its own.", several=True)
    model: str | None = option(None, "Model that requests name; the first that the server lists if unset.")
    tokenizer: str | None = option(None, "Directory or hub name of the tokenizer, which texts need.")
    vocab_size: int = option(10000, "Random token ids are below this, where there is no tokenizer.")
    seed: int = option(0, "Seed of prompts and arrivals.")
    ignore_eos: bool = option(False, "Ask for each output at its full length.")
    temperature: float | None = option(None, "Randomness; 0 is greedy. What is unset here is the server's default.")
    top_p: float | None = option(None, "Keep the most likely tokens that reach this probability together.")
    top_k: int | None = option(None, "Keep this many of the most likely tokens.")
    min_p: float | None = option(None, "Drop tokens below this share of the most likely one's probability.")
    frequency_penalty: float | None = option(None, "Penalty for each time a token was generated.")
    presence_penalty: float | None = option(None, "Penalty for tokens that were generated.")
    repetition_penalty: float | None = option(None, "Above 1 makes tokens that were seen less likely.")
    extra_body: dict[str, Any] | None = option(None, "More fields for each request, as a JSON object.")
    num_warmups: int = option(0, "Requests before measuring, with prompts of their own.")
    ready_check_timeout_sec: int = option(0, "Seconds to wait for a server that does not answer yet.")
    goodput: tuple[str, ...] = option((), "Objectives of a request, such as ttft:200 tpot:30 (ms).", several=True)
    percentile_metrics: str = option("ttft,tpot,itl,e2el", "Metrics to report, of ttft, tpot, itl and e2el.")
    metric_percentiles: str = option("99", "Percentiles of these metrics, with commas between.")
    disable_tqdm: bool = option(False, "No progress bar.")

    def __post_init__(self) -> None:
        check_range(self, "vocab_size", 1)
        check_range(self, "num_warmups", 0)
        check_range(self, "ready_check_timeout_sec", 0)
        parse_goodput(self.goodput)
        parse_metrics(self.percentile_metrics)
        parse_percentiles(self.metric_percentiles)
        _pairs("header", self.header)

    @property
    def base(self) -> str:
        return (self.base_url or f"http://{self.host}:{self.port}").rstrip("/")

    @property
    def url(self) -> str:
        return self.base + (self.endpoint or ("/v1/chat/completions" if self.is_chat else "/v1/completions"))

    @property
    def is_chat(self) -> bool:
        return self.backend == "openai-chat" or (self.endpoint or "").endswith(CHAT_SUFFIX)

    @property
    def headers(self) -> dict[str, str]:
        key = os.environ.get("OPENAI_API_KEY")
        return ({"Authorization": f"Bearer {key}"} if key else {}) | _pairs("header", self.header)


@dataclass(frozen=True, kw_only=True)
class LoadFlags:
    """How requests arrive."""

    request_rate: float = option(float("inf"), "Requests a second; inf sends all at once.")
    burstiness: float = option(1.0, "1 is a Poisson process, less comes in bursts, inf is even.")
    max_concurrency: int | None = option(None, "Most requests at one time; those above it wait in the client.")

    def __post_init__(self) -> None:
        check_range(self, "max_concurrency", 1)
        for name in ("request_rate", "burstiness"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be above 0")


@dataclass(frozen=True, kw_only=True)
class ResultFlags:
    """Where the figures go."""

    label: str | None = option(None, "Name of the measurement in the result; --backend if unset.")
    metadata: tuple[str, ...] = option((), "Facts to keep in the result, as KEY=VALUE.", several=True)
    save_result: bool = option(False, "Write the figures to a JSON file.")
    save_detailed: bool = option(False, "Write times, lengths, texts and errors of each request too.")
    result_dir: str | None = option(None, "Directory of the file; the current one if unset.")
    result_filename: str | None = option(None, "Name of the file; made of label, rate, model and time if unset.")

    def __post_init__(self) -> None:
        _pairs("metadata", self.metadata)


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
        driver = _Driver(session, server, model, tokenizer, load.max_concurrency)
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
    result["num_other_prompt_lens"] = (
        0
        if server.is_chat
        else sum(bool(sample.token_ids) and outcome.prompt_len != len(sample.token_ids) for outcome, sample in done)
    )
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
    write_json(str(path), {**_pairs("metadata", results.metadata), "label": label, **kept})
    return path


class _Driver:
    """Sends requests at their times."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        server: ServerFlags,
        model: str,
        tokenizer: Tokenizer | None,
        max_concurrency: int | None,
    ):
        self._session, self._server, self._model, self._tokenizer = session, server, model, tokenizer
        self._turns = contextlib.nullcontext() if max_concurrency is None else asyncio.Semaphore(max_concurrency)

    async def send_all(
        self, samples: Sequence[Sample], times: np.ndarray, description: str
    ) -> tuple[list[Outcome], float]:
        """Send each sample at its time after now, and return what became of them and the seconds until all were."""
        is_quiet = self._server.disable_tqdm or not samples or not sys.stderr.isatty()
        bodies = [self._body(sample) for sample in samples]
        prompt_lens = [len(sample.token_ids) for sample in samples]
        began, tasks = perf_counter(), []
        with tqdm(total=len(samples), desc=description, unit="request", disable=is_quiet, leave=False) as progress:
            for body, prompt_len, time in zip(bodies, prompt_lens, (began + times).tolist(), strict=True):
                delay = time - perf_counter()
                if delay > 0:
                    await asyncio.sleep(delay)
                tasks.append(asyncio.create_task(self._send(body, prompt_len, time, progress)))
            outcomes = await asyncio.gather(*tasks)
        return list(outcomes), perf_counter() - began

    async def _send(self, body: dict[str, Any], prompt_len: int, arrival_time: float, progress: tqdm) -> Outcome:
        async with self._turns:
            url, headers = self._server.url, self._server.headers
            outcome = await send(self._session, url, body, headers=headers, prompt_len=prompt_len)
        outcome.queue_time = outcome.start_time - arrival_time
        progress.update()
        return outcome

    def _body(self, sample: Sample) -> dict[str, Any]:
        given = {name: value for name in SAMPLING_FIELDS if (value := getattr(self._server, name)) is not None}
        options = {"stream": True, "stream_options": {"include_usage": True}, **given}
        if self._server.ignore_eos:
            options["ignore_eos"] = True
        return {
            "model": self._model,
            **self._prompt(sample),
            **options,
            **(self._server.extra_body or {}),
        }

    def _prompt(self, sample: Sample) -> dict[str, Any]:
        if not self._server.is_chat:
            return {"prompt": sample.token_ids or sample.text, "max_tokens": sample.output_len}
        text = sample.text
        if text is None:
            if self._tokenizer is None:
                raise ConfigError("a chat needs texts and the prompts are token ids; name a tokenizer: --tokenizer")
            text = self._tokenizer.decode(sample.token_ids, skip_special_tokens=True)
        return {"messages": [{"role": "user", "content": text}], "max_completion_tokens": sample.output_len}


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


def _pairs(flag: str, words: Sequence[str]) -> dict[str, str]:
    pairs = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not (key and equals):
            raise ConfigError(f"{flag} has {word!r:.40}; write KEY=VALUE")
        pairs[key] = value
    return pairs
