"""What fills the drafts of rows: the protocol, the n-gram look-up behind it, and drafts that the host has made."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Protocol, runtime_checkable

import jax
import numpy as np
from jaxtyping import Array, Int

from pagedjax.execution.buckets import BucketTable, bucket_for
from pagedjax.execution.executables import ints
from pagedjax.execution.model_input import padded_rows
from pagedjax.execution.request_state import RowState
from pagedjax.execution.tasks import Task, jit_with, shapes_of
from pagedjax.scheduling.request import Request
from pagedjax.scheduling.step_plan import ScheduledRequest
from pagedjax.speculation.history import Executables, TokenHistory
from pagedjax.speculation.ngram import propose_ngram


@runtime_checkable
class Proposer(Protocol):
    """Fills the drafts of rows just before a step verifies them."""

    uses_history: bool
    chances: jax.Array | None  # [R, K, V], the distributions that drafts were drawn from, where they are kept

    @property
    def arrays(self) -> list[jax.Array]:
        """Device arrays that it owns."""
        ...

    def tasks(self, state: RowState, *, num_blocks: int) -> list[Task]:
        """What is compiled for it; `state` holds shapes, `num_blocks` is the size of the target's pool."""
        ...

    def allocate(self, num_blocks: int) -> None:
        """Make what is as large as the target's pool."""
        ...

    def note_plan(self, scheduled: Sequence[ScheduledRequest]) -> None:
        """Take note of the blocks that change hands in the step that is about to start."""
        ...

    def forget_blocks(self, block_ids: Iterable[int]) -> None:
        """Take note that what a draft model has in these blocks is not what the target has."""
        ...

    def num_missing(self, request: Request) -> int:
        """Tokens that a model has to compute before it can draft for a request."""
        ...

    def catch_up(self, state: RowState, ends: Sequence[tuple[ScheduledRequest, int]], executables: Executables) -> None:
        """Compute what is missing of rows, each up to the number of tokens beside it; the history has these."""
        ...

    def propose(
        self, state: RowState, drafting: Sequence[ScheduledRequest], executables: Executables
    ) -> tuple[RowState, jax.Array]:
        """Dispatch the proposal for these rows; return the state, and their drafts [B, K] to read."""
        ...

    def warm_up(self, state: RowState, executables: Executables) -> RowState:
        """Run each executable once, on padding."""
        ...


class _WithoutModel:
    """What a proposer that runs no model does not need: it holds no arrays, and has nothing to keep up with."""

    chances: jax.Array | None = None  # nothing is drawn

    @property
    def arrays(self) -> list[jax.Array]:
        return []

    def allocate(self, num_blocks: int) -> None:
        pass

    def note_plan(self, scheduled: Sequence[ScheduledRequest]) -> None:
        pass

    def forget_blocks(self, block_ids: Iterable[int]) -> None:
        pass

    def num_missing(self, request: Request) -> int:
        return 0

    def catch_up(self, state: RowState, ends: Sequence[tuple[ScheduledRequest, int]], executables: Executables) -> None:
        pass


class NgramProposer(_WithoutModel):
    """Looks the newest tokens up in the history."""

    uses_history = True

    def __init__(self, history: TokenHistory, buckets: BucketTable, *, min_tokens: int, max_tokens: int):
        self._history = history
        self._buckets = buckets
        self._lengths = {"min_tokens": min_tokens, "max_tokens": max_tokens}

    def tasks(self, state: RowState, *, num_blocks: int) -> list[Task]:
        run = jit_with(propose_ngram, donate=(0, 1), **self._lengths)
        history = shapes_of(self._history.array)
        return [Task(f"propose {n}", run, (state, history, ints(n))) for n in self._buckets.sample]

    def propose(
        self, state: RowState, drafting: Sequence[ScheduledRequest], executables: Executables
    ) -> tuple[RowState, jax.Array]:
        bucket = bucket_for(len(drafting), self._buckets.sample)
        rows = padded_rows(drafting, bucket, no_row=self._buckets.max_num_seqs)
        return self._run(state, rows, executables)

    def warm_up(self, state: RowState, executables: Executables) -> RowState:
        for bucket in self._buckets.sample:
            state, _ = self._run(state, np.full(bucket, self._buckets.max_num_seqs, np.int32), executables)
        return state

    def _run(self, state: RowState, rows: np.ndarray, executables: Executables) -> tuple[RowState, jax.Array]:
        run = executables[f"propose {len(rows)}"]
        state, self._history.array, drafts = run(state, self._history.array, rows)
        return state, drafts


class HostProposer(_WithoutModel):
    """Takes the drafts that the host found and wrote into its requests."""

    uses_history = False

    def __init__(self, buckets: BucketTable, *, max_draft_tokens: int):
        self._buckets = buckets
        self._max_draft_tokens = max_draft_tokens

    def tasks(self, state: RowState, *, num_blocks: int) -> list[Task]:
        run = jit_with(write_drafts, donate=(0,))
        return [
            Task(f"propose {n}", run, (state, ints(n), ints(n, self._max_draft_tokens))) for n in self._buckets.sample
        ]

    def propose(
        self, state: RowState, drafting: Sequence[ScheduledRequest], executables: Executables
    ) -> tuple[RowState, jax.Array]:
        rows, drafts = self._padded(bucket_for(len(drafting), self._buckets.sample))
        for i, item in enumerate(drafting):
            token_ids = item.request.draft_token_ids[: item.num_draft_tokens]
            rows[i], drafts[i, : len(token_ids)] = item.row, token_ids
        return executables[f"propose {len(rows)}"](state, rows, drafts)

    def warm_up(self, state: RowState, executables: Executables) -> RowState:
        for bucket in self._buckets.sample:
            state, _ = executables[f"propose {bucket}"](state, *self._padded(bucket))
        return state

    def _padded(self, bucket: int) -> tuple[np.ndarray, np.ndarray]:
        rows = np.full(bucket, self._buckets.max_num_seqs, np.int32)
        return rows, np.full((bucket, self._max_draft_tokens), -1, np.int32)


def write_drafts(
    state: RowState, rows: Int[Array, " B"], drafts: Int[Array, "B K"]
) -> tuple[RowState, Int[Array, "B K"]]:
    """Overwrite the drafts of rows (a row of R is a pad); return them too, as proposers do."""
    assert state.drafts is not None, "an engine with speculation has rows with drafts"
    return replace(state, drafts=state.drafts.at[rows].set(drafts, mode="drop")), drafts
