"""Proposes with a draft model: owns its weights and its KV cache, which has the target's blocks.

A request's prompt is read when drafts are first wanted, over several steps if it is long, and what plain steps added
when they are wanted again, so a draft model that is not used costs nothing but memory. Knows which blocks hold what it
has read.
"""

from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from pagedjax.execution import kv_cache
from pagedjax.execution.buckets import BucketTable, bucket_for, sizes_up_to
from pagedjax.execution.executables import ints
from pagedjax.execution.model_input import padded_rows
from pagedjax.execution.request_state import RowState
from pagedjax.execution.row_input import has_filters
from pagedjax.execution.tasks import Task, jit_with, shapes_of
from pagedjax.loading import LoadedModel
from pagedjax.scheduling.request import Request
from pagedjax.scheduling.step_plan import ScheduledRequest
from pagedjax.speculation.draft_model import DRAFT_VARIANTS, DraftFunctions, DraftVariant
from pagedjax.speculation.history import TokenHistory
from pagedjax.speculation.proposer import Executables

READ_SIZES = (64, 256, 1024)  # of tokens that are read at once


def max_num_read(buckets: BucketTable) -> int:
    """Return how many tokens are read in one step at most, beside which everybody's next token waits.

    At least what a few steps add to all rows, or a draft model would never catch up with them.
    """
    return max(min(READ_SIZES[-1], buckets.tokens[-1]), 4 * buckets.max_num_seqs)


class DraftModelProposer:
    """Drafts with `loaded`; the history has every row's tokens."""

    uses_history = True

    def __init__(
        self, loaded: LoadedModel, history: TokenHistory, buckets: BucketTable, *, max_draft_tokens: int,
        dtype: DTypeLike, keeps_chances: bool,
    ):  # fmt: skip
        self.chances = None
        if keeps_chances:
            self.chances = jnp.zeros((buckets.max_num_seqs, max_draft_tokens, loaded.config.vocab_size), jnp.float32)
        self._loaded = loaded
        self._history = history
        self._buckets = buckets
        self._dtype = jnp.dtype(dtype)
        self._token_buckets = sizes_up_to(max_num_read(buckets), READ_SIZES)
        self._max_new_blocks = 1 + max_draft_tokens // buckets.block_size  # of one row in one step
        self._leaves: tuple = ()
        self._kv_cache: list = []
        self._right_blocks: set[int] = set()  # full of K and V of the tokens that the target has there
        self._num_right_blocks = [0] * buckets.max_num_seqs  # of each row that are among them

    @property
    def arrays(self) -> list[jax.Array]:
        return jax.tree.leaves((self._kv_cache, self.chances))

    def tasks(self, state: RowState, *, num_blocks: int) -> list[Task]:
        config, buckets = self._loaded.config, self._buckets
        functions = DraftFunctions(self._loaded.model, block_size=buckets.block_size, num_blocks=num_blocks)
        self._leaves = functions.leaves
        pool = jax.ShapeDtypeStruct((num_blocks, config.num_kv_heads, buckets.block_size, config.head_dim), self._dtype)
        leaves, history = shapes_of((functions.leaves, self._history.array))
        arrays = (leaves, [(pool, pool)] * config.num_layers, state, history)
        tasks = []
        for bucket in self._token_buckets:
            run = jit_with(functions.prefill, donate=(1,), num_tokens=bucket)
            packed = ints(3, min(bucket, buckets.max_num_seqs))
            tasks.append(Task(f"read {bucket} tokens", run, (*arrays, packed), is_full_model=True))
        for bucket in buckets.sample:
            for variant in DRAFT_VARIANTS:
                run = jit_with(functions.propose, donate=(1, 2, 3, 6), variant=variant)
                packed = (ints(bucket), ints(3, bucket * self._max_new_blocks), shapes_of(self.chances))
                tasks.append(Task(f"propose {bucket} {variant}", run, (*arrays, *packed), is_full_model=True))
        return tasks

    def allocate(self, num_blocks: int) -> None:
        self._kv_cache = kv_cache.allocate(
            self._loaded.config, num_blocks=num_blocks, block_size=self._buckets.block_size, dtype=self._dtype
        )

    def note_plan(self, scheduled: Sequence[ScheduledRequest]) -> None:
        for item in scheduled:
            num_cached = 0
            if item.is_new_row:
                num_cached = item.context_len // self._buckets.block_size
                self._num_right_blocks[item.row] = 0
            self._right_blocks.difference_update(item.new_block_ids[num_cached:])

    def forget_blocks(self, block_ids: Iterable[int]) -> None:
        self._right_blocks.difference_update(block_ids)

    def num_missing(self, request: Request) -> int:
        return request.num_tokens - self._first_missing(request)

    def catch_up(self, state: RowState, ends: Sequence[tuple[ScheduledRequest, int]], executables: Executables) -> None:
        pieces = [(item.row, start := self._first_missing(item.request), max(0, end - start)) for item, end in ends]
        pieces = [piece for piece in pieces if piece[2]]
        if pieces:
            self._read(state, pieces, executables)

    def propose(
        self, state: RowState, drafting: Sequence[ScheduledRequest], executables: Executables
    ) -> tuple[RowState, jax.Array]:
        bucket, no_row = bucket_for(len(drafting), self._buckets.sample), self._buckets.max_num_seqs
        rows = padded_rows(drafting, bucket, no_row=no_row)
        updates = np.zeros((3, bucket * self._max_new_blocks), np.int32)
        updates[0] = no_row
        entries = []
        for item in drafting:
            # All drafts are computed, planned or not, and behind the plan's blocks a table may still name some that
            # others own by now: there goes the null block.
            block_ids = [*item.new_block_ids, *[0] * (self._max_new_blocks - len(item.new_block_ids))]
            entries += [(item.row, item.first_new_block_index + i, block_id) for i, block_id in enumerate(block_ids)]
        updates[:, : len(entries)] = np.array(entries, np.int32).T
        for item in drafting:
            self._note_right_blocks(item)
        has_no_filters = not any(has_filters(item.request.sampling_params) for item in drafting)
        return self._propose(state, rows, updates, "plain" if has_no_filters else "full", executables)

    def warm_up(self, state: RowState, executables: Executables) -> RowState:
        no_row = self._buckets.max_num_seqs
        for bucket in self._token_buckets:
            self._read(state, [], executables, bucket=bucket)
        for bucket in self._buckets.sample:
            updates = np.full((3, bucket * self._max_new_blocks), no_row, np.int32)
            for variant in DRAFT_VARIANTS:
                state, _ = self._propose(state, np.full(bucket, no_row, np.int32), updates, variant, executables)
        return state

    def _note_right_blocks(self, item: ScheduledRequest) -> None:
        known, num_right = self._num_right_blocks[item.row], item.request.num_tokens // self._buckets.block_size
        if num_right > known:
            self._right_blocks.update(item.request.block_ids[known:num_right])
            self._num_right_blocks[item.row] = num_right

    def _first_missing(self, request: Request) -> int:
        """The history's first missing token, or the first after leading blocks that another request had read."""
        first, block_size = self._history.first_missing(request), self._buckets.block_size
        num_right = 0
        if first < block_size:  # nothing was read for this row yet
            for block_id in request.block_ids[: request.num_tokens // block_size]:
                if block_id not in self._right_blocks:
                    break
                num_right += 1
        return max(first, num_right * block_size)

    def _read(
        self, state: RowState, pieces: Sequence[tuple[int, int, int]], executables: Executables, bucket: int = 0
    ) -> None:
        bucket = bucket or bucket_for(sum(num_tokens for _, _, num_tokens in pieces), self._token_buckets)
        packed = np.zeros((3, min(bucket, self._buckets.max_num_seqs)), np.int32)
        packed[0] = self._buckets.max_num_seqs
        for i, piece in enumerate(pieces):
            packed[:, i] = piece
        run = executables[f"read {bucket} tokens"]
        self._kv_cache = run(self._leaves, self._kv_cache, state, self._history.array, packed)

    def _propose(
        self, state: RowState, rows: np.ndarray, updates: np.ndarray, variant: DraftVariant, executables: Executables
    ) -> tuple[RowState, jax.Array]:
        run = executables[f"propose {len(rows)} {variant}"]
        self._kv_cache, state, self._history.array, drafts, self.chances = run(
            self._leaves, self._kv_cache, state, self._history.array, rows, updates, self.chances
        )
        return state, drafts
