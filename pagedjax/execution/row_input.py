"""Packs a request into its device rows: the small row every step reads and the wide one of the full sampler.

Numpy only; the counterpart of `request_state`, which unpacks on the device.
"""

from collections.abc import Sequence
from enum import IntFlag, auto

import numpy as np

from pagedjax.execution.filters import NUM_CANDIDATES
from pagedjax.execution.gumbel import seed_words
from pagedjax.execution.request_state import FLOATS, NUM_FIXED, SamplerState, neutral_sampler_row
from pagedjax.execution.sampler import Variant
from pagedjax.sampling_params import MAX_BAD_WORD_TOKENS, SamplingParams
from pagedjax.scheduling.request import Request
from pagedjax.scheduling.step_plan import ScheduledRequest


class RowNeeds(IntFlag):
    """What a request asks of the steps that it is in; those of a batch are the union of its requests'."""

    WIDE_ROW = auto()
    FILTERS = auto()
    WIDE_TOP_K = auto()  # more candidates than the cheaper sampler looks at, once anything filters
    GRAMMAR = auto()
    LOGPROBS = auto()
    PROMPT_LOGPROBS = auto()
    BEAMS = auto()

    @classmethod
    def of(cls, params: SamplingParams) -> "RowNeeds":
        needs = cls(0)
        if params.logprobs is not None:
            needs |= cls.LOGPROBS
        if params.prompt_logprobs is not None:
            needs |= cls.PROMPT_LOGPROBS
        if params.use_beam_search:  # the host chooses its tokens
            return needs | cls.BEAMS
        if needs_wide_row(params):
            needs |= cls.WIDE_ROW
        if has_filters(params):
            needs |= cls.FILTERS
        if not params.is_greedy and not 0 < params.top_k <= NUM_CANDIDATES:
            needs |= cls.WIDE_TOP_K
        if params.structured_outputs is not None:
            needs |= cls.GRAMMAR
        return needs

    @property
    def variant(self) -> Variant:
        """The cheapest variant of the sampler that covers all of it."""
        if not self & (RowNeeds.WIDE_ROW | RowNeeds.FILTERS):
            return "plain"
        return "full" if self & RowNeeds.WIDE_TOP_K else "top_k"


def has_filters(params: SamplingParams) -> bool:
    """Whether top-k, top-p or min-p cut anything; they change no greedy choice."""
    return not params.is_greedy and (params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0)


def needs_wide_row(params: SamplingParams) -> bool:
    """Whether a request uses penalties, biases, masks or bans; a grammar's masks are written into the row.

    Beams do not: the host chooses their tokens, and bans among them.
    """
    return not params.use_beam_search and bool(
        params.has_penalties
        or params.logit_bias
        or params.allowed_token_ids is not None
        or params.bad_words
        or params.min_tokens
        or params.structured_outputs is not None
    )


def pack_rows(items: Sequence[ScheduledRequest], bucket: int, *, max_blocks: int, max_num_seqs: int) -> np.ndarray:
    """[bucket, NUM_FIXED + max_blocks] int32 for `request_state.write_rows`."""
    packed = np.zeros((bucket, NUM_FIXED + max_blocks), np.int32)
    packed[:, 0] = max_num_seqs
    for target, item in zip(packed, items, strict=False):
        request, params = item.request, item.request.sampling_params
        floats = np.array([getattr(params, name) for name in FLOATS], np.float32)
        ints = (
            max(params.top_k, 0),
            *np.array(seed_words(request.seed), np.uint32).view(np.int32),
            request.num_prompt_tokens + params.min_tokens,
        )
        target[: 3 + len(FLOATS)] = (item.row, item.context_len, request.all_token_ids[-1], *floats.view(np.int32))
        target[3 + len(FLOATS) : NUM_FIXED] = ints
        target[NUM_FIXED : NUM_FIXED + len(request.block_ids)] = request.block_ids
    return packed


def wide_row(request: Request, vocab_size: int) -> SamplerState:
    """A single row of `SamplerState`, as numpy arrays, for the tokens known so far."""
    wide, params = neutral_sampler_row(vocab_size), request.sampling_params
    if params.has_penalties:
        wide.prompt_mask[0, np.asarray(request.prompt_token_ids, np.int64)] = True
        counts = np.bincount(np.asarray(request.output_token_ids, np.int64), minlength=vocab_size)
        wide.output_counts[0] = np.minimum(counts, np.iinfo(np.int16).max)
    if params.logit_bias:
        wide.bias_ids[0, : len(params.logit_bias)] = list(params.logit_bias)
        wide.bias_values[0, : len(params.logit_bias)] = list(params.logit_bias.values())
    if params.allowed_token_ids is not None:
        wide.allowed_mask[0] = bit_mask(params.allowed_token_ids, vocab_size)
    if params.min_tokens:
        stop_ids = sorted(request.ending_token_ids)
        wide.stop_ids[0, : len(stop_ids)] = stop_ids
    for i, word in enumerate(request.bad_word_token_ids):
        wide.bad_words[0, i, MAX_BAD_WORD_TOKENS - len(word) :] = word
    recent = request.output_token_ids[-MAX_BAD_WORD_TOKENS:]
    if recent:
        wide.recent_token_ids[0, -len(recent) :] = recent
    return wide


def bit_mask(token_ids: Sequence[int], vocab_size: int) -> np.ndarray:
    """[ceil(V / 32)] uint32: bit v % 32 of word v // 32 is set for each of `token_ids`."""
    allowed = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    allowed[list(token_ids)] = 1
    return np.packbits(allowed, bitorder="little").view(np.uint32)
