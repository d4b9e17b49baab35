"""`pagedjax bench NAME`: measurements, in the shape of `vllm bench`.

Each subcommand is one module here with `CONFIGS`, the dataclasses of its flags, and `run`, which takes an instance of
each and returns the exit status. A new one needs its line in SUBCOMMANDS and nothing else.
"""

import importlib
from typing import Any

SUBCOMMANDS = {
    "latency": "Time one batch of fixed shapes from start to end, and its decoding alone.",
    "throughput": "Time a whole dataset, offline.",
    "serve": "Send requests to a server, ours or another, and time its streams.",
    "sweep": "Run serve at several request rates and concurrencies.",
    "kernels": "Time the attention kernels on a GPU against the ceilings of the same run.",
}


def load(name: str) -> Any:
    """Import the module of a subcommand."""
    return importlib.import_module(f"pagedjax.bench.{name}")
