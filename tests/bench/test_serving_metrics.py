"""Figures of a serving measurement, against outcomes whose figures are known by hand."""

import pytest

from pagedjax.bench.client import Outcome
from pagedjax.bench.serving_metrics import (
    figures,
    parse_goodput,
    parse_metrics,
    parse_percentiles,
    report_lines,
    without_details,
)
from pagedjax.errors import ConfigError

# Two answers and a failure in four seconds. TPOT: (1.0 - 0.2) / 4 = 0.2 and (2.5 - 0.5) / 2 = 1.0.
OUTCOMES = [
    Outcome(100.0, prompt_len=10, output_len=5, ttft=0.2, latency=1.0, itls=[0.2, 0.2, 0.2, 0.2], has_usage=True),
    Outcome(100.5, prompt_len=30, output_len=3, ttft=0.5, latency=2.5, itls=[0.5, 1.5], has_usage=True),
    Outcome(100.6, prompt_len=20, error="503: busy"),
]


def of(outcomes=OUTCOMES, *, percentiles=(50, 99.5), goodput=None):
    return figures(outcomes, 4.0, percentiles=percentiles, goodput=goodput or {})


def test_counts_and_rates_are_of_the_requests_that_succeeded():
    result = of()
    assert (result["completed"], result["failed"]) == (2, 1)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (40, 8)
    assert (result["request_throughput"], result["output_throughput"]) == (0.5, 2.0)
    assert result["total_token_throughput"] == 12.0


def test_times_are_in_milliseconds_with_linear_percentiles():
    result = of()
    assert (result["mean_ttft_ms"], result["median_ttft_ms"]) == pytest.approx((350, 350))
    assert (result["std_ttft_ms"], result["p99.5_ttft_ms"]) == pytest.approx((150, 498.5))
    assert (result["mean_tpot_ms"], result["p50_tpot_ms"]) == pytest.approx((600, 600))
    assert (result["mean_itl_ms"], result["median_itl_ms"]) == pytest.approx((2800 / 6, 200))
    assert result["mean_e2el_ms"] == pytest.approx(1750)


def test_the_peaks_are_of_one_second_and_of_one_moment():
    """Tokens after 0.2, 0.4, 0.6, 0.8, 1.0 and 1.0, 1.5, 3.0 seconds; both requests run from 0.5 to 1.0."""
    result = of()
    assert result["max_output_tokens_per_s"] == 4
    assert result["max_concurrent_requests"] == 2
    later = Outcome(101.0, output_len=1, ttft=0.1, latency=0.1)
    assert of([OUTCOMES[0], later])["max_concurrent_requests"] == 1


@pytest.mark.parametrize(
    ("goodput", "good"),
    [
        ({"ttft": 200.0}, 1),
        ({"ttft": 199.0}, 0),
        ({"ttft": 500.0}, 2),
        ({"ttft": 500.0, "tpot": 999.0}, 1),
        ({"tpot": 1000.0}, 2),
        ({"ttft": 500.0, "tpot": 1000.0, "e2el": 2499.0}, 1),
    ],
)
def test_goodput_counts_requests_that_meet_every_objective(goodput, good):
    assert of(goodput=goodput)["request_goodput"] == pytest.approx(good / 4)


def test_an_output_of_one_token_meets_any_tpot_and_has_none():
    result = of([Outcome(0.0, output_len=1, ttft=0.1, latency=0.1)], goodput={"tpot": 0.0})
    assert result["request_goodput"] == 0.25
    assert result["mean_tpot_ms"] is None
    assert result["p50_itl_ms"] is None


def test_without_objectives_there_is_no_goodput():
    assert of()["request_goodput"] is None


def test_the_report_is_that_of_vllm():
    lines = report_lines(
        of(goodput={"ttft": 200.0}),
        percentiles=[50, 99.5],
        metrics=["ttft", "itl"],
        request_rate=8.0,
        max_concurrency=4,
    )
    assert lines == [
        "============ Serving Benchmark Result ============",
        "Successful requests:                     2         ",
        "Failed requests:                         1         ",
        "Maximum request concurrency:             4         ",
        "Request rate configured (RPS):           8.00      ",
        "Benchmark duration (s):                  4.00      ",
        "Total input tokens:                      40        ",
        "Total generated tokens:                  8         ",
        "Request throughput (req/s):              0.50      ",
        "Request goodput (req/s):                 0.25      ",
        "Output token throughput (tok/s):         2.00      ",
        "Peak output token throughput (tok/s):    4.00      ",
        "Peak concurrent requests:                2.00      ",
        "Total Token throughput (tok/s):          12.00     ",
        "---------------Time to First Token----------------",
        "Mean TTFT (ms):                          350.00    ",
        "Median TTFT (ms):                        350.00    ",
        "P50 TTFT (ms):                           350.00    ",
        "P99.5 TTFT (ms):                         498.50    ",
        "---------------Inter-token Latency----------------",
        "Mean ITL (ms):                           466.67    ",
        "Median ITL (ms):                         200.00    ",
        "P50 ITL (ms):                            200.00    ",
        "P99.5 ITL (ms):                          1475.00   ",
        "==================================================",
    ]


def test_if_all_fail_the_report_has_counts_and_no_times():
    result = of([OUTCOMES[2]])
    lines = report_lines(result, percentiles=[99], metrics=["ttft"], request_rate=float("inf"), max_concurrency=None)
    assert lines[1].split() == ["Successful", "requests:", "0"]
    assert not any("TTFT" in line for line in lines)


def test_details_are_one_entry_a_request():
    result = of()
    details = {name: value for name, value in result.items() if isinstance(value, list)}
    assert {len(value) for value in details.values()} == {3}
    assert details["errors"] == ["", "", "503: busy"]
    assert without_details(result).keys() == result.keys() - details.keys()


def test_objectives_percentiles_and_metrics_are_read_from_words():
    assert parse_goodput(["ttft:200", "e2el:5e3"]) == {"ttft": 200.0, "e2el": 5000.0}
    assert parse_percentiles("50,99.9") == [50.0, 99.9]
    assert parse_metrics("itl,ttft") == ["itl", "ttft"]


@pytest.mark.parametrize("pair", ["itl:5", "ttft", "ttft:x", "ttft:-1", "ttft:nan"])
def test_a_wrong_objective_is_refused(pair):
    with pytest.raises(ConfigError, match=r"goodput has .*; write NAME:MILLISECONDS"):
        parse_goodput([pair])


def test_wrong_percentiles_and_metrics_are_refused():
    with pytest.raises(ConfigError, match=r"metric_percentiles is '101'; write numbers from 0 to 100"):
        parse_percentiles("101")
    with pytest.raises(ConfigError, match="metric_percentiles is 'p99'"):
        parse_percentiles("p99")
    with pytest.raises(ConfigError, match="percentile_metrics has 'ttfb'; choose of ttft, tpot, itl, e2el"):
        parse_metrics("ttft,ttfb")
