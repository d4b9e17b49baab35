"""What a profiler trace says of the GPU: how busy it was, and with what."""

import gzip
import json
from pathlib import Path


def idle_share(directory: Path) -> float | None:
    """Return one minus the union of all kernel intervals over the time they span, of the newest trace in `directory`.

    None where the trace shows no GPU stream.
    """
    spans = _kernels(directory)
    if not spans:
        return None
    busy, end = 0.0, spans[0][0]
    for start, stop, _ in spans:
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return 1 - busy / (end - spans[0][0])


def kernel_seconds(directory: Path) -> dict[str, float]:
    """Return the device time of each kernel, summed over its launches, in the newest trace in `directory`."""
    seconds: dict[str, float] = {}
    for start, stop, name in _kernels(directory):
        seconds[name] = seconds.get(name, 0.0) + (stop - start) * 1e-6
    return seconds


def _kernels(directory: Path) -> list[tuple[float, float, str]]:
    """Return (start, end, name) of every event on a GPU's streams, in microseconds, by start."""
    files = sorted(directory.rglob("*.trace.json.gz"), key=lambda path: path.stat().st_mtime)
    if not files:
        return []
    events = json.loads(gzip.decompress(files[-1].read_bytes()))["traceEvents"]
    devices = {e["pid"] for e in events if e.get("name") == "process_name" and "/device:GPU" in e["args"]["name"]}
    streams = {
        (e["pid"], e["tid"])
        for e in events
        if e.get("name") == "thread_name" and e["pid"] in devices and "Stream" in e["args"]["name"]
    }
    return sorted(
        (e["ts"], e["ts"] + e.get("dur", 0), e.get("name", ""))
        for e in events
        if e.get("ph") == "X" and (e["pid"], e["tid"]) in streams
    )
