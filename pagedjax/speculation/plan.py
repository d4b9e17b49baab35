"""The host side of speculation: how many drafts each request verifies next, and what became of the last ones.

Sets `Request.num_draft_tokens` before each plan of the scheduler. Owns the counts behind the metrics and the trace.
Knows no device.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from pagedjax.scheduling.request import Request
from pagedjax.scheduling.scheduler import SchedulerOutput
from pagedjax.speculation.config import SpeculativeConfig
from pagedjax.speculation.speculator import VerifiedDrafts

TRACE_STEPS = 10_000  # steps that the trace goes back


@dataclass(frozen=True)
class SpeculationStep:
    """What one step proposed and accepted, request by request."""

    verified: tuple[VerifiedDrafts, ...]


class Speculation:
    """Plans the drafts of one engine and counts what is accepted."""

    def __init__(self, config: SpeculativeConfig, num_missing: Callable[[Request], int], max_num_read: int):
        self._num_missing = num_missing
        self._max_num_read = max_num_read
        self._max_draft_tokens = config.num_speculative_tokens
        self._num_drafts = 0
        self._num_draft_tokens = 0
        self._num_accepted = [0] * config.num_speculative_tokens  # by position
        self._trace: deque[SpeculationStep] = deque(maxlen=TRACE_STEPS)

    def plan(self, running: Iterable[Request]) -> None:
        """Say how many drafts each running request verifies in the next step."""
        room = self._max_num_read
        for request in running:
            if request.num_tokens_bound - request.num_computed_tokens > 1:
                continue  # its prompt is not computed yet
            num_missing = self._num_missing(request)
            is_served = num_missing <= room or room == self._max_num_read
            room -= num_missing if is_served else 0
            request.num_draft_tokens = self._max_draft_tokens if is_served else 0

    def note_result(self, output: SchedulerOutput, verified: Sequence[VerifiedDrafts]) -> None:
        """Take note of what a step accepted, before its tokens are confirmed; requests that have ended do not count."""
        alive = {item.request.request_id for item in output.scheduled if not item.request.is_finished}
        counted = tuple(one for one in verified if one.request_id in alive and one.draft_token_ids)
        for one in counted:
            self._num_drafts += 1
            self._num_draft_tokens += len(one.draft_token_ids)
            for position in range(one.num_accepted):
                self._num_accepted[position] += 1
        if counted:
            self._trace.append(SpeculationStep(counted))

    def stats(self) -> dict[str, float]:
        """Counters under their metric names."""
        return {
            "spec_decode_num_drafts": self._num_drafts,
            "spec_decode_num_draft_tokens": self._num_draft_tokens,
            "spec_decode_num_accepted_tokens": sum(self._num_accepted),
        }

    @property
    def num_accepted_per_position(self) -> tuple[int, ...]:
        """Accepted drafts by their position, [K]."""
        return tuple(self._num_accepted)

    def trace(self, *, clear: bool = False) -> list[SpeculationStep]:
        """Return proposals and acceptances of the latest steps that verified, oldest first, and maybe forget them."""
        steps = list(self._trace)
        if clear:
            self._trace.clear()
        return steps
