"""Requests with one prompt: the first computes it, the others start from its blocks and compute its last token alone.

    held -> queued -> started         held: in no queue, until the prompt is computed
      |        |                      queued: an ordinary waiting request that will start from the group's blocks
      +--------+--> gone              aborted, or the group's blocks were dropped for somebody who runs

A group holds the prompt's blocks until its last member has started, so that the first may end or be preempted
meanwhile. They include the one that the prompt fills in part, which nobody writes while it is shared: the scheduler
copies it first. Owns these references and the members held; queues and rows are the scheduler's.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from pagedjax.scheduling.block_demand import blocks_for
from pagedjax.scheduling.block_pool import BlockPool
from pagedjax.scheduling.request import Request


@dataclass(slots=True, eq=False)
class PromptGroup:
    """Requests with one prompt and, once that is computed, the blocks of its tokens save the last."""

    first: Request
    held: list[Request]
    member_ids: list[str]
    queued: set[str] = field(default_factory=set)  # ids of members that have not started
    is_computed: bool = False
    block_ids: list[int] = field(default_factory=list)
    num_tokens: int = 0
    block_hashes: list[bytes] = field(default_factory=list)


class PromptForks:
    """All groups with members that have not started yet."""

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self._pool = pool
        self._block_size = block_size
        self._groups: dict[str, PromptGroup] = {}  # by the request id of each member
        self._computed: list[PromptGroup] = []  # by the plan that was made last
        self._holding: list[PromptGroup] = []  # blocks

    def __bool__(self) -> bool:
        return bool(self._groups)

    @property
    def held(self) -> list[Request]:
        """Members that wait for their prompt to be computed."""
        groups = {id(group): group for group in self._groups.values()}
        return [request for group in groups.values() for request in group.held]

    def block_tables(self) -> list[list[int]]:
        """Return the blocks that each group holds."""
        return [group.block_ids for group in self._holding]

    def add(self, first: Request, others: Sequence[Request]) -> None:
        """Hold `others` until `first` has computed their common prompt."""
        member_ids = [request.request_id for request in (first, *others)]
        self._groups.update(dict.fromkeys(member_ids, PromptGroup(first, list(others), member_ids)))

    def note_computed(self, request: Request) -> None:
        """Take note that a request's prompt is computed by the steps planned so far, the one under way included."""
        group = self._groups.get(request.request_id)
        if group is None or group.is_computed or group.first is not request:
            return
        group.is_computed = True
        self._computed.append(group)

    def release_held(self) -> list[Request]:
        """Take over the prompts that the last plan computed, and return the members to be queued.

        To be called before blocks of requests that have ended are released.
        """
        requests: list[Request] = []
        for group in self._computed:
            if group.first.row is None:
                group.is_computed = False  # it was preempted by a reset
                continue
            self._take_over(group)
            group.queued.update(request.request_id for request in group.held)
            requests += group.held
            group.held = []
        self._computed = []
        return requests

    def prefix_of(self, request: Request) -> tuple[list[int], int]:
        """Return the blocks that a member may start from and how many tokens they hold, [] and 0 if there are none."""
        group = self._groups.get(request.request_id)
        return (group.block_ids, group.num_tokens) if group is not None else ([], 0)

    def note_started(self, request: Request) -> None:
        """Take note that a request was admitted; if it is the last of its group, the group is over."""
        group = self._groups.get(request.request_id)
        if group is not None and request.request_id in group.queued:
            request.block_hashes = list(group.block_hashes)
            group.queued.remove(request.request_id)
            self._close_if_done(group)

    def note_ended(self, request: Request) -> tuple[bool, Request | None]:
        """Take note that a request has ended.

        Returns:
          Whether it was held, and so is in no queue; and who is to be queued to compute the prompt in its place.
        """
        group, heir = self._groups.pop(request.request_id, None), None
        if group is None:
            return False, None
        was_held = request in group.held
        if was_held:
            group.held.remove(request)
        group.queued.discard(request.request_id)
        if group.first is request and not group.is_computed and group.held:
            heir = group.first = group.held.pop(0)
        self._close_if_done(group)
        return was_held, heir

    def drop(self) -> bool:
        """Let go of the newest group's blocks, so that its members compute the prompt; False if no group holds any."""
        if not self._holding:
            return False
        self._let_go(self._holding[-1])
        return True

    def _take_over(self, group: PromptGroup) -> None:
        group.num_tokens = group.first.num_prompt_tokens - 1
        group.block_ids = group.first.block_ids[: blocks_for(group.num_tokens, self._block_size)]
        group.block_hashes = group.first.block_hashes[: group.num_tokens // self._block_size]
        self._pool.retain(group.block_ids)
        self._holding.append(group)

    def _close_if_done(self, group: PromptGroup) -> None:
        if not group.held and not group.queued:
            self._let_go(group)
            for request_id in group.member_ids:
                self._groups.pop(request_id, None)

    def _let_go(self, group: PromptGroup) -> None:
        if group in self._holding:
            self._holding.remove(group)
            self._pool.release(group.block_ids)
        group.block_ids, group.num_tokens, group.block_hashes = [], 0, []
