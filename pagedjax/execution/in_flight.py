"""A step between its dispatch and what came of it: device arrays to read, and their contents on the host."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from pagedjax.execution.step import NUM_BEAM_CANDIDATES, RESULT_COLUMNS, TokenLogprobs
from pagedjax.scheduling.beam_search import Candidates
from pagedjax.scheduling.request import Request
from pagedjax.scheduling.step_plan import ScheduledRequest, SchedulerOutput
from pagedjax.speculation.speculator import VerifiedDrafts, verified_drafts


@dataclass(frozen=True)
class PromptScore:
    """Prompt log probabilities under way: `count` entries for positions from `first_position` on."""

    request: Request
    first_position: int
    count: int
    logprobs: TokenLogprobs


@dataclass(frozen=True)
class InFlightStep:
    """A dispatched step: who is in it, and the device arrays to read.

    A step with a row under a grammar is dispatched in two parts: `ModelRunner.sample` brings the second.
    """

    output: SchedulerOutput
    sampling: list[ScheduledRequest]  # in the order of the result's rows
    result: jax.Array | None  # [B, RESULT_COLUMNS] or more with drafts, None when no row samples
    logprobs: TokenLogprobs | None
    scores: list[PromptScore]
    beams: jax.Array | None = None  # [B, 2 * NUM_BEAM_CANDIDATES], None when no row belongs to a beam search
    last_hidden: jax.Array | None = None  # [max_num_seqs, D], or what verifies, while sampling waits for masks
    drafts: jax.Array | None = None  # [B, K] of the rows that verify some, in the order of the plan
    computed: jax.Array | None = None  # what a step that samples nothing computes last: nothing of it is read

    @property
    def awaits_masks(self) -> bool:
        return self.last_hidden is not None

    @property
    def is_ready(self) -> bool:
        """Whether the device has computed it; False while it waits for masks."""
        arrays: list[Any] = [array for array in (self.result, self.beams, self.computed) if array is not None]
        return bool(arrays) and arrays[0].is_ready()


@dataclass(frozen=True)
class PromptLogprobs:
    """Scored prompt tokens of one request, positions [first_position, first_position + len(logprob))."""

    request: Request
    first_position: int
    arrays: TokenLogprobs  # numpy


@dataclass
class StepResult:
    """What one step produced, on the host."""

    token_ids: dict[str, list[int]] = field(default_factory=dict)
    candidates: dict[str, Candidates] = field(default_factory=dict)  # of beams, which sample nothing
    failed: set[str] = field(default_factory=set)  # logits were not finite
    read_time: float = 0.0  # on time.monotonic(), when the arrays had come
    logprob_rows: dict[str, Iterator[int]] = field(default_factory=dict)  # of each token in turn
    logprobs: TokenLogprobs | None = None  # numpy, indexed by logprob_rows
    verified: list[VerifiedDrafts] = field(default_factory=list)
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)


@dataclass
class HostTimes:
    """Seconds of host work, summed over `num_steps` iterations."""

    num_steps: int = 0
    pack: float = 0.0
    dispatch: float = 0.0
    wait: float = 0.0


def read_step(step: InFlightStep) -> StepResult:
    """Wait for a step and hand its arrays over by request."""
    result = StepResult()
    if step.computed is not None:
        jax.block_until_ready(step.computed)
    if step.result is not None:
        _read_tokens(step, np.asarray(step.result), result)
    if step.beams is not None:
        _read_beams(step.sampling, np.asarray(step.beams), result)
    if step.logprobs is not None:
        result.logprobs = jax.tree.map(np.asarray, step.logprobs)
    for score in step.scores:
        arrays = jax.tree.map(lambda leaf, count=score.count: np.asarray(leaf)[:count], score.logprobs)
        result.prompt_logprobs.append(PromptLogprobs(score.request, score.first_position, arrays))
    result.read_time = time.monotonic()
    return result


def _read_tokens(step: InFlightStep, table: np.ndarray, result: StepResult) -> None:
    rows = list(zip(step.sampling, table.tolist(), strict=False))
    result.token_ids = {item.request.request_id: values[: values[-2]] for item, values in rows}
    if not table[: len(rows), -1].all():
        result.failed = {item.request.request_id for item, values in rows if not values[-1]}
    if step.beams is not None:  # their rows mean nothing here
        beams = {item.request.request_id for item in step.sampling if item.request.is_beam}
        result.token_ids = {name: ids for name, ids in result.token_ids.items() if name not in beams}
        result.failed -= beams
    if step.logprobs is not None:
        width = (table.shape[1] - RESULT_COLUMNS) // 2 + 1
        result.logprob_rows = {
            item.request.request_id: iter(range(row * width, (row + 1) * width))
            for row, item in enumerate(step.sampling)
        }
    if step.output.num_draft_tokens:
        result.verified = [verified_drafts(item, values) for item, values in rows if item.num_draft_tokens]


def _read_beams(sampling: Sequence[ScheduledRequest], table: np.ndarray, result: StepResult) -> None:
    token_ids = table[:, :NUM_BEAM_CANDIDATES]
    logprobs = np.ascontiguousarray(table[:, NUM_BEAM_CANDIDATES:]).view(np.float32)
    for row, item in enumerate(sampling):
        if item.request.is_beam:
            found = Candidates(token_ids[row].tolist(), logprobs[row].tolist())
            result.candidates[item.request.request_id] = found
            if not np.isfinite(logprobs[row, 0]):
                result.failed.add(item.request.request_id)
