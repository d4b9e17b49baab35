"""Flags of measurements of a server: which server, how requests arrive, where the figures go."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pagedjax.bench.client import CHAT_SUFFIX
from pagedjax.bench.serving_metrics import parse_goodput, parse_metrics, parse_percentiles
from pagedjax.config import check_range, option
from pagedjax.errors import ConfigError

SAMPLING_FIELDS = (
    "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty",
)  # fmt: skip


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
        parse_pairs("header", self.header)

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
        return ({"Authorization": f"Bearer {key}"} if key else {}) | parse_pairs("header", self.header)


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
        parse_pairs("metadata", self.metadata)


def parse_pairs(flag: str, words: Sequence[str]) -> dict[str, str]:
    """Read KEY=VALUE words.

    Raises:
      ConfigError: a word is none.
    """
    pairs = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not (key and equals):
            raise ConfigError(f"{flag} has {word!r:.40}; write KEY=VALUE")
        pairs[key] = value
    return pairs
