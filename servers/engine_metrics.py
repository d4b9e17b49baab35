"""The engine's own statistics as Prometheus metrics, read at each scrape; their names are the metrics' without prefix.

Also the names that older dashboards and autoscalers still ask for.
"""

from collections.abc import Iterator
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from pagedjax import AsyncEngine, Histogram

LABELS = ("model_name", "engine")

# Statistics of the engine that only grow; all others are gauges.
COUNTERS = frozenset(
    {
        "num_preemptions",
        "num_block_copies",
        "num_preemptions_swapped",
        "swap_out_blocks",
        "swap_out_bytes",
        "swap_in_blocks",
        "swap_in_bytes",
        "swap_failures",
        "external_prefix_cache_queries",
        "external_prefix_cache_hits",
        "prefix_cache_queries",
        "prefix_cache_hits",
        "prefix_cache_partial_block_misses",
        "prefix_cache_evictions",
        "prefix_cache_resumed_queries",
        "prefix_cache_resumed_hits",
        "prompt_tokens",
        "prompt_tokens_cached",
        "generation_tokens",
        "spec_decode_num_drafts",
        "spec_decode_num_draft_tokens",
        "spec_decode_num_accepted_tokens",
        "num_compilations_after_ready",
        "device_busy_seconds",
        "device_starved_iterations",
        "estimated_read_bytes_per_gpu",
    }
)

# Today's name, and the one that vLLM had for the same before.
OLD_NAMES = {
    "kv_cache_usage_perc": "gpu_cache_usage_perc",
    "prefix_cache_queries": "gpu_prefix_cache_queries",
    "prefix_cache_hits": "gpu_prefix_cache_hits",
}

PER_POSITION = "spec_decode_num_accepted_tokens_per_pos"  # one statistic a position, its number at the end

_TEXTS = {
    "spec_decode_num_drafts": "Times that drafts of a request were verified.",
    "spec_decode_num_draft_tokens": "Draft tokens that were verified.",
    "spec_decode_num_accepted_tokens": "Draft tokens that were accepted.",
    "spec_decode_draft_acceptance_rate": "Share of the verified draft tokens that were accepted, since the start.",
    PER_POSITION: "Draft tokens that were accepted, by their position in the draft.",
    "num_block_copies": "KV cache blocks copied because several completions of one prompt go on from them.",
    "num_requests_swapped": "Preempted requests whose blocks are in host memory, or on their way there.",
    "cpu_cache_usage_perc": "Share of the swap space that requests need, 1 is all of it; prefixes take what is left.",
    "num_preemptions_swapped": "Preemptions whose blocks went to host memory; others are computed again.",
    "swap_out_blocks": "Blocks copied to host memory, of preempted requests and of prefixes.",
    "swap_in_blocks": "Blocks copied back from host memory.",
    "swap_failures": "Copies between device and host that failed; what they should have brought is computed again.",
    "external_prefix_cache_queries": "Prompt tokens looked up in host memory, which the device did not have.",
    "external_prefix_cache_hits": "Prompt tokens found in host memory.",
    "device_busy_seconds": "Seconds in which the device had a step to work on, at most.",
    "device_starved_iterations": "Iterations that found the device with nothing left to do: the host was too slow.",
    "estimated_read_bytes_per_gpu": "Bytes of weights and KV cache that the steps had to read, once each.",
    "prefix_cache_partial_block_misses": "Cached tokens computed again because a hit is whole blocks.",
    "prefix_cache_evictions": "Cached blocks reused for other content.",
    "prefix_cache_resumed_hits": "Tokens that preempted requests found of themselves, apart from prefix_cache_hits.",
}


class EngineMetrics(Collector):
    """Reads an engine's statistics at each scrape."""

    def __init__(self, engine: AsyncEngine, labels: tuple[str, str]):
        self._engine = engine
        self._labels = labels

    def collect(self) -> Iterator[Metric]:
        """Yield one family a statistic and one a distribution."""
        stats = self._engine.stats()
        for name, value in stats.items():
            if name.startswith(PER_POSITION):
                continue
            yield self._family(name, name, value)
            if name in OLD_NAMES:
                yield self._family(name, OLD_NAMES[name], value)
        yield self._waiting_by_reason(stats["num_requests_waiting"])
        yield self._prompt_tokens_by_source(
            stats["prompt_tokens"], stats["prompt_tokens_cached"], stats.get("external_prefix_cache_hits", 0)
        )
        if any(name.startswith(PER_POSITION) for name in stats):
            yield self._accepted_by_position(stats)
        for name, histogram in self._engine.histograms().items():
            yield histogram_family(name, _text(name), histogram, self._labels)

    def _family(self, name: str, shown_name: str, value: float) -> Metric:
        kind = CounterMetricFamily if name in COUNTERS else GaugeMetricFamily
        family = kind(f"vllm:{shown_name}", _text(name), labels=LABELS)
        family.add_metric(self._labels, value)
        return family

    def _waiting_by_reason(self, num_waiting: float) -> Metric:
        family = GaugeMetricFamily(
            "vllm:num_requests_waiting_by_reason", "Waiting requests by what they wait for.", labels=(*LABELS, "reason")
        )
        family.add_metric((*self._labels, "capacity"), num_waiting)
        family.add_metric((*self._labels, "deferred"), 0)  # nothing else holds a request back here
        return family

    def _accepted_by_position(self, stats: dict[str, float]) -> Metric:
        family = CounterMetricFamily(f"vllm:{PER_POSITION}", _text(PER_POSITION), labels=(*LABELS, "position"))
        for name, value in stats.items():
            if name.startswith(PER_POSITION):
                family.add_metric((*self._labels, name.removeprefix(f"{PER_POSITION}_")), value)
        return family

    def _prompt_tokens_by_source(self, num_tokens: float, num_cached: float, num_from_host: float) -> Metric:
        family = CounterMetricFamily(
            "vllm:prompt_tokens_by_source", "Prompt tokens by where their KV came from.", labels=(*LABELS, "source")
        )
        family.add_metric((*self._labels, "local_compute"), num_tokens - num_cached)
        family.add_metric((*self._labels, "local_cache_hit"), num_cached - num_from_host)
        family.add_metric((*self._labels, "external_kv_transfer"), num_from_host)
        return family


def histogram_family(name: str, text: str, histogram: Histogram, labels: tuple[str, str]) -> Metric:
    """Return the metric of a distribution."""
    family = HistogramMetricFamily(f"vllm:{name}", text, labels=LABELS)
    bounds = [*(f"{bound:g}" for bound in histogram.bounds), "+Inf"]
    family.add_metric(labels, list(zip(bounds, accumulate(histogram.counts), strict=True)), histogram.sum)
    return family


def _text(name: str) -> str:
    return _TEXTS.get(name, f"The engine's {name.replace('_', ' ')}.")
