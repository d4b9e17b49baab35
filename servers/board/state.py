"""The board's JSON: one moment of the server, as the client that asks may see it. Built from parts, asks nobody."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pagedjax import EngineConfig, EngineView, RequestView
from servers.board.bottleneck import bottleneck
from servers.board.history import History
from servers.open_requests import OpenRequest

MAX_CELLS = 4096
FREE, CACHED, USED, SHARED = range(4)


def board_state(
    config: EngineConfig,
    history: History,
    view: EngineView,
    open_requests: Sequence[OpenRequest],
    percentiles: Mapping[str, Any],
) -> dict[str, Any]:
    """Return what the page draws. Times in seconds, sizes in bytes."""
    latest = history.samples[-1].stats
    queries = history.growth("prefix_cache_queries")
    found = bottleneck(history.load(config))
    return {
        "model": config.model_name,
        "limits": {"max_num_seqs": config.max_num_seqs},
        "now": {
            "running": latest["num_requests_running"],
            "waiting": latest["num_requests_waiting"],
            "swapped": latest.get("num_requests_swapped", 0),
            "kv_cache_usage": latest["kv_cache_usage_perc"],
            "preemptions": latest["num_preemptions"],
            "prefix_hit_rate": history.growth("prefix_cache_hits") / queries if queries else None,
            "acceptance_rate": _acceptance_rate(history),
        },
        "history": {
            "prompt_tokens": _rounded(history.rates("prompt_tokens")),
            "generation_tokens": _rounded(history.rates("generation_tokens")),
        },
        "latencies": percentiles,
        "bottleneck": {"text": found.text, "flag": found.flag},
        "blocks": block_map(view),
        "ledger": view.ledger,
        "requests": request_table(open_requests, view.requests),
    }


def block_map(view: EngineView) -> dict[str, Any]:
    """Return one digit a cell: 0 free, 1 free with a cached prefix, 2 used, 3 used by several requests.

    A cell is one block, or `blocks_per_cell` of a large pool: then it shows the busiest of them.
    """
    refs = np.asarray(view.num_block_refs[1:], np.int64)  # without the null block
    states = np.where(refs > 1, SHARED, np.where(refs == 1, USED, FREE))
    cached = np.asarray(view.cached_block_ids, np.int64) - 1
    states[cached] = np.maximum(states[cached], CACHED)
    counts = np.bincount(states, minlength=4).tolist()
    per_cell = -(-len(states) // MAX_CELLS)
    padded = np.pad(states, (0, -len(states) % max(per_cell, 1)))
    cells = padded.reshape(-1, max(per_cell, 1)).max(axis=1)
    return {
        "cells": "".join(map(str, cells.tolist())),
        "blocks_per_cell": per_cell,
        "num_blocks": len(states),
        "free": counts[FREE],
        "cached": counts[CACHED],
        "used": counts[USED],
        "shared": counts[SHARED],
    }


def request_table(open_requests: Sequence[OpenRequest], views: Sequence[RequestView]) -> list[dict[str, Any]]:
    """Return one row an open request, oldest first; a request of several prompts is one row."""
    by_id = {view.request_id: view for view in views}
    now = time.monotonic()
    return [
        _row(opened, [by_id[key] for key in opened.engine_request_ids if key in by_id], now) for opened in open_requests
    ]


def _row(opened: OpenRequest, views: Sequence[RequestView], now: float) -> dict[str, Any]:
    statuses = {view.status for view in views}
    return {
        "id": opened.id,
        "path": opened.path,
        "status": next((one for one in ("running", "swapped", "waiting") if one in statuses), "ending"),
        "seconds": round(now - opened.arrival_time, 1),
        "prompt_tokens": sum(view.num_prompt_tokens for view in views),
        "output_tokens": sum(view.num_output_tokens for view in views),
        "max_tokens": sum(view.max_tokens for view in views),
        "cached_tokens": sum(view.num_cached_tokens for view in views),
        "blocks": sum(view.num_blocks for view in views),
        "preemptions": sum(view.num_preemptions for view in views),
    }


def _acceptance_rate(history: History) -> float | None:
    if "spec_decode_num_draft_tokens" not in history.samples[-1].stats:
        return None
    drafted = history.growth("spec_decode_num_draft_tokens")
    return history.growth("spec_decode_num_accepted_tokens") / drafted if drafted else None


def _rounded(values: Sequence[float]) -> list[float]:
    return [round(value, 1) for value in values]
