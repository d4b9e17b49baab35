"""The tokens of every row on the device, for proposers that look back.

Verification writes what it samples; plain steps do not, so that they cost what they always cost. A row that plain
steps have carried on is caught up by the host, which knows all its tokens save the newest: that one is in the row.
Owns the array and knows how much of each row is right; knows nothing of how drafts come about.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from pagedjax.execution.buckets import ROW_WRITER_BUCKETS, in_parts
from pagedjax.execution.executables import ints
from pagedjax.execution.tasks import Task, jit_with
from pagedjax.scheduling.request import Request
from pagedjax.scheduling.step_plan import ScheduledRequest

CHUNK = 256  # tokens of one row that are written at once

Executables = dict[str, jax.stages.Compiled]


@dataclass
class RowProgress:
    """What the device knows of one row: its first `num_tokens` tokens, and all of them if every step had drafts.

    A draft model has K and V of as many.
    """

    num_tokens: int = 0
    is_followed: bool = False


class TokenHistory:
    """`array` is [R, L] int32: token ids by position, right up to each row's newest token where they are read."""

    def __init__(self, num_rows: int, max_model_len: int, block_size: int):
        self._block_size = block_size
        self.array = jnp.zeros((num_rows, max_model_len), jnp.int32)
        self._progress = [RowProgress() for _ in range(num_rows)]

    @property
    def tasks(self) -> list[Task]:
        """What is compiled for it."""
        shape = jax.ShapeDtypeStruct(self.array.shape, self.array.dtype)
        write = jit_with(write_history, donate=(0,))
        return [Task(f"write history {n}", write, (shape, ints(n, 2 + CHUNK))) for n in ROW_WRITER_BUCKETS]

    def note_plan(self, scheduled: Sequence[ScheduledRequest]) -> None:
        """Take note of a step that is about to start: who is new in a row, and whom verification does not follow."""
        for item in scheduled:
            is_copied = item.new_block_ids and item.first_new_block_index * self._block_size < item.context_len
            if item.is_new_row or is_copied:  # what draft models hold is not copied with a block that others share
                self._progress[item.row] = RowProgress()
            elif not item.num_draft_tokens:
                self._progress[item.row].is_followed = False

    def first_missing(self, request: Request) -> int:
        """Position of the first token that has to be written before the request's drafts can be proposed."""
        assert request.row is not None, "only a running request is drafted for"
        progress = self._progress[request.row]
        return request.num_tokens if progress.is_followed else progress.num_tokens

    def catch_up(self, ends: Sequence[tuple[ScheduledRequest, int]], executables: Executables) -> None:
        """Write what is missing of rows, each up to the number of tokens beside it."""
        chunks = [chunk for item, end in ends for chunk in self._missing_chunks(item, end)]
        for part, bucket in in_parts(chunks, ROW_WRITER_BUCKETS):
            packed = pack_chunks(part, bucket, num_rows=len(self._progress))
            self.array = executables[f"write history {len(packed)}"](self.array, packed)

    def note_read(self, ends: Sequence[tuple[ScheduledRequest, int]]) -> None:
        """Take note that rows were caught up so far, by a draft model too if there is one.

        Those that have drafts are followed: their contexts may be longer by what is unread.
        """
        for item, end in ends:
            self._progress[item.row] = RowProgress(end, is_followed=item.num_draft_tokens > 0)

    def warm_up(self, executables: Executables) -> None:
        """Run each executable once, on padding."""
        for bucket in ROW_WRITER_BUCKETS:
            packed = pack_chunks([], bucket, num_rows=len(self._progress))
            self.array = executables[f"write history {bucket}"](self.array, packed)

    def _missing_chunks(self, item: ScheduledRequest, end: int) -> Iterator[tuple[int, int, list[int]]]:
        for start in range(self.first_missing(item.request), end, CHUNK):
            yield item.row, start, item.request.all_token_ids[start : min(start + CHUNK, end)]


def pack_chunks(chunks: Sequence[tuple[int, int, list[int]]], bucket: int, *, num_rows: int) -> np.ndarray:
    """[bucket, 2 + CHUNK] int32 for `write_history` from (row, first position, token ids)."""
    packed = np.zeros((bucket, 2 + CHUNK), np.int32)
    packed[:, 0] = num_rows
    for target, (row, start, token_ids) in zip(packed, chunks, strict=False):
        target[0], target[1] = row, start
        target[2 : 2 + len(token_ids)] = token_ids
    return packed


def write_history(history: Int[Array, "R L"], packed: Int[Array, "n C"]) -> Int[Array, "R L"]:
    """Write CHUNK tokens into each named row (R is a pad); those past the tokens given are past the row's newest."""
    rows, starts = packed[:, 0], packed[:, 1]
    positions = starts[:, None] + jnp.arange(CHUNK, dtype=jnp.int32)[None, :]
    return history.at[rows[:, None], positions].set(packed[:, 2:], mode="drop")
