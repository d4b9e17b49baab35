"""`pagedjax bench sweep`: `serve` at several request rates and concurrencies, in one table."""

import asyncio
import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pagedjax.bench.datasets import DatasetFlags
from pagedjax.bench.result_file import check_writable, write_json
from pagedjax.bench.serve import benchmark
from pagedjax.bench.serve_flags import LoadFlags, ServerFlags
from pagedjax.bench.serving_metrics import without_details
from pagedjax.config import check_range, option
from pagedjax.errors import ConfigError

COLUMNS = (
    "rate req/s", "concurrency", "failed", "req/s", "goodput", "output tok/s", "TTFT p50", "TTFT p99", "TPOT p50",
    "TPOT p99", "E2EL p50", "E2EL p99",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class SweepFlags:
    """The points to measure: each rate with each concurrency, and shares of the rate that saturates the server."""

    request_rate: tuple[float, ...] = option((float("inf"),), "Requests a second; inf sends all at once.", several=True)
    max_concurrency: tuple[int, ...] = option((), "Most requests at one time; no bound if unset.", several=True)
    saturation_share: tuple[float, ...] = option(
        (), "Rates as shares of the throughput with all requests sent at once, which is measured first.", several=True
    )
    prompts_per_concurrency: int | None = option(
        None, "Requests of a point for each of its concurrency, in place of --num-prompts."
    )
    burstiness: float = option(1.0, "1 is a Poisson process, less comes in bursts, inf is even.")
    output_json: str | None = option(None, "File for the figures of all points, as JSON.")

    def __post_init__(self) -> None:
        check_range(self, "prompts_per_concurrency", 1)
        if not all(share > 0 for share in self.saturation_share):
            raise ConfigError(f"saturation_share is {min(self.saturation_share)}; it must be above 0")
        if self.prompts_per_concurrency is not None and not self.max_concurrency:
            raise ConfigError("prompts_per_concurrency is given without max_concurrency; name the concurrencies")
        list(self.points())

    def points(self) -> Iterator[LoadFlags]:
        """Yield every point whose rate is known in advance."""
        for rate, concurrency in itertools.product(self.request_rate, self.max_concurrency or (None,)):
            yield LoadFlags(request_rate=rate, max_concurrency=concurrency, burstiness=self.burstiness)


CONFIGS = (ServerFlags, DatasetFlags, SweepFlags)


def run(server: ServerFlags, dataset: DatasetFlags, flags: SweepFlags) -> int:
    """Measure every point. Returns 1 if at one of them no request succeeded."""
    check_writable(flags.output_json)
    # every table row has both percentiles, whatever else is asked for
    server = dataclasses.replace(server, metric_percentiles=f"50,{server.metric_percentiles},99")
    print(_line(COLUMNS))
    results: list[dict[str, Any]] = []
    for load in _points(flags, results):
        results.append(_measure(server, dataset, flags, load, number=len(results)))
        print(_line(_row(results[-1])), flush=True)
    write_json(flags.output_json, {"results": results})
    return 0 if all(result["completed"] for result in results) else 1


def _points(flags: SweepFlags, results: list[dict[str, Any]]) -> Iterator[LoadFlags]:
    """Yield the points; `results` are those of the points before."""
    if flags.saturation_share:
        yield LoadFlags(burstiness=flags.burstiness)
        saturation = results[0]["request_throughput"]
        for share in flags.saturation_share:
            yield LoadFlags(request_rate=share * saturation, burstiness=flags.burstiness)
        if not flags.max_concurrency and flags.request_rate == (math.inf,):
            return  # measured already
    yield from flags.points()


def _measure(
    server: ServerFlags, dataset: DatasetFlags, flags: SweepFlags, load: LoadFlags, *, number: int
) -> dict[str, Any]:
    """Run one point, with prompts of its own: those of another could lie in the server's prefix cache."""
    if flags.prompts_per_concurrency is not None and load.max_concurrency is not None:
        num_prompts = flags.prompts_per_concurrency * load.max_concurrency
        dataset = dataclasses.replace(dataset, num_prompts=num_prompts)
    server = dataclasses.replace(server, seed=server.seed + 2 * number)  # the one between is for warming up
    return without_details(asyncio.run(benchmark(server, dataset, load)))


def _row(result: Mapping[str, Any]) -> list[str]:
    rate = result["request_rate"]
    times = [result[f"p{p}_{name}_ms"] for name in ("ttft", "tpot", "e2el") for p in (50, 99)]
    figures = [result["request_throughput"], result["request_goodput"], result["output_throughput"], *times]
    return [
        rate if isinstance(rate, str) else f"{rate:.2f}",
        str(result["max_concurrency"] or "-"),
        str(result["failed"]),
        *("-" if value is None else f"{value:,.2f}" for value in figures),
    ]


def _line(cells: tuple[str, ...] | list[str]) -> str:
    return "  ".join(cell.rjust(max(len(column), 9)) for cell, column in zip(cells, COLUMNS, strict=True))
