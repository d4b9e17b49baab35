"""What the engine hands back: plain, picklable data with vLLM's field names."""

from dataclasses import dataclass, field
from typing import NamedTuple


class Logprob(NamedTuple):
    """Log probability of one token under the raw logits (before temperature, penalties and masks)."""

    logprob: float
    rank: int  # 1 is the most likely token
    decoded_token: str | None = None
    token_bytes: bytes | None = None  # of a part of a character, which decoded_token shows as U+FFFD


@dataclass(kw_only=True)
class CompletionOutput:
    """One completion of a request. `finish_reason` is None at first, then stop, length, abort, timeout or error."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None  # one dict a generated token
    finish_reason: str | None = None
    stop_reason: int | str | None = None  # the stop token id or stop string that ended it; None for EOS

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(kw_only=True)
class RequestMetrics:
    """Times of one request in seconds on `time.monotonic()`; None until the event has happened."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0

    def copy(self) -> "RequestMetrics":
        """Return the times so far; written out, for it is called for every output."""
        return RequestMetrics(
            arrival_time=self.arrival_time, first_scheduled_time=self.first_scheduled_time,
            first_token_time=self.first_token_time, last_token_time=self.last_token_time,
            finished_time=self.finished_time, num_preemptions=self.num_preemptions,
        )  # fmt: skip


@dataclass(kw_only=True)
class RequestOutput:
    """State of one request after an iteration: every completion of it, or the new part in DELTA mode."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None  # first entry None
    num_cached_tokens: int = 0  # prompt tokens taken from the prefix cache
    error: str | None = None  # why a finish_reason of "error" or "timeout" happened
    metrics: RequestMetrics | None = field(default=None, repr=False)
