"""What speculation did during a measurement, from the engine's counters before and after."""

from collections.abc import Mapping
from typing import Any


def speculation_figures(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, Any]:
    """Return drafts and acceptance between two calls of `stats`; nothing where there was none."""
    drafted, accepted, drafts = (
        after.get(name, 0) - before.get(name, 0)
        for name in ("spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens", "spec_decode_num_drafts")
    )
    if not drafted:
        return {}
    return {
        "num_drafts": drafts,
        "num_draft_tokens": drafted,
        "num_accepted_tokens": accepted,
        "acceptance_rate": accepted / drafted,
        "acceptance_length": 1 + accepted / drafts,
    }
