"""The border between host and device: packs what changed since the last step into one int32 array.

Numpy in, numpy out. Layout of an array for B rows, U block table updates and T tokens:

    [0, B)            row of each scheduled request, pad R (one past the last row)
    [B, 2B)           its query length, pad 0
    [2B, 2B+3U)       updates: all rows, then all table indices, then all block ids; pad row R
    [2B+3U, ..+T)     token ids of the queries back to back, absent in a decode step;
                      FROM_ROW stands for the row's own last token, which the host may not have read yet,
                  FROM_ROW - 1 - i for its draft i
"""

from collections.abc import Sequence

import numpy as np

from pagedjax.execution.buckets import StepShape
from pagedjax.scheduling.step_plan import ScheduledRequest

FROM_ROW = -1


def pack_changes(scheduled: Sequence[ScheduledRequest], shape: StepShape, *, max_num_seqs: int) -> np.ndarray:
    """Pack one step, [shape.packed_size] int32. `scheduled` is in the order of the batch, sampling requests first.

    The array is fresh each time: a buffer that a dispatched step may still read is never written again.
    """
    packed = np.zeros(shape.packed_size, np.int32)
    num_rows, count = shape.num_rows, len(scheduled)
    updates_end = 2 * num_rows + 3 * shape.num_updates
    packed[:num_rows] = max_num_seqs
    packed[:count] = [item.row for item in scheduled]
    packed[num_rows : num_rows + count] = 1 if shape.is_decode else [item.num_scheduled_tokens for item in scheduled]
    _pack_updates(scheduled, packed[2 * num_rows : updates_end].reshape(3, -1), max_num_seqs)
    if not shape.is_decode:
        _pack_tokens(scheduled, packed[updates_end:])
    return packed


def padded_rows(items: Sequence[ScheduledRequest], bucket: int, *, no_row: int) -> np.ndarray:
    """Return the rows of the items, [bucket] int32, pad `no_row`."""
    rows = np.full(bucket, no_row, np.int32)
    rows[: len(items)] = [item.row for item in items]
    return rows


def _pack_updates(scheduled: Sequence[ScheduledRequest], updates: np.ndarray, max_num_seqs: int) -> None:
    """Fill [3, U] with (row, table index, block id). A new row carries its whole table through the row writer."""
    updates[0] = max_num_seqs
    entries = [
        (item.row, item.first_new_block_index + i, block_id)
        for item in scheduled
        if item.new_block_ids and not item.is_new_row
        for i, block_id in enumerate(item.new_block_ids)
    ]
    if entries:
        updates[:, : len(entries)] = np.array(entries, np.int32).T


def _pack_tokens(scheduled: Sequence[ScheduledRequest], tokens: np.ndarray) -> None:
    start = 0
    for item in scheduled:
        end = start + item.num_scheduled_tokens
        known_end = end - 1 - item.num_draft_tokens if item.samples else end
        known = item.request.all_token_ids[item.context_len : item.context_len + known_end - start]
        tokens[start:known_end] = known
        tokens[known_end:end] = FROM_ROW - np.arange(end - known_end)
        start = end
