"""Which requests could run if they had the engine to themselves; all others are refused before they are queued."""

from collections.abc import Collection
from dataclasses import dataclass

from pagedjax.errors import InvalidRequestError
from pagedjax.scheduling.beam_group import num_blocks_of
from pagedjax.scheduling.block_demand import blocks_for
from pagedjax.scheduling.request import Request


@dataclass(frozen=True, slots=True)
class Limits:
    """What one scheduler has: blocks in all, and pinned ones among them."""

    max_model_len: int
    block_size: int
    num_blocks: int
    num_pinned: int
    max_num_seqs: int


def check_request(request: Request, limits: Limits, ids_in_use: Collection[str]) -> None:
    """Check a request of its own, one of several with a prompt, or a beam of a search.

    Raises:
      InvalidRequestError: it could never run, or its id is in use.
    """
    num_prompt_tokens, request_id = request.num_prompt_tokens, request.request_id
    if request_id in ids_in_use:
        raise InvalidRequestError(
            f"request_id {request_id!r:.80} belongs to an unfinished request; choose another or abort it first",
            param="request_id",
        )
    if not 0 < num_prompt_tokens < limits.max_model_len:
        raise InvalidRequestError(
            f"prompt has {num_prompt_tokens} tokens, max_model_len is {limits.max_model_len} with at least one token "
            "of output; send 1 token or more, or raise --max-model-len",
            param="prompt",
        )
    num_tokens = min(request.max_num_tokens, limits.max_model_len)
    if blocks_for(num_tokens, limits.block_size) > limits.num_blocks:
        raise InvalidRequestError(
            f"prompt and output may reach {num_tokens} tokens, the KV cache holds "
            f"{limits.num_blocks * limits.block_size}; shorten the prompt, lower max_tokens or enlarge the cache",
            param="max_tokens",
        )
    if request.is_beam:
        _check_beam(request, limits)


def _check_beam(request: Request, limits: Limits) -> None:
    width = request.sampling_params.beam_width
    if width > limits.max_num_seqs:
        raise InvalidRequestError(
            f"a beam search of width {width} computes {width} hypotheses in one iteration, max_num_seqs is "
            f"{limits.max_num_seqs}; lower n and best_of or raise --max-num-seqs",
            param="n" if request.sampling_params.best_of is None else "best_of",
        )
    num_needed = num_blocks_of(request, min(request.max_num_tokens, limits.max_model_len), limits.block_size)
    if num_needed > limits.num_blocks - limits.num_pinned:
        raise InvalidRequestError(
            f"a beam search of width {width} over {request.num_prompt_tokens} prompt tokens with max_tokens "
            f"{request.max_tokens} may need {num_needed} KV cache blocks, there are "
            f"{limits.num_blocks - limits.num_pinned} beside pinned prefixes; lower max_tokens or the width, or "
            "enlarge the cache",
            param="max_tokens",
        )
