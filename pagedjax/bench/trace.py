"""How busy the GPU was in a profiler trace."""

import gzip
import json
from pathlib import Path


def idle_share(directory: Path) -> float | None:
    """Return one minus the union of all kernel intervals over the time they span, of the newest trace in `directory`.

    None where the trace shows no GPU stream.
    """
    files = sorted(directory.rglob("*.trace.json.gz"), key=lambda path: path.stat().st_mtime)
    if not files:
        return None
    events = json.loads(gzip.decompress(files[-1].read_bytes()))["traceEvents"]
    spans = _kernel_spans(events)
    if not spans:
        return None
    busy, end = 0.0, spans[0][0]
    for start, stop in spans:
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return 1 - busy / (end - spans[0][0])


def _kernel_spans(events: list[dict]) -> list[tuple[float, float]]:
    """Return (start, end) of every event on a GPU's streams, in microseconds, by start."""
    devices = {e["pid"] for e in events if e.get("name") == "process_name" and "/device:GPU" in e["args"]["name"]}
    streams = {
        (e["pid"], e["tid"])
        for e in events
        if e.get("name") == "thread_name" and e["pid"] in devices and "Stream" in e["args"]["name"]
    }
    return sorted(
        (e["ts"], e["ts"] + e.get("dur", 0)) for e in events if e.get("ph") == "X" and (e["pid"], e["tid"]) in streams
    )
