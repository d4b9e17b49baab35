"""One request as the scheduler sees it: its tokens, how far they are computed, its blocks, its end.

The scheduler alone changes a request once it was added, but for the fields on drafts, which speculation plans; the
engine reads it. Knows nothing of text, of other requests or of the device.
"""

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from enum import IntEnum

from pagedjax.sampling_params import SamplingParams
from pagedjax.scheduling.beam_search import Hypothesis
from pagedjax.scheduling.fair_share import Client, Place


class RequestStatus(IntEnum):
    """Where a request stands; what is above LAST_UNFINISHED is final. The scheduler's docstring has the transitions."""

    WAITING = 0  # no token computed yet
    RUNNING = 1
    PREEMPTED = 2  # waits, and will compute its tokens again
    SWAPPING_OUT = 3  # waits; its blocks go to host memory, a few an iteration
    SWAPPED = 4  # waits; what it needs is in host memory
    SWAPPING_IN = 5  # has a row and blocks, whose content is on its way from host memory
    FINISHED_STOPPED = 6
    FINISHED_LENGTH = 7
    FINISHED_ABORTED = 8
    FINISHED_ERROR = 9
    FINISHED_TIMEOUT = 10


LAST_UNFINISHED = RequestStatus.SWAPPING_IN
FINISH_REASONS = {
    RequestStatus.FINISHED_STOPPED: "stop",
    RequestStatus.FINISHED_LENGTH: "length",
    RequestStatus.FINISHED_ABORTED: "abort",
    RequestStatus.FINISHED_ERROR: "error",
    RequestStatus.FINISHED_TIMEOUT: "timeout",
}
NOT_ON_HOST = -1  # in place of a host slot


def finish_reason(status: RequestStatus) -> str | None:
    """The word clients see for a final status; None while the request is unfinished."""
    return FINISH_REASONS.get(status)


@dataclass(slots=True, eq=False)
class Request:
    """A prompt and what became of it.

    Tokens, as half-open intervals:

        [0, num_computed_tokens)               K and V are written, or will be by the steps in flight
        [0, num_tokens)                        known to the host: the prompt and the confirmed outputs
        [num_tokens, num_tokens_bound)         sampled by steps in flight and not read yet: num_in_flight of them
        [0, max_num_tokens)                    all there can ever be

    A step in flight that verifies drafts counts as if all of them were right; reading it takes back the others.
    """

    request_id: str
    prompt_token_ids: Sequence[int] = field(repr=False)
    sampling_params: SamplingParams = field(repr=False)
    _: KW_ONLY
    max_tokens: int
    eos_token_ids: frozenset[int] = field(repr=False)
    arrival_time: float = field(repr=False)
    seed: int = field(repr=False)
    deadline: float = field(default=math.inf, repr=False)  # on the arrival time's clock
    priority: int = 0
    client: Client = ("", "")
    cache_salt: str | None = field(default=None, repr=False)
    skip_reading_prefix_cache: bool = field(default=False, repr=False)
    bad_word_token_ids: Sequence[tuple[int, ...]] = field(default=(), repr=False)  # for the sampler

    status: RequestStatus = field(default=RequestStatus.WAITING, init=False)
    stop_reason: int | str | None = field(default=None, init=False)
    output_token_ids: list[int] = field(default_factory=list, init=False, repr=False)  # confirmed
    all_token_ids: list[int] = field(init=False, repr=False)  # prompt and confirmed outputs
    num_tokens_bound: int = field(init=False)
    is_beam: bool = field(init=False)
    hypothesis: Hypothesis | None = field(default=None, init=False, repr=False)  # whose tokens a finished beam has
    max_num_tokens: int = field(init=False, repr=False)  # the scheduler lowers it to max_model_len
    ending_token_ids: frozenset[int] = field(init=False, repr=False)  # EOS and stop tokens
    num_computed_tokens: int = field(default=0, init=False)
    num_cached_tokens: int = field(default=0, init=False)  # prompt tokens the first admission found cached
    num_preemptions: int = field(default=0, init=False)
    num_draft_tokens: int = field(default=0, init=False)  # wanted in its next step, by whoever plans speculation
    num_draft_reads: int = field(default=0, init=False)  # its tokens that a draft model reads then, to catch up
    draft_token_ids: Sequence[int] = field(default=(), init=False, repr=False)  # where the host makes the drafts
    is_drafted_from_output: bool = field(default=False, init=False)  # it does, and waits until it has read all tokens
    row: int | None = field(default=None, init=False)  # slot of the device state while running
    is_new_row: bool = field(default=False, init=False, repr=False)  # the row has not been written yet
    block_ids: list[int] = field(default_factory=list, init=False, repr=False)
    host_slots: list[int] = field(default_factory=list, init=False, repr=False)  # by block, held or NOT_ON_HOST
    block_hashes: list[bytes] = field(default_factory=list, init=False, repr=False)  # chain over full blocks
    num_registered_tokens: int = field(default=0, init=False, repr=False)  # in blocks offered to the prefix cache
    place: Place = field(default=Place(), init=False, repr=False)  # in the line of all clients
    order: tuple[float, ...] = field(default=(), init=False, repr=False)  # the scheduler's, smallest first

    def __post_init__(self) -> None:
        params = self.sampling_params
        self.is_beam = params.use_beam_search
        self.all_token_ids = list(self.prompt_token_ids)
        self.num_tokens_bound = len(self.all_token_ids)
        self.max_num_tokens = len(self.all_token_ids) + self.max_tokens
        eos_token_ids = frozenset() if params.ignore_eos else self.eos_token_ids
        self.ending_token_ids = eos_token_ids.union(params.stop_token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    @property
    def num_in_flight(self) -> int:
        return self.num_tokens_bound - len(self.all_token_ids)

    @property
    def is_reading(self) -> bool:
        """Whether more than its newest token is left to compute: a prompt, or what it had before."""
        return self.num_tokens_bound - self.num_computed_tokens > 1

    @property
    def is_finished(self) -> bool:
        return self.status > LAST_UNFINISHED

    @property
    def is_swapping_out(self) -> bool:
        return self.status is RequestStatus.SWAPPING_OUT

    @property
    def is_swapped(self) -> bool:
        """Whether it waits, wholly or partly on the host."""
        return self.status in (RequestStatus.SWAPPING_OUT, RequestStatus.SWAPPED)

    def append(self, token_id: int) -> RequestStatus | None:
        """Add a confirmed token; return the final status it brings about, or None if the request goes on."""
        self.all_token_ids.append(token_id)
        self.output_token_ids.append(token_id)
        if token_id in self.ending_token_ids and len(self.output_token_ids) >= self.sampling_params.min_tokens:
            return RequestStatus.FINISHED_STOPPED
        if len(self.all_token_ids) >= self.max_num_tokens:
            return RequestStatus.FINISHED_LENGTH
        return None

    def forget_output(self) -> None:
        """Be as new, with nothing computed."""
        self.all_token_ids, self.output_token_ids = list(self.prompt_token_ids), []
        self.num_tokens_bound = len(self.all_token_ids)
        self.num_computed_tokens = self.num_registered_tokens = 0

    def stop_reason_of(self, status: RequestStatus, token_id: int) -> int | None:
        """What to report for the last token: its id if it is a stop token, None for EOS or a length limit."""
        is_eos = token_id in self.eos_token_ids and not self.sampling_params.ignore_eos
        return None if is_eos or status is not RequestStatus.FINISHED_STOPPED else token_id
