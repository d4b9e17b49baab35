"""How many blocks a request needs, has yet to take, or could spare.

Drafts are written beyond a request's newest token, so they may need blocks that the request does not need otherwise.
They take blocks that nobody else misses, and leave those of refused ones to whoever needs them. Knows block tables and
lengths; the scheduler decides.
"""

from collections.abc import Sequence
from itertools import accumulate

from pagedjax.scheduling.request import Request, RequestStatus


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Return how many blocks hold so many tokens."""
    return -(-num_tokens // block_size)


def num_missing_blocks(request: Request, num_tokens: int, block_size: int) -> int:
    """Return how many blocks a request has yet to take for its first `num_tokens`; beams have theirs set aside."""
    return 0 if request.is_beam else max(0, blocks_for(num_tokens, block_size) - len(request.block_ids))


def blocks_behind(running: Sequence[Request], block_size: int) -> list[int]:
    """Return at index i how many blocks the last i requests have yet to take for the tokens that they have.

    Of no use where nobody drafts, and then [].
    """
    if not any(request.num_draft_tokens for request in running):
        return []
    missing = (num_missing_blocks(request, request.num_tokens_bound, block_size) for request in reversed(running))
    return list(accumulate(missing, initial=0))


def num_spare_blocks(request: Request, block_size: int) -> int:
    """Return how many blocks at the end of a request's table neither steps under way write nor its next token needs.

    Only of one that generates: others have blocks for what they are about to compute.
    """
    is_generating = request.status is RequestStatus.RUNNING and not request.is_new_row
    if not is_generating or request.is_reading:
        return 0
    num_needed = blocks_for(max(request.num_computed_tokens, request.num_tokens_bound), block_size)
    return max(0, len(request.block_ids) - num_needed)
