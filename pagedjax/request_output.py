"""From sampled ids back to text: one `RunningRequest` follows a request until its last output.

Detokenizes, finds stop strings, collects log probabilities and builds the `RequestOutput`s. Knows nothing of devices.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from pagedjax.engine_view import RequestView
from pagedjax.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from pagedjax.request_input import NewRequest
from pagedjax.sampling_params import RequestOutputKind, SamplingParams
from pagedjax.scheduling.beam_search import Hypothesis
from pagedjax.scheduling.request import Request, RequestStatus, finish_reason
from pagedjax.text.detokenizer import IncrementalDetokenizer
from pagedjax.text.stop import StopStrings
from pagedjax.text.structured_output import Grammar
from pagedjax.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class TokenScores:
    """Raw log probabilities at one position: of the token itself, and the most likely ones, best first."""

    logprob: float
    rank: int
    top_ids: Sequence[int] | np.ndarray
    top_logprobs: Sequence[float] | np.ndarray


class RunningCompletion:
    """Text and log probabilities of one child, and where it stands in its grammar if it has one."""

    def __init__(self, index: int, request: Request, grammar: Grammar | None, tokenizer: Tokenizer | None):
        params = request.sampling_params
        self.index = index
        self.request = request
        self.grammar = grammar
        self.text = ""
        self.logprobs: list[dict[int, Logprob]] = []
        self.cumulative_logprob = 0.0
        self._tokenizer = tokenizer
        self._stop = StopStrings(params.stop, include_stop_str_in_output=params.include_stop_str_in_output)
        self._detokenizer = None
        if tokenizer is not None and params.detokenize:
            self._detokenizer = IncrementalDetokenizer(
                tokenizer,
                request.prompt_token_ids,
                skip_special_tokens=params.skip_special_tokens,
                spaces_between_special_tokens=params.spaces_between_special_tokens,
            )
        self.is_bare = (  # a token that does not end it changes nothing but the list of its tokens
            self._detokenizer is None and grammar is None and params.logprobs is None and not params.use_beam_search
        )
        self._emitted_chars = self._emitted_tokens = 0
        self.is_reported = False  # its finish was handed out

    def push(self, token_ids: list[int], scores: Sequence[TokenScores]) -> str | None:
        """Take in new tokens. Returns the stop string they completed, if any; then this completion is over."""
        params = self.request.sampling_params
        for token_id, score in zip(token_ids, scores, strict=False):
            self.cumulative_logprob += score.logprob
            self.logprobs.append(to_logprobs(token_id, score, params.logprobs or 0, self._tokenizer))
        if self._detokenizer is None:
            return None
        visible = token_ids
        if self.request.status == RequestStatus.FINISHED_STOPPED and not params.include_stop_str_in_output:
            visible = token_ids[:-1]  # the stop token's own text is not part of the output
        has_min_tokens = len(self.request.output_token_ids) >= params.min_tokens
        result = self._stop.push(self._detokenizer.push(visible), may_match=has_min_tokens)
        self.text += result.text_to_emit
        return result.matched

    def flush(self) -> None:
        """Emit what was held back as a possible stop string or half a character: the completion is over."""
        if self._detokenizer is not None:
            result = self._stop.push(self._detokenizer.flush())
            self.text += result.text_to_emit
            if result.matched is None:
                self.text += self._stop.flush()

    def output(self, kind: RequestOutputKind) -> CompletionOutput:
        """Build the whole completion, or what is new in it since the last call in DELTA mode."""
        request, is_delta = self.request, kind == RequestOutputKind.DELTA
        first_char, first_token = (self._emitted_chars, self._emitted_tokens) if is_delta else (0, 0)
        self._emitted_chars, self._emitted_tokens = len(self.text), len(request.output_token_ids)
        self.is_reported = request.is_finished
        wants_logprobs = request.sampling_params.logprobs is not None
        return CompletionOutput(
            index=self.index,
            text=self.text[first_char:],
            token_ids=request.output_token_ids[first_token:],
            cumulative_logprob=self.cumulative_logprob if wants_logprobs or request.is_beam else None,
            logprobs=self.logprobs[first_token:] if wants_logprobs else None,
            finish_reason=finish_reason(request.status),
            stop_reason=request.stop_reason,
        )

    @property
    def has_news(self) -> bool:
        """Whether a DELTA output would say anything."""
        finished_now = self.request.is_finished and not self.is_reported
        return finished_now or len(self.request.output_token_ids) > self._emitted_tokens


@dataclass
class RunningRequest:
    """One request with its n completions, from admission to the last output."""

    new: NewRequest
    completions: list[RunningCompletion]
    metrics: RequestMetrics
    tokenizer: Tokenizer | None
    prompt_logprobs: list[dict[int, Logprob] | None] = field(default_factory=list)
    is_prompt_reported: bool = False
    error: str | None = None
    wants_parts: bool = field(init=False)  # outputs before the last one

    def __post_init__(self) -> None:
        params = self.new.params
        self.wants_parts = not params.use_beam_search and params.output_kind is not RequestOutputKind.FINAL_ONLY

    @classmethod
    def start(cls, new: NewRequest, tokenizer: Tokenizer | None, *, arrival_time: float) -> "RunningRequest":
        completions = [
            RunningCompletion(i, *both, tokenizer)
            for i, both in enumerate(zip(new.children[: new.params.n], new.grammars, strict=True))
        ]
        return cls(new, completions, RequestMetrics(arrival_time=arrival_time), tokenizer)

    def followed(self) -> Iterator[tuple[Request, RunningCompletion]]:
        """Yield each child with its completion; beams that are not returned have the last one's."""
        for i, child in enumerate(self.new.children):
            yield child, self.completions[min(i, len(self.completions) - 1)]

    @property
    def is_finished(self) -> bool:
        return all(completion.request.is_finished for completion in self.completions)

    def view(self) -> RequestView:
        """What a watcher sees of it."""
        requests = [completion.request for completion in self.completions]
        return RequestView(
            request_id=self.new.request_id,
            status=_status(requests),
            num_prompt_tokens=len(self.new.prompt_token_ids),
            num_output_tokens=sum(len(one.output_token_ids) for one in requests),
            max_tokens=sum(one.max_tokens for one in requests),
            num_blocks=len({block_id for one in requests for block_id in one.block_ids}),
            num_cached_tokens=requests[0].num_cached_tokens,
            num_preemptions=sum(one.num_preemptions for one in requests),
        )

    def push_prompt_logprobs(self, first_position: int, scores: Sequence[TokenScores]) -> None:
        """Take in scored prompt tokens; those already known, which a preempted request scores again, are dropped."""
        if not self.prompt_logprobs:
            self.prompt_logprobs.append(None)  # nothing precedes the first token
        count = self.new.params.prompt_logprobs or 0
        for position, score in enumerate(scores, first_position):
            if position == len(self.prompt_logprobs):
                token_id = self.new.prompt_token_ids[position]
                self.prompt_logprobs.append(to_logprobs(token_id, score, count, self.tokenizer))

    def note_tokens(self, now: float) -> None:
        """Record the time at which tokens arrived."""
        self.metrics.first_token_time = self.metrics.first_token_time or now
        self.metrics.last_token_time = now

    def output(self) -> RequestOutput | None:
        """Build the output that is due now, or None if this request's `output_kind` wants none yet."""
        params: SamplingParams = self.new.params
        is_finished = self.is_finished
        if not (self.wants_parts or is_finished):
            return None
        if is_finished:
            self.metrics.finished_time = time.monotonic()
        self.metrics.num_preemptions = sum([one.request.num_preemptions for one in self.completions])
        is_delta = params.output_kind is RequestOutputKind.DELTA
        chosen = [one for one in self.completions if one.has_news] if is_delta else self.completions
        prompt_logprobs = None
        if params.prompt_logprobs is not None and not (is_delta and self.is_prompt_reported):
            prompt_logprobs = self.prompt_logprobs or [None]
        self.is_prompt_reported = True
        return RequestOutput(
            request_id=self.new.request_id,
            prompt=self.new.prompt,
            prompt_token_ids=self.new.prompt_token_ids,
            outputs=[one.output(params.output_kind) for one in chosen],
            finished=is_finished,
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens=self.completions[0].request.num_cached_tokens,
            error=self.error,
            metrics=self.metrics.copy(),  # another thread may read it while this one goes on
        )


def _status(requests: Sequence[Request]) -> Literal["waiting", "running", "swapped"]:
    if any(one.status is RequestStatus.RUNNING for one in requests):
        return "running"
    is_away = any(one.is_swapped or one.status is RequestStatus.SWAPPING_IN for one in requests)
    return "swapped" if is_away else "waiting"


def scores_of(hypothesis: Hypothesis) -> list[TokenScores]:
    """The log probabilities of a beam search's tokens, from the first on."""
    return [
        TokenScores(one.logprob, one.rank, one.candidates.token_ids, one.candidates.logprobs)
        for one in hypothesis.tokens()
        if one.candidates is not None
    ]


def to_logprobs(token_id: int, score: TokenScores, count: int, tokenizer: Tokenizer | None) -> dict[int, Logprob]:
    """The token itself first, then the `count` most likely ones."""
    entries = {token_id: _logprob(token_id, score.logprob, score.rank, tokenizer)}
    for rank, (top_id, logprob) in enumerate(zip(score.top_ids[:count], score.top_logprobs, strict=False), 1):
        entries.setdefault(int(top_id), _logprob(int(top_id), float(logprob), rank, tokenizer))
    return entries


def _logprob(token_id: int, logprob: float, rank: int, tokenizer: Tokenizer | None) -> Logprob:
    if tokenizer is None:
        return Logprob(logprob, rank)
    text = tokenizer.decode([token_id])
    return Logprob(logprob, rank, text, tokenizer.bytes_of(token_id) if "\ufffd" in text else None)
