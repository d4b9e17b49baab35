"""What the scheduler decides about one step, for whoever carries it out."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from pagedjax.scheduling.request import Request
from pagedjax.scheduling.swapping import BlockCopies


@dataclass(slots=True)
class ScheduledRequest:
    """One request's share of a step: it computes tokens [context_len, context_len + num_scheduled_tokens)."""

    request: Request
    row: int
    num_scheduled_tokens: int
    context_len: int
    new_block_ids: Sequence[int]  # go into the block table from first_new_block_index on
    first_new_block_index: int
    is_new_row: bool  # the device's row holds something else; new_block_ids is then the whole block table
    samples: bool  # the step reaches the last token there is, so it yields the next one
    num_draft_tokens: int = 0  # the last of its tokens, guesses that it verifies: up to as many tokens more


@dataclass(slots=True)
class SchedulerOutput:
    """What one step computes, and the copies between device and host that come before it."""

    scheduled: list[ScheduledRequest] = field(default_factory=list)
    num_tokens: int = 0
    num_draft_tokens: int = 0  # among them
    num_sampling: int = 0  # of the scheduled requests
    copies: BlockCopies = field(default_factory=BlockCopies)
    preempted: list[Request] = field(default_factory=list)
    timed_out: list[Request] = field(default_factory=list)
    forked_blocks: list[tuple[int, int]] = field(default_factory=list)  # (from, to), on the device, after `copies`

    @property
    def is_decode(self) -> bool:
        """Whether every request computes exactly its newest token, which its device row knows."""
        return self.num_tokens == self.num_sampling == len(self.scheduled)
