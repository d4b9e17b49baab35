"""The statistics line: what it says and when it is silent."""

from servers.stats_log import StatsLog

IDLE = {
    "prompt_tokens": 0.0,
    "generation_tokens": 0.0,
    "prefix_cache_queries": 0.0,
    "prefix_cache_hits": 0.0,
    "num_requests_running": 0.0,
    "num_requests_waiting": 0.0,
    "kv_cache_usage_perc": 0.0,
}
BUSY = {
    "prompt_tokens": 1000.0,
    "generation_tokens": 250.0,
    "prefix_cache_queries": 1000.0,
    "prefix_cache_hits": 250.0,
    "num_requests_running": 3.0,
    "num_requests_waiting": 2.0,
    "kv_cache_usage_perc": 0.125,
}


def test_the_line_is_vllms():
    line = StatsLog(IDLE, 100.0).line(BUSY, 110.0)
    assert line == (
        "Engine 000: Avg prompt throughput: 100.0 tokens/s, Avg generation throughput: 25.0 tokens/s, "
        "Running: 3 reqs, Waiting: 2 reqs, GPU KV cache usage: 12.5%, Prefix cache hit rate: 25.0%"
    )


def test_an_idle_server_is_silent():
    log = StatsLog(IDLE, 0.0)
    assert [log.line(IDLE, 10.0), log.line(IDLE, 20.0)] == [None, None]


def test_the_end_of_work_has_one_last_line():
    log = StatsLog(IDLE, 0.0)
    log.line(BUSY, 10.0)
    done = BUSY | {"num_requests_running": 0.0, "num_requests_waiting": 0.0, "kv_cache_usage_perc": 0.0}
    assert "Running: 0 reqs" in log.line(done, 20.0)
    assert log.line(done, 30.0) is None


def test_throughput_is_of_the_interval_and_the_hit_rate_of_the_last_one_with_queries():
    log = StatsLog(IDLE, 0.0)
    log.line(BUSY, 10.0)
    line = log.line(BUSY | {"generation_tokens": 300.0}, 15.0)
    assert "Avg prompt throughput: 0.0 tokens/s, Avg generation throughput: 10.0 tokens/s" in line
    assert "hit rate: 25.0%" in line
