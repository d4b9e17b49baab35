"""Prometheus metrics under vLLM's names.

Counts and times of requests come from their outputs, which the engine shows to `observe_output`; everything else is
read from the engine's statistics at each scrape. Owns its registry and what must be remembered of running requests.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client import Histogram as PrometheusHistogram
from prometheus_client.core import Metric
from prometheus_client.gc_collector import GCCollector
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from pagedjax import AsyncEngine, EngineConfig, EngineView, Histogram, RequestMetrics, RequestOutput, SamplingParams
from servers.engine_metrics import LABELS, EngineMetrics, histogram_family
from servers.latencies import Latencies
from servers.open_requests import REJECTION_REASONS

ENGINE_LABEL = "0"

_FIRST_TOKEN_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
_TOKEN_BUCKETS = (  # vLLM's begin at 10 ms
    0.001, 0.002, 0.003, 0.004, 0.005, 0.006, 0.008, 0.01, 0.015, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5,
    0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
)  # fmt: skip
_REQUEST_BUCKETS = (  # vLLM's begin at 0.3 s
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40,
    50, 60, 120, 240, 480, 960, 1920, 7680,
)  # fmt: skip

# Name, and the two RequestMetrics between which the time of a finished request runs.
_TIMES = (
    ("e2e_request_latency_seconds", "arrival_time", "finished_time"),
    ("request_queue_time_seconds", "arrival_time", "first_scheduled_time"),
    ("request_prefill_time_seconds", "first_scheduled_time", "first_token_time"),
    ("request_decode_time_seconds", "first_token_time", "last_token_time"),
    ("request_inference_time_seconds", "first_scheduled_time", "last_token_time"),
)


@dataclass
class _RunningRequest:
    params: SamplingParams
    tokens_by_completion: dict[int, int]
    last_token_time: float | None = None
    finish_reason: str = "abort"

    @property
    def num_tokens(self) -> int:
        return sum(self.tokens_by_completion.values())

    @property
    def longest(self) -> int:
        """Tokens of the longest completion."""
        return max(self.tokens_by_completion.values(), default=0)


class ServerMetrics:
    """All metrics of one server."""

    def __init__(self, engine: AsyncEngine):
        self.registry = CollectorRegistry()
        self.latencies = Latencies()
        self._labels = (engine.config.model_name, ENGINE_LABEL)
        self._running: dict[str, _RunningRequest] = {}
        assert engine.config.max_model_len is not None, "the engine resolves it"
        self._declare(engine.config.max_model_len)
        self.registry.register(EngineMetrics(engine, self._labels))
        self._token_times = _TokenTimes(self._labels)
        self.registry.register(self._token_times)
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        GCCollector(registry=self.registry)
        engine.add_observer(self.observe_output)

    def exposition(self) -> bytes:
        """Return everything in Prometheus' text format."""
        return generate_latest(self.registry)

    def show_cache(self, config: EngineConfig, view: EngineView) -> None:
        """Add the cache's options and its number of blocks; call it once."""
        names = (
            "block_size",
            "enable_prefix_caching",
            "gpu_memory_utilization",
            "num_gpu_blocks_override",
            "swap_space",
        )
        options = {name: str(getattr(config, name)) for name in names}
        labels = options | {"num_gpu_blocks": str(len(view.num_block_refs)), "engine": ENGINE_LABEL}
        info = Gauge("vllm:cache_config_info", "The cache's options and size.", tuple(labels), registry=self.registry)
        info.labels(**labels).set(1)

    def start_request(self, request_id: str, params: SamplingParams) -> None:
        """Remember a request that was handed to the engine."""
        self._running[request_id] = _RunningRequest(params, {})

    def forget_request(self, request_id: str) -> None:
        """Count nothing for a request that the engine refused."""
        self._running.pop(request_id, None)

    def count_rejection(self, reason: str) -> None:
        """Count a request that found the queue full; `reason` is the flag that bounds it."""
        self._rejections.labels(self._labels[0], reason).inc()

    def observe_output(self, output: RequestOutput) -> None:
        """Take in a DELTA or final output of a request that was started here."""
        request = self._running.get(output.request_id)
        if request is None:
            return
        for completion in output.outputs:
            old = request.tokens_by_completion.get(completion.index, 0)
            request.tokens_by_completion[completion.index] = old + len(completion.token_ids)
            request.finish_reason = completion.finish_reason or request.finish_reason
        if output.metrics is not None:
            self._observe_tokens(request, output.metrics)
        if output.finished:
            del self._running[output.request_id]
            self._observe_finished(request, output)

    def _observe_tokens(self, request: _RunningRequest, times: RequestMetrics) -> None:
        if times.first_token_time is None or times.last_token_time is None:
            return
        if request.last_token_time is None:
            self._first_token.observe(times.first_token_time - times.arrival_time)
            self.latencies.first_token.append(times.first_token_time - times.arrival_time)
            self._observe_untold_tokens(request, times.last_token_time - times.first_token_time)
        elif times.last_token_time > request.last_token_time:
            seconds = times.last_token_time - request.last_token_time
            self._token_times.between_tokens.observe(seconds)
            self.latencies.between_tokens.append(seconds)
        request.last_token_time = times.last_token_time

    def _observe_untold_tokens(self, request: _RunningRequest, seconds: float) -> None:
        """Count the tokens that came before a request's first output: all of them, where it does not stream."""
        num_intervals = request.longest - 1
        if seconds > 0 and num_intervals > 0:
            self._token_times.between_tokens.observe(seconds / num_intervals, num_intervals)
            self.latencies.between_tokens.extend([seconds / num_intervals] * num_intervals)

    def _observe_finished(self, request: _RunningRequest, output: RequestOutput) -> None:
        self._finished.labels(*self._labels, request.finish_reason).inc()
        if output.error is not None and request.finish_reason != "timeout":
            self._corrupted.inc()
        self._prefill_tokens.observe(len(output.prompt_token_ids) - output.num_cached_tokens)
        self._prompt_tokens.observe(len(output.prompt_token_ids))
        self._generation_tokens.observe(request.num_tokens)
        self._max_generation_tokens.observe(request.longest)
        self._params_n.observe(request.params.n)
        if request.params.max_tokens is not None:
            self._params_max_tokens.observe(request.params.max_tokens)
        if output.metrics is not None:
            self._observe_times(request, output.metrics)

    def _observe_times(self, request: _RunningRequest, times: RequestMetrics) -> None:
        self._preemptions.observe(times.num_preemptions)
        for histogram, start, end in self._times:
            began, ended = getattr(times, start), getattr(times, end)
            if began is not None and ended is not None:
                histogram.observe(ended - began)
        if times.finished_time is not None:
            self.latencies.whole_request.append(times.finished_time - times.arrival_time)
        if request.longest > 1 and times.first_token_time is not None and times.last_token_time is not None:
            self._per_token.observe((times.last_token_time - times.first_token_time) / (request.longest - 1))

    def _declare(self, max_model_len: int) -> None:
        counts = tuple(decade * step for decade in (1, 10, 100, 1000, 10**4, 10**5, 10**6) for step in (1, 2, 5))
        counts = tuple(count for count in counts if count <= max_model_len)
        self._finished = Counter(
            "vllm:request_success", "Finished requests.", (*LABELS, "finished_reason"), registry=self.registry
        )
        for reason in ("stop", "length", "abort", "timeout", "error"):  # a series that appears late has no rate
            self._finished.labels(*self._labels, reason)
        self._corrupted = Counter(
            "vllm:corrupted_requests", "Requests whose logits were not finite.", LABELS, registry=self.registry
        ).labels(*self._labels)
        self._rejections = Counter(
            "vllm:admission_rejections", "Requests that found the queue full.", ("model_name", "reason"),
            registry=self.registry,
        )  # fmt: skip
        for reason in REJECTION_REASONS:
            self._rejections.labels(self._labels[0], reason)
        self._first_token = self._histogram(
            "time_to_first_token_seconds", "From arrival to the first token.", _FIRST_TOKEN_BUCKETS
        )
        self._per_token = self._histogram(
            "request_time_per_output_token_seconds", "Mean of one request, after its first token.", _TOKEN_BUCKETS
        )
        self._times = [
            (self._histogram(name, f"From {start} to {end}.".replace("_", " "), _REQUEST_BUCKETS), start, end)
            for name, start, end in _TIMES
        ]
        self._prompt_tokens = self._histogram("request_prompt_tokens", "Prompt tokens of a request.", counts)
        self._generation_tokens = self._histogram("request_generation_tokens", "Generated tokens of a request.", counts)
        self._max_generation_tokens = self._histogram(
            "request_max_num_generation_tokens", "Tokens of the longest completion of a request.", counts
        )
        self._params_max_tokens = self._histogram("request_params_max_tokens", "max_tokens as asked for.", counts)
        self._prefill_tokens = self._histogram(
            "request_prefill_kv_computed_tokens", "Prompt tokens of a request that were not cached.", counts
        )
        self._params_n = self._histogram("request_params_n", "n as asked for.", (1, 2, 5, 10, 20))
        self._preemptions = self._histogram(
            "request_num_preemptions", "Preemptions of a request.", (0, 1, 2, 3, 4, 5, 10, 20)
        )

    def _histogram(self, name: str, text: str, buckets: tuple[float | int, ...]) -> PrometheusHistogram:
        family = PrometheusHistogram(f"vllm:{name}", text, LABELS, buckets=buckets, registry=self.registry)
        return family.labels(*self._labels)


class _TokenTimes(Collector):
    """Times between tokens: counted for every token, so without the cost of Prometheus' own histogram.

    Shown under today's name and under the one that older dashboards ask for.
    """

    def __init__(self, labels: tuple[str, str]):
        self.between_tokens = Histogram(_TOKEN_BUCKETS)
        self._labels = labels

    def collect(self) -> Iterator[Metric]:
        """Yield the one distribution under both names."""
        text = "Between consecutive outputs of streamed requests; of others the mean, once a token after the first."
        for name in ("inter_token_latency_seconds", "time_per_output_token_seconds"):
            yield histogram_family(name, text, self.between_tokens, self._labels)
