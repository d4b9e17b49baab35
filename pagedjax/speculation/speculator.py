"""The device side of speculation for one model runner: its arrays, its executables, and what a step does with them.

    propose   before the forward pass: drafts go into the rows
    pick      after it: the hidden states that are sampled after
    verify    in place of sampling: new tokens, rows rolled back, the result to read

The runner calls these for steps with drafts and none of it for others. Knows no queues and no text.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Int, UInt

from pagedjax.execution.buckets import ROW_WRITER_BUCKETS, BucketTable, bucket_for
from pagedjax.execution.executables import ints
from pagedjax.execution.model_input import padded_rows
from pagedjax.execution.request_state import RowState, SamplerState
from pagedjax.execution.row_input import has_filters, needs_wide_row
from pagedjax.execution.step import StepFunctions, TokenLogprobs
from pagedjax.execution.tasks import Task, jit_with, shapes_of
from pagedjax.loading import LoadedModel
from pagedjax.sampling_params import SamplingParams
from pagedjax.scheduling.request import Request
from pagedjax.scheduling.step_plan import ScheduledRequest
from pagedjax.scheduling.swapping import BlockCopies
from pagedjax.speculation.config import SpeculativeConfig
from pagedjax.speculation.draft_proposer import DraftModelProposer
from pagedjax.speculation.history import TokenHistory
from pagedjax.speculation.proposer import Executables, HostProposer, NgramProposer, Proposer
from pagedjax.speculation.verification import VERIFY_VARIANTS, Verification, VerifyVariant, num_columns

EDITING: tuple[VerifyVariant, ...] = ("edited", "standard")  # these read the wide rows


@dataclass(frozen=True, slots=True)
class VerifiedDrafts:
    """What one step made of one request's drafts."""

    request_id: str
    draft_token_ids: tuple[int, ...]  # those that there were: a proposer may have fewer than were asked for
    num_accepted: int


class Speculator:
    """Owns the token history and the masks of drafts. R rows, at most K drafts a row."""

    def __init__(
        self, config: SpeculativeConfig, buckets: BucketTable, draft: LoadedModel | None, *, max_model_len: int,
        vocab_size: int, max_logprobs: int, dtype: DTypeLike,
    ):  # fmt: skip
        self._buckets = buckets
        self._width = 1 + config.num_speculative_tokens
        self._max_logprobs = max_logprobs
        self._forced_acceptance = config.forced_acceptance
        self._variants = VERIFY_VARIANTS[jax.default_backend()]
        if config.rejection_sample_method == "standard":
            self._variants = ("standard",)
        self._history = TokenHistory(buckets.max_num_seqs, max_model_len, buckets.block_size)
        self._proposer = self._make_proposer(config, draft, dtype)
        mask_shape = (buckets.max_num_seqs, config.num_speculative_tokens, -(-vocab_size // 32))
        self._draft_masks = jnp.full(mask_shape, 0xFFFFFFFF, jnp.uint32)
        self._executables: Executables = {}

    @property
    def arrays(self) -> list[jax.Array]:
        """Its device arrays, those of a draft model's KV cache once they are allocated."""
        return [self._history.array, self._draft_masks, *self._proposer.arrays]

    def tasks(
        self, functions: StepFunctions, *, num_blocks: int, hidden_size: int, dtype: DTypeLike, state: RowState,
        wide: SamplerState,
    ) -> list[Task]:  # fmt: skip
        """List everything to compile; `state` and `wide` hold shapes."""
        verification = Verification(
            functions,
            max_draft_tokens=self._width - 1,
            max_logprobs=self._max_logprobs,
            forced_acceptance=self._forced_acceptance,
        )
        arrays = (functions.leaves, self._history.array, self._draft_masks, self._proposer.chances)
        leaves, history, masks, chances = shapes_of(arrays)
        num_picked = self._buckets.max_num_seqs * self._width
        picked = jax.ShapeDtypeStruct((num_picked, hidden_size), dtype)
        tasks = [*self._history.tasks, *self._proposer.tasks(state, num_blocks=num_blocks)]
        for num_tokens in sorted({shape.num_tokens for shape in self._buckets.forward_shapes}):
            hidden = jax.ShapeDtypeStruct((num_tokens, hidden_size), dtype)
            tasks.append(Task(_pick_name(hidden), jit_with(verification.pick), (hidden, ints(num_picked))))
        for bucket in self._buckets.sample:
            for variant in self._variants:
                run = jit_with(verification.verify, donate=(1, 2, 3), variant=variant)
                extras = (wide, masks, chances) if variant in EDITING else (None, None, None)
                tasks.append(
                    Task(f"verify {bucket} {variant}", run, (leaves, state, history, *extras, picked, ints(3, bucket)))
                )
            result = ints(bucket, num_columns(self._width - 1))
            tasks.append(Task(f"verify logprobs {bucket}", jit_with(verification.logprobs), (leaves, picked, result)))
        for bucket in ROW_WRITER_BUCKETS:
            values = jax.ShapeDtypeStruct((bucket, *masks.shape[1:]), jnp.uint32)
            run = jit_with(write_draft_masks, donate=(0,))
            tasks.append(Task(f"write draft masks {bucket}", run, (masks, ints(bucket), values)))
        return tasks

    def allocate(self, num_blocks: int, executables: Executables) -> None:
        """Take what was compiled of `tasks`, and make the KV cache of a draft model."""
        self._executables = executables
        self._proposer.allocate(num_blocks)

    def note_copies(self, copies: BlockCopies) -> None:
        """Take note of what came back from host memory: K and V of the target alone."""
        self._proposer.forget_blocks(block_id for copy in copies.landed for block_id in copy.block_ids if block_id)

    def num_missing(self, request: Request) -> int:
        """Tokens that a draft model has to read before it can draft for a request."""
        return self._proposer.num_missing(request)

    def propose(self, state: RowState, scheduled: Sequence[ScheduledRequest]) -> tuple[RowState, jax.Array | None]:
        """Fill the drafts of the rows that verify some in this step; return them too, in the order of `scheduled`.

        A draft model reads what `Request.num_draft_reads` says of others.
        """
        self._history.note_plan(scheduled)
        self._proposer.note_plan(scheduled)
        drafting = [item for item in scheduled if item.num_draft_tokens]
        if self._proposer.uses_history:
            self._catch_up(state, scheduled)
        if not drafting:
            return state, None
        return self._proposer.propose(state, drafting, self._executables)

    def pick(self, hidden: jax.Array, batch: Sequence[ScheduledRequest]) -> jax.Array:
        """Hidden states that the requests of `batch` sample after, sampling ones first: [R * (1 + K), D]."""
        index = np.zeros((self._buckets.max_num_seqs, self._width), np.int32)
        shares = [(item.num_scheduled_tokens, item.num_draft_tokens, item.samples) for item in batch]
        num_tokens, num_drafts, samples = np.array(shares, np.int32).reshape(-1, 3).T[:, :, None]
        newest = np.cumsum(num_tokens, axis=0) - 1 - num_drafts
        index[: len(batch)] = np.where(samples, newest + np.minimum(np.arange(self._width), num_drafts), 0)
        return self._executables[_pick_name(hidden)](hidden, index.reshape(-1))

    def verify(
        self, leaves: tuple, state: RowState, wide: SamplerState, hidden: jax.Array,
        sampling: Sequence[ScheduledRequest],
    ) -> tuple[RowState, SamplerState, jax.Array, TokenLogprobs | None]:  # fmt: skip
        """Sample and verify for `sampling`; `hidden` is what was picked. Returns the result array and log probs."""
        params = [item.request.sampling_params for item in sampling]
        batch = np.zeros((3, bucket_for(len(sampling), self._buckets.sample)), np.int32)
        batch[0] = self._buckets.max_num_seqs
        batch[0, : len(sampling)] = [item.row for item in sampling]
        batch[1, : len(sampling)] = [item.num_draft_tokens for item in sampling]
        batch[2, : len(sampling)] = [one.structured_outputs is not None for one in params]
        state, wide, result = self._run_verify(leaves, state, wide, hidden, batch, self._variant(params))
        logprobs = None
        if any(one.logprobs is not None for one in params):
            logprobs = self._executables[f"verify logprobs {batch.shape[1]}"](leaves, hidden, result)
        return state, wide, result, logprobs

    def write_masks(self, items: Sequence[ScheduledRequest], masks: np.ndarray) -> None:
        """Restrict the tokens after the drafts of `items`: masks is [n, K, ceil(V / 32)] uint32."""
        for start in range(0, len(items), ROW_WRITER_BUCKETS[-1]):
            part = items[start : start + ROW_WRITER_BUCKETS[-1]]
            bucket = bucket_for(len(part), ROW_WRITER_BUCKETS)
            rows = padded_rows(part, bucket, no_row=self._buckets.max_num_seqs)
            padded = np.zeros((bucket, *masks.shape[1:]), np.uint32)
            padded[: len(part)] = masks[start : start + len(part)]
            self._draft_masks = self._executables[f"write draft masks {bucket}"](self._draft_masks, rows, padded)

    def warm_up(
        self, leaves: tuple, state: RowState, wide: SamplerState, hidden: jax.Array
    ) -> tuple[RowState, SamplerState]:
        """Run each executable once, on padding; `hidden` are those of any step."""
        self._history.warm_up(self._executables)
        state = self._proposer.warm_up(state, self._executables)
        picked = self.pick(hidden, [])
        for bucket in self._buckets.sample:
            batch = np.full((3, bucket), self._buckets.max_num_seqs, np.int32)
            batch[1:] = 0
            for variant in self._variants:
                state, wide, result = self._run_verify(leaves, state, wide, picked, batch, variant)
                self._executables[f"verify logprobs {bucket}"](leaves, picked, result)
        return state, wide

    def _make_proposer(self, config: SpeculativeConfig, draft: LoadedModel | None, dtype: DTypeLike) -> Proposer:
        buckets, max_draft_tokens = self._buckets, config.num_speculative_tokens
        if draft is not None:
            return DraftModelProposer(
                draft, self._history, buckets, max_draft_tokens=max_draft_tokens, dtype=dtype,
                keeps_chances=config.rejection_sample_method == "standard",
            )  # fmt: skip
        if config.method == "suffix":
            return HostProposer(buckets, max_draft_tokens=max_draft_tokens)
        fewest, most = config.prompt_lookup_min, config.prompt_lookup_max
        assert fewest is not None, "the configuration is complete"
        assert most is not None, "the configuration is complete"
        return NgramProposer(self._history, buckets, min_tokens=fewest, max_tokens=most)

    def _catch_up(self, state: RowState, scheduled: Sequence[ScheduledRequest]) -> None:
        """Give the history and a draft model what they miss of rows with drafts, and a part of others that wait."""
        ends = [(item, item.request.num_tokens) for item in scheduled if item.num_draft_tokens]
        for item in scheduled:
            request = item.request
            if request.num_draft_reads and not (item.num_draft_tokens or item.is_new_row):
                end = request.num_tokens - self._proposer.num_missing(request) + request.num_draft_reads
                ends.append((item, min(end, request.num_tokens)))
        self._history.catch_up(ends, self._executables)
        self._proposer.catch_up(state, ends, self._executables)
        self._history.note_read(ends)

    def _variant(self, params: Sequence[SamplingParams]) -> VerifyVariant:
        """The cheapest variant of verification that covers every request of a batch."""
        wanted: VerifyVariant = "edited"
        if not any(map(needs_wide_row, params)):
            wanted = "filtered" if any(map(has_filters, params)) else "plain"
        return wanted if wanted in self._variants else self._variants[-1]

    def _run_verify(
        self, leaves: tuple, state: RowState, wide: SamplerState, hidden: jax.Array, batch: np.ndarray,
        variant: VerifyVariant,
    ) -> tuple[RowState, SamplerState, jax.Array]:  # fmt: skip
        is_edited = variant in EDITING
        extras = (wide, self._draft_masks, self._proposer.chances) if is_edited else (None, None, None)
        run = self._executables[f"verify {batch.shape[1]} {variant}"]
        state, self._history.array, new_wide, result = run(leaves, state, self._history.array, *extras, hidden, batch)
        return state, new_wide if is_edited else wide, result


def verified_drafts(item: ScheduledRequest, result: Sequence[int]) -> VerifiedDrafts:
    """Read one row of a result."""
    max_drafts = (len(result) - 3) // 2
    drafts = result[1 + max_drafts : 1 + max_drafts + item.num_draft_tokens]
    return VerifiedDrafts(item.request.request_id, tuple(one for one in drafts if one >= 0), max(0, result[-2] - 1))


def write_draft_masks(
    draft_masks: UInt[Array, "R K W"], rows: Int[Array, " n"], masks: UInt[Array, "n K W"]
) -> UInt[Array, "R K W"]:
    """Overwrite the masks of rows (a row of R is a pad)."""
    return draft_masks.at[rows].set(masks, mode="drop")


def _pick_name(hidden: Any) -> str:
    return f"pick from {hidden.shape[0]} tokens"
