"""The idle share of a GPU, read from made-up traces."""

import gzip
import json

import pytest

from pagedjax.bench.trace import idle_share, kernel_seconds

GPU = [
    {"name": "process_name", "pid": 1, "args": {"name": "/device:GPU:0 NVIDIA H200"}},
    {"name": "process_name", "pid": 2, "args": {"name": "/host:CPU"}},
    {"name": "thread_name", "pid": 1, "tid": 7, "args": {"name": "Stream #7(Compute)"}},
    {"name": "thread_name", "pid": 1, "tid": 8, "args": {"name": "XLA Ops"}},
    {"name": "thread_name", "pid": 1, "tid": 9, "args": {"name": "Stream #9(MemcpyD2H)"}},
]


def write(directory, events, name="vm"):
    directory.mkdir(exist_ok=True)
    path = directory / f"{name}.trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    return path


def kernel(start, end, *, pid=1, tid=7):
    return {"ph": "X", "pid": pid, "tid": tid, "ts": start, "dur": end - start, "name": "kernel"}


def test_idle_is_what_no_stream_covers(tmp_path):
    """Busy [0, 10) and [12, 20), the copy lies inside and the gap is 2 of 20."""
    events = [kernel(0, 10), kernel(12, 18), kernel(13, 15, tid=9), kernel(17, 20, tid=9)]
    write(tmp_path, GPU + events)
    assert idle_share(tmp_path) == pytest.approx(0.1)


def test_host_threads_and_derived_lines_do_not_count(tmp_path):
    write(tmp_path, [*GPU, kernel(0, 10), kernel(15, 20), kernel(0, 100, pid=2), kernel(0, 100, tid=8)])
    assert idle_share(tmp_path) == pytest.approx(0.25)


def test_without_a_gpu_or_a_trace_there_is_no_share(tmp_path):
    assert idle_share(tmp_path) is None
    write(tmp_path, [GPU[1], kernel(0, 10, pid=2)])
    assert idle_share(tmp_path) is None


def test_device_time_is_summed_by_kernel(tmp_path):
    write(tmp_path, [*GPU, kernel(0, 10), kernel(15, 20), kernel(20, 22) | {"name": "copy"}, kernel(0, 100, pid=2)])
    assert kernel_seconds(tmp_path) == pytest.approx({"kernel": 15e-6, "copy": 2e-6})
