"""Drafts that the host makes: from a suffix tree over a request's own tokens and recent outputs of others.

The host must have read a request's newest token to go on from it, so a request that is to have drafts waits for the
step in flight (`Request.is_drafted_from_output`); without drafts it runs ahead like any other.
"""

from pagedjax.scheduling.request import Request
from pagedjax.speculation.config import SpeculativeConfig
from pagedjax.speculation.suffix_tree import SuffixTreeProposer


class HostDrafts:
    """Follows the requests that it was asked about until they end."""

    def __init__(self, config: SpeculativeConfig):
        self._max_draft_tokens = config.num_speculative_tokens
        self._tree = SuffixTreeProposer(
            max_tree_depth=config.suffix_decoding_max_tree_depth,
            max_cached_requests=config.suffix_decoding_max_cached_requests,
            max_spec_factor=config.suffix_decoding_max_spec_factor,
            min_token_prob=config.suffix_decoding_min_token_prob,
        )
        self._followed: set[str] = set()

    def find(self, request: Request, limit: int) -> int:
        """Propose for a request all of whose tokens are known; return how many drafts it can have, at most `limit`.

        Of one that has tokens in flight nothing is known yet, and it could be all.
        """
        if request.num_in_flight:
            return limit
        if request.request_id not in self._followed:
            self._followed.add(request.request_id)
            self._tree.start(request.request_id, request.prompt_token_ids, (request.cache_salt, request.client))
            self._tree.extend(request.request_id, request.output_token_ids)
        request.draft_token_ids = self._tree.propose(request.request_id, limit)
        return len(request.draft_token_ids)

    def settle(self, request: Request, num_drafts: int) -> None:
        """Have a request verify `num_drafts` of what was found for it, or wait until something can be found."""
        request.is_drafted_from_output = num_drafts > 0
        request.num_draft_tokens = 0 if request.num_in_flight else num_drafts

    def extend(self, request: Request, token_id: int) -> None:
        """Take note of a confirmed token."""
        if request.request_id in self._followed:
            self._tree.extend(request.request_id, [token_id])

    def finish(self, request_id: str) -> None:
        """End a request; its output serves later ones."""
        if request_id in self._followed:
            self._followed.discard(request_id)
            self._tree.finish(request_id)
