"""From the outcomes of all requests to the figures of a serving measurement, under vLLM's names and in its layout.

Times come in seconds and leave in milliseconds. Failed requests count as failed and nowhere else.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pagedjax.bench.client import Outcome
from pagedjax.errors import ConfigError

METRICS = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
}
OBJECTIVES = ("ttft", "tpot", "e2el")  # what goodput may be asked of: one value a request
DETAILS = (
    "input_lens",
    "output_lens",
    "start_times",
    "queue_times",
    "ttfts",
    "itls",
    "latencies",
    "errors",
    "generated_texts",
)
WIDTH = 50


def parse_goodput(pairs: Sequence[str]) -> dict[str, float]:
    """Read "ttft:200" and so on, in milliseconds.

    Raises:
      ConfigError: a pair is malformed or names no objective.
    """
    goodput = {}
    for pair in pairs:
        name, _, value = pair.partition(":")
        try:
            limit = float(value)
        except ValueError:
            limit = -1.0
        if name not in OBJECTIVES or not limit >= 0:
            raise ConfigError(
                f"goodput has {pair!r:.40}; write NAME:MILLISECONDS with a name of {', '.join(OBJECTIVES)}"
            )
        goodput[name] = limit
    return goodput


def parse_percentiles(text: str) -> list[float]:
    """Read "50,99.9".

    Raises:
      ConfigError: a value is no number from 0 to 100.
    """
    try:
        percentiles = [float(word) for word in text.split(",")]
    except ValueError:
        percentiles = [-1.0]
    if not all(0 <= one <= 100 for one in percentiles):
        raise ConfigError(f"metric_percentiles is {text!r:.40}; write numbers from 0 to 100 with commas between")
    return percentiles


def parse_metrics(text: str) -> list[str]:
    """Read "ttft,tpot".

    Raises:
      ConfigError: a name is unknown.
    """
    names = text.split(",")
    unknown = [name for name in names if name not in METRICS]
    if unknown:
        raise ConfigError(f"percentile_metrics has {unknown[0]!r:.40}; choose of {', '.join(METRICS)}")
    return names


def figures(
    outcomes: Sequence[Outcome], duration: float, *, percentiles: Sequence[float], goodput: Mapping[str, float]
) -> dict[str, Any]:
    """Return every figure by vLLM's key. `duration` is from the first request's arrival to the last answer's end."""
    done = [outcome for outcome in outcomes if outcome.error is None]
    num_input, num_output = (sum(getattr(one, name) for one in done) for name in ("prompt_len", "output_len"))
    good = sum(_is_good(outcome, goodput) for outcome in done)
    result: dict[str, Any] = {
        "duration": duration,
        "completed": len(done),
        "failed": len(outcomes) - len(done),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(done) / duration,
        "request_goodput": good / duration if goodput else None,
        "output_throughput": num_output / duration,
        "total_token_throughput": (num_input + num_output) / duration,
        "max_output_tokens_per_s": _peak_tokens_per_second(done),
        "max_concurrent_requests": _peak_concurrency(done),
        "num_without_usage": sum(not outcome.has_usage for outcome in done),
        "num_at_once": sum(outcome.came_at_once for outcome in done),
    }
    result |= _details(outcomes)
    values = {
        "ttft": [outcome.ttft for outcome in done],
        "tpot": [outcome.tpot for outcome in done if outcome.tpot is not None],
        "itl": [itl for outcome in done for itl in outcome.itls],
        "e2el": [outcome.latency for outcome in done],
    }
    for name, seconds in values.items():
        result |= _summary(name, np.array(seconds) * 1e3, percentiles)
    return result


def report_lines(
    result: Mapping[str, Any],
    *,
    percentiles: Sequence[float],
    metrics: Sequence[str],
    request_rate: float,
    max_concurrency: int | None,
) -> list[str]:
    """Return vLLM's report."""
    lines = [
        f"{' Serving Benchmark Result ':=^{WIDTH}}",
        _line("Successful requests:", result["completed"]),
        _line("Failed requests:", result["failed"]),
    ]
    if max_concurrency is not None:
        lines.append(_line("Maximum request concurrency:", max_concurrency))
    if np.isfinite(request_rate):
        lines.append(_line("Request rate configured (RPS):", float(request_rate)))
    lines += [
        _line("Benchmark duration (s):", result["duration"]),
        _line("Total input tokens:", result["total_input_tokens"]),
        _line("Total generated tokens:", result["total_output_tokens"]),
        _line("Request throughput (req/s):", result["request_throughput"]),
    ]
    if result["request_goodput"] is not None:
        lines.append(_line("Request goodput (req/s):", result["request_goodput"]))
    lines += [
        _line("Output token throughput (tok/s):", result["output_throughput"]),
        _line("Peak output token throughput (tok/s):", result["max_output_tokens_per_s"]),
        _line("Peak concurrent requests:", float(result["max_concurrent_requests"])),
        _line("Total Token throughput (tok/s):", result["total_token_throughput"]),
    ]
    for name in metrics:
        if result[f"mean_{name}_ms"] is None:
            continue
        short, long = METRICS[name]
        lines.append(f"{long:-^{WIDTH}}")
        lines += [_line(f"{kind.capitalize()} {short} (ms):", result[f"{kind}_{name}_ms"]) for kind in _KINDS[:2]]
        lines += [_line(f"P{word} {short} (ms):", result[f"p{word}_{name}_ms"]) for word in map(_word, percentiles)]
    return [*lines, "=" * WIDTH]


def without_details(result: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out the lists with an entry for each request."""
    return {name: value for name, value in result.items() if name not in DETAILS}


_KINDS = ("mean", "median", "std")


def _details(outcomes: Sequence[Outcome]) -> dict[str, list[Any]]:
    return {
        "input_lens": [outcome.prompt_len for outcome in outcomes],
        "output_lens": [outcome.output_len for outcome in outcomes],
        "start_times": [outcome.start_time for outcome in outcomes],
        "queue_times": [outcome.queue_time for outcome in outcomes],
        "ttfts": [outcome.ttft for outcome in outcomes],
        "itls": [outcome.itls for outcome in outcomes],
        "latencies": [outcome.latency for outcome in outcomes],
        "errors": [outcome.error or "" for outcome in outcomes],
        "generated_texts": [outcome.text for outcome in outcomes],
    }


def _is_good(outcome: Outcome, goodput: Mapping[str, float]) -> bool:
    """Whether a request met every objective; one without a second token meets any TPOT."""
    seconds = {"ttft": outcome.ttft, "tpot": outcome.tpot or 0.0, "e2el": outcome.latency}
    return all(1e3 * seconds[name] <= limit for name, limit in goodput.items())


def _summary(name: str, values: np.ndarray, percentiles: Sequence[float]) -> dict[str, float | None]:
    """Mean, median, standard deviation and percentiles of `values`; None where there was nothing to measure."""
    result = {f"{kind}_{name}_ms": float(getattr(np, kind)(values)) if len(values) else None for kind in _KINDS}
    for one in percentiles:
        result[f"p{_word(one)}_{name}_ms"] = float(np.percentile(values, one)) if len(values) else None
    return result


def _word(percentile: float) -> str:
    return str(int(percentile)) if percentile == int(percentile) else str(percentile)


def _peak_tokens_per_second(outcomes: Sequence[Outcome]) -> float:
    """Most events with a token in any whole second since the first request was sent."""
    if not outcomes:
        return 0.0
    first = min(outcome.start_time for outcome in outcomes)
    times = [outcome.start_time - first + outcome.ttft + np.cumsum([0.0, *outcome.itls]) for outcome in outcomes]
    return float(np.bincount(np.concatenate(times).astype(np.int64)).max())


def _peak_concurrency(outcomes: Sequence[Outcome]) -> int:
    """Most requests that had been sent and not answered at one time; one that ends as another begins is not with it."""
    starts = [(outcome.start_time, 1) for outcome in outcomes]
    ends = [(outcome.start_time + outcome.latency, -1) for outcome in outcomes]
    changes = [change for _, change in sorted(starts + ends)]
    return int(np.cumsum(changes).max()) if changes else 0


def _line(name: str, value: float) -> str:
    return f"{name:<40} {value:<10.2f}" if isinstance(value, float) else f"{name:<40} {value:<10}"
