"""A step between its dispatch and what came of it: device arrays to read, and their contents on the host."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import jax

from pagedjax.execution.step import TokenLogprobs
from pagedjax.scheduling.beam_search import Candidates
from pagedjax.scheduling.request import Request
from pagedjax.scheduling.step_plan import ScheduledRequest, SchedulerOutput
from pagedjax.speculation.speculator import VerifiedDrafts


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
