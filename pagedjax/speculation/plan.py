"""The host side of speculation: how many drafts each request verifies next, and what became of the last ones.

Says before each plan of the scheduler what each request wants (`Request.num_draft_tokens`), as the controller chooses,
and makes the drafts themselves where the host does. Owns the counts behind the metrics and the trace. Knows no device.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pagedjax.scheduling.request import Request, RequestStatus
from pagedjax.scheduling.step_plan import ScheduledRequest, SchedulerOutput
from pagedjax.speculation.config import SpeculativeConfig
from pagedjax.speculation.controller import Controller, StepKind
from pagedjax.speculation.host_drafts import HostDrafts
from pagedjax.speculation.speculator import VerifiedDrafts

CATCH_UP = 8  # tokens a request that a draft model reads beside drafting without being much slower
TRACE_RESULTS = 20_000  # that the trace keeps, one for each request of a step: about 10 MB


@dataclass(frozen=True)
class SpeculationStep:
    """What one step proposed and accepted, request by request."""

    verified: tuple[VerifiedDrafts, ...]


class Speculation:
    """Plans the drafts of one engine and counts what is accepted.

    Args:
      num_missing: tokens that a draft model has to read before it can draft for a request.
      max_num_read: tokens that it reads in one step.
    """

    def __init__(self, config: SpeculativeConfig, num_missing: Callable[[Request], int], *, max_num_read: int):
        self._max_draft_tokens = config.num_speculative_tokens
        self._num_missing = num_missing
        self._max_num_read = max_num_read
        self._controller = Controller(
            config.num_speculative_tokens,
            is_sequential=config.is_sequential,
            disable_by_batch_size=config.disable_by_batch_size,
            is_adaptive=config.is_adaptive,
        )
        self._host_drafts = HostDrafts(config) if config.method == "suffix" else None
        self._has_read = False  # in the step that is planned: a draft model catches up
        self._in_flight: deque[StepKind] = deque()
        self._num_drafts = 0
        self._num_draft_tokens = 0
        self._num_accepted = [0] * config.num_speculative_tokens  # by position
        self._trace: deque[SpeculationStep] = deque()
        self._num_traced = 0  # results in it

    def plan(self, running: Sequence[Request], *, has_prompts: bool) -> None:
        """Say how many drafts each running request verifies in the next step, and what a draft model reads of it.

        `has_prompts` says that the step is expected to compute prompts too.
        """
        if self._host_drafts is not None:
            self._host_drafts.begin_step()
        for request in running:
            request.num_draft_reads = 0
        decoding = [one for one in running if _is_decoding(one)]
        request_ids = [one.request_id for one in decoding]
        chosen = self._controller.choose(request_ids, limits=self._limits(decoding), has_prompts=has_prompts)
        self._has_read = False
        for request, num_drafts in zip(decoding, chosen, strict=True):
            if self._host_drafts is not None:
                self._host_drafts.settle(request, num_drafts)
            else:
                request.num_draft_tokens = num_drafts
        if any(chosen) and self._host_drafts is None:
            self._plan_reading([one for one in decoding if one.num_draft_tokens])

    def note_dispatch(self, output: SchedulerOutput) -> None:
        """Take note that a planned step is under way."""
        has_prompts = not all(map(_decodes, output.scheduled))
        self._in_flight.append(StepKind(has_prompts, self._has_read, self._controller.is_sample))

    def note_result(self, output: SchedulerOutput, verified: Sequence[VerifiedDrafts], seconds: float) -> None:
        """Take note of what the oldest step under way accepted and how long the device took, before it is confirmed.

        Requests that have ended do not count.
        """
        num_accepted = {one.request_id: one.num_accepted for one in verified}
        alive = [item for item in output.scheduled if _decodes(item) and not item.request.is_finished]
        request_ids = [item.request.request_id for item in alive]
        self._controller.note_step(
            request_ids,
            [item.num_draft_tokens for item in alive],
            [num_accepted.get(request_id, 0) for request_id in request_ids],
            num_proposed=output.num_draft_tokens,
            seconds=seconds,
            kind=self._in_flight.popleft(),
        )
        if verified:
            self._count(verified, set(request_ids))

    def note_token(self, request: Request, token_id: int) -> None:
        """Take note of a confirmed token."""
        if self._host_drafts is not None:
            self._host_drafts.extend(request, token_id)

    def forget(self, request: Request) -> None:
        """Drop a request that ended."""
        self._controller.forget(request.request_id)
        if self._host_drafts is not None:
            self._host_drafts.finish(request)

    def reset(self) -> None:
        """Forget how drafts fared: the weights have changed."""
        self._controller.reset()

    def stats(self) -> dict[str, float]:
        """Counters under their metric names, accepted tokens by position with it at the end; and their ratio."""
        by_position = {
            f"spec_decode_num_accepted_tokens_per_pos_{position}": count
            for position, count in enumerate(self._num_accepted)
        }
        return {
            "spec_decode_num_drafts": self._num_drafts,
            "spec_decode_num_draft_tokens": self._num_draft_tokens,
            "spec_decode_num_accepted_tokens": sum(self._num_accepted),
            "spec_decode_draft_acceptance_rate": sum(self._num_accepted) / max(self._num_draft_tokens, 1),
            **by_position,
        }

    def trace(self, *, clear: bool = False) -> list[SpeculationStep]:
        """Return proposals and acceptances of the latest steps that verified, oldest first, and maybe forget them.

        It goes back TRACE_RESULTS results of single requests, however many steps these are.
        """
        steps = list(self._trace)
        if clear:
            self._trace.clear()
            self._num_traced = 0
        return steps

    def _limits(self, decoding: Sequence[Request]) -> list[int]:
        """The most drafts that each request can have: one token comes after the last of them."""
        limits = [
            max(0, min(self._max_draft_tokens, one.max_num_tokens - one.num_tokens_bound - 1)) for one in decoding
        ]
        if self._host_drafts is not None:
            limits = [self._host_drafts.find(one, limit) for one, limit in zip(decoding, limits, strict=True)]
        return limits

    def _plan_reading(self, drafting: Sequence[Request]) -> None:
        """Let a draft model catch up, so many tokens a step; who misses more than that waits without drafts.

        In a try all wait until little is missing: what it measures is drafting.
        """
        missing = [self._num_missing(request) for request in drafting]
        self._has_read = sum(missing) > CATCH_UP * len(drafting)
        must_wait, room = self._has_read and self._controller.is_trying, self._max_num_read
        for request, num_missing in zip(drafting, missing, strict=True):
            request.num_draft_reads = min(num_missing, room)
            room -= request.num_draft_reads
            if must_wait or request.num_draft_reads < num_missing:
                request.num_draft_tokens = 0

    def _count(self, verified: Sequence[VerifiedDrafts], alive: set[str]) -> None:
        counted = tuple(one for one in verified if one.request_id in alive and one.draft_token_ids)
        for one in counted:
            self._num_drafts += 1
            self._num_draft_tokens += len(one.draft_token_ids)
            for position in range(one.num_accepted):
                self._num_accepted[position] += 1
        if counted:
            self._trace.append(SpeculationStep(counted))
            self._num_traced += len(counted)
        while self._num_traced > TRACE_RESULTS:
            self._num_traced -= len(self._trace.popleft().verified)


def _is_decoding(request: Request) -> bool:
    """Whether the next step computes a request's newest token alone; beams are chosen among, and not drafted for."""
    return request.status is RequestStatus.RUNNING and not (request.is_beam or request.is_reading)


def _decodes(item: ScheduledRequest) -> bool:
    return item.samples and item.num_scheduled_tokens == 1 + item.num_draft_tokens
