"""Drafts that the host makes: from a suffix tree over a request's own tokens and recent outputs of others.

The host must have read a request's newest token to go on from it, so a request that is to have drafts waits for the
step in flight (`Request.is_drafted_from_output`); without drafts it runs ahead like any other. A long prompt is read
over many steps, and its request runs ahead until all of it was.
"""

from pagedjax.scheduling.request import Request
from pagedjax.speculation.config import SpeculativeConfig
from pagedjax.speculation.suffix_tree import SuffixTreeProposer

MAX_READ = 1024  # tokens of all requests that are read before one step, newly sampled ones apart: about 5 ms
MAX_KEPT = 1024  # of outputs that ended and will serve others: about 2 ms


class HostDrafts:
    """Follows the requests that drafts were wanted for until they end."""

    def __init__(self, config: SpeculativeConfig):
        self._max_draft_tokens = config.num_speculative_tokens
        self._tree = SuffixTreeProposer(
            max_tree_depth=config.suffix_decoding_max_tree_depth,
            max_cached_requests=config.suffix_decoding_max_cached_requests,
            max_spec_factor=config.suffix_decoding_max_spec_factor,
            min_token_prob=config.suffix_decoding_min_token_prob,
        )
        self._num_read: dict[str, int] = {}  # tokens of each request that is followed
        self._room = MAX_READ

    def begin_step(self) -> None:
        """Allow for as much reading as a step may be held up by, and keep a part of what ended."""
        self._room = MAX_READ
        self._tree.keep(MAX_KEPT)

    def find(self, request: Request, limit: int) -> int:
        """Propose for a request all of whose tokens are known; return how many drafts it can have, at most `limit`.

        Of one that has tokens in flight nothing is known yet, and it could be all; of one that is not read yet, none.
        """
        if request.request_id in self._num_read and not self._catch_up(request):
            return 0
        if request.num_in_flight:
            return limit
        if not self._catch_up(request):
            return 0
        request.draft_token_ids = self._tree.propose(request.request_id, limit)
        return len(request.draft_token_ids)

    def settle(self, request: Request, num_drafts: int) -> None:
        """Have a request verify `num_drafts` of what was found for it, or wait until something can be found."""
        request.is_drafted_from_output = num_drafts > 0 and self._catch_up(request)
        request.num_draft_tokens = 0 if request.num_in_flight else num_drafts

    def extend(self, request: Request, token_id: int) -> None:
        """Take note of a confirmed token, which the request has by now."""
        if self._num_read.get(request.request_id) == request.num_tokens - 1:
            self._num_read[request.request_id] += 1
            self._tree.extend(request.request_id, [token_id])

    def finish(self, request: Request) -> None:
        """End a request; its output will serve later ones."""
        num_read = self._num_read.pop(request.request_id, None)
        if num_read is not None:
            self._tree.finish(request.request_id, is_read=num_read == request.num_tokens)

    def _catch_up(self, request: Request) -> bool:
        """Read as much as there is room for of what is not read; return whether that was all."""
        if request.request_id not in self._num_read:
            key = (request.cache_salt, request.client)
            self._tree.start(request.request_id, request.num_prompt_tokens, key)
            self._num_read[request.request_id] = 0
        start = self._num_read[request.request_id]
        if start < request.num_tokens and self._room:
            token_ids = request.all_token_ids[start : start + self._room]
            self._tree.read(request.request_id, token_ids)
            self._room -= len(token_ids)
            self._num_read[request.request_id] += len(token_ids)
        return self._num_read[request.request_id] == request.num_tokens
