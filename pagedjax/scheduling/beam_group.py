"""The requests that carry out one beam search: each computes a hypothesis, and another one when its own is dropped.

    held -> live <-> live with another member's tokens and blocks -> ended, all of them together

The first member computes the prompt; the others are held until it has. A member that takes on a hypothesis holds the
blocks of the member that computed it, and copies the last one before it writes. A group gets all rows and blocks that
it can need when the first member is admitted, so that no member ever waits for another that lost its own: it is never
preempted, save by a reset, and then starts anew. Blocks that no member holds are spare. Knows no queues.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from pagedjax.scheduling.beam_search import BeamSearch, Candidates
from pagedjax.scheduling.block_demand import blocks_for
from pagedjax.scheduling.block_pool import BlockPool
from pagedjax.scheduling.request import Request, RequestStatus


@dataclass(slots=True, eq=False)
class BeamGroup:
    """Members of one search. `live[i]` computes `search.running[i]`."""

    members: list[Request]
    search: BeamSearch
    live: list[Request] = field(init=False)
    spare_blocks: list[int] = field(default_factory=list)
    spare_rows: list[int] = field(default_factory=list)
    num_unread: int = 0  # members whose candidates are sampled by steps in flight
    is_stale: bool = False  # those are of a search that was given up
    _arrived: dict[str, Candidates] = field(default_factory=dict)  # of live members, by request id

    def __post_init__(self) -> None:
        self.live = [self.first]

    @property
    def first(self) -> Request:
        return self.members[0]

    @property
    def width(self) -> int:
        return len(self.members)

    @property
    def held(self) -> list[Request]:
        """Members that have no hypothesis yet."""
        return self.members[1:] if len(self.live) < len(self.members) else []

    def num_blocks(self, block_size: int) -> int:
        """Return how many blocks the group can need."""
        return num_blocks_of(self.first, self.first.max_num_tokens, block_size)

    def push(self, request: Request, candidates: Candidates) -> bool:
        """Take in what may follow a member's hypothesis; return whether every member's has arrived."""
        self._arrived[request.request_id] = candidates
        return len(self._arrived) == len(self.live)

    def advance(self, pool: BlockPool) -> list[Request]:
        """Let the members take on the hypotheses that go on; return those that were held before."""
        numbers = self.search.advance([self._arrived[request.request_id] for request in self.live])
        self._arrived.clear()
        if self.search.is_over:
            return []
        held, parents = self.held, [self.live[number] for number in numbers]
        idle = [member for member in self.members if member not in parents]
        for member in idle:
            self._drop_blocks(member, pool)
        live: list[Request] = []
        for parent in parents:
            live.append(_fork(parent, idle.pop(0), pool) if parent in live else parent)
        for member, hypothesis in zip(live, self.search.running, strict=True):
            member.all_token_ids.append(hypothesis.token_id)
            member.output_token_ids.append(hypothesis.token_id)
            member.num_tokens_bound = member.num_tokens
        self.live = live
        return held

    def take_blocks(self, n: int) -> list[int]:
        """Return n blocks that no member holds."""
        assert n <= len(self.spare_blocks), "a beam search needs more blocks than it was admitted with"
        return [self.spare_blocks.pop() for _ in range(n)]

    def take_results(self) -> Iterator[tuple[Request, RequestStatus]]:
        """Give each member the tokens of a finished hypothesis, best first; yield it with its final status."""
        for member, (hypothesis, _) in zip(self.members, self.search.finished, strict=True):
            member.forget_output()
            member.hypothesis = hypothesis
            member.output_token_ids = [one.token_id for one in hypothesis.tokens()]
            member.all_token_ids += member.output_token_ids
            is_stop = hypothesis.token_id in member.ending_token_ids
            yield member, RequestStatus.FINISHED_STOPPED if is_stop else RequestStatus.FINISHED_LENGTH

    def restart(self, search: BeamSearch) -> None:
        """Give up all hypotheses, after rows and blocks were given back; results of steps in flight are stale."""
        self.search, self.live, self.is_stale = search, [self.first], self.num_unread > 0
        self._arrived.clear()
        for member in self.members:
            member.forget_output()
        self.first.num_tokens_bound += self.is_stale

    def note_read(self) -> bool:
        """Take note that a member's candidates were read; return whether they are of use."""
        self.num_unread -= 1
        is_of_use = not self.is_stale
        if self.is_stale and not self.num_unread:
            self.is_stale, self.first.num_tokens_bound = False, self.first.num_tokens
        return is_of_use

    def _drop_blocks(self, member: Request, pool: BlockPool) -> None:
        """Take back the blocks that only this member holds; with the others it goes on sharing nothing."""
        for block_id in member.block_ids:
            if pool.is_shared(block_id):
                pool.release([block_id])
            else:
                self.spare_blocks.append(block_id)
        member.block_ids = []


def new_search(request: Request) -> BeamSearch:
    """Return the search that a request asks for."""
    params = request.sampling_params
    return BeamSearch(
        params.beam_width,
        max_tokens=request.max_num_tokens - request.num_prompt_tokens,
        ending_token_ids=request.ending_token_ids,
        min_tokens=params.min_tokens,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
    )


def num_blocks_of(request: Request, max_num_tokens: int, block_size: int) -> int:
    """Return how many blocks a search can need: the full ones of the prompt once, all others for each hypothesis."""
    num_each, num_shared = blocks_for(max_num_tokens, block_size), request.num_prompt_tokens // block_size
    return num_shared + request.sampling_params.beam_width * (num_each - num_shared)


def _fork(parent: Request, member: Request, pool: BlockPool) -> Request:
    member.all_token_ids = list(parent.all_token_ids)
    member.output_token_ids = list(parent.output_token_ids)
    member.block_ids = list(parent.block_ids)
    member.num_computed_tokens = parent.num_computed_tokens
    pool.retain(member.block_ids)
    return member


class BeamGroups:
    """The groups of all unfinished searches."""

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self._pool = pool
        self._block_size = block_size
        self._groups: dict[str, BeamGroup] = {}  # by the request id of each member
        self._has_unread = False  # when the iteration began

    def __iter__(self) -> Iterator[BeamGroup]:
        return (group for request_id, group in self._groups.items() if group.first.request_id == request_id)

    @property
    def held(self) -> list[Request]:
        """Members of all groups that have no hypothesis yet."""
        return [member for group in self for member in group.held]

    def block_tables(self) -> list[list[int]]:
        """Return the spare blocks of each group."""
        return [group.spare_blocks for group in self]

    def add(self, members: Sequence[Request]) -> None:
        """Take note of a new search, whose first member is going to be queued."""
        group = BeamGroup(list(members), new_search(members[0]))
        self._groups.update((member.request_id, group) for member in members)

    def begin(self) -> None:
        """Begin an iteration."""
        self._has_unread = any(group.num_unread for group in self)

    def must_wait(self, request: Request) -> bool:
        """Whether a beam is not to be scheduled: a token of its own is unread, or one of another search that generates.

        Searches keep in step: one iteration for all of them reads the weights once.
        """
        return request.num_in_flight > 0 or (self._has_unread and bool(request.output_token_ids))

    def most_blocks(self) -> int:
        """Return how many blocks the largest search can need."""
        return max((group.num_blocks(self._block_size) for group in self), default=0)

    def of(self, request: Request) -> BeamGroup:
        """Return the group that a beam belongs to."""
        return self._groups[request.request_id]

    def note_ended(self, request: Request) -> tuple[bool, list[int]]:
        """Take note that a beam has ended; with the last of its search the spare blocks are released.

        Returns:
          Whether it was held, and so is in no queue; and rows that are nobody's any more.
        """
        group = self.of(request)
        was_held = request.row is None and request is not group.first
        if request is not group.members[-1]:
            return was_held, []
        for member in group.members:
            del self._groups[member.request_id]
        return was_held, self.give_back(group)

    def give_back(self, group: BeamGroup) -> list[int]:
        """Release a group's spare blocks; return its spare rows, which are nobody's from now on."""
        rows, group.spare_rows = group.spare_rows, []
        self._pool.release(group.spare_blocks)
        group.spare_blocks = []
        return rows
