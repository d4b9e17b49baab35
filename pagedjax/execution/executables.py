"""The list of everything that an engine compiles before it is ready: step functions and row writers in every bucket.

Knows shapes and names; the model runner, which holds the arrays, calls the executables by these names.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pagedjax.execution import kv_cache
from pagedjax.execution.block_copy import COPY_BUCKETS, copy_blocks
from pagedjax.execution.buckets import ROW_WRITER_BUCKETS, SCORE_ROWS, BucketTable, StepShape
from pagedjax.execution.compilation import Task, jit_with, shapes_of
from pagedjax.execution.request_state import NUM_FIXED, write_masks, write_rows, write_sampler_row
from pagedjax.execution.step import RESULT_COLUMNS, StepFunctions
from pagedjax.models.config import ModelConfig

PLAIN_VARIANTS = ("plain",)  # need no wide rows
WIDE_VARIANTS = ("top_k", "full")


def executable_tasks(
    functions: StepFunctions,
    buckets: BucketTable,
    config: ModelConfig,
    *,
    dtype: DTypeLike,
    num_blocks: int,
    max_blocks: int,
    state: tuple[Any, Any, Any],
) -> list[Task]:
    """List every executable: decode and forward hold the whole model, the others the head or less.

    `state` are the shapes of the device rows, of the wide sampler rows, and of one of those.
    """
    rows, wide, neutral = state
    leaves = shapes_of(functions.leaves)
    cache = kv_cache.shapes(config, num_blocks=num_blocks, block_size=buckets.block_size, dtype=dtype)
    tasks = []
    for bucket in buckets.tokens:
        hidden = jax.ShapeDtypeStruct((bucket, config.hidden_size), dtype)
        arguments = (leaves, hidden, ints(SCORE_ROWS), ints(SCORE_ROWS))
        tasks.append(Task(f"score {bucket}", jit_with(functions.score), arguments))
    for shape in buckets.forward_shapes:
        run = jit_with(functions.forward, donate=(1, 2), shape=shape)
        tasks.append(Task(forward_name(shape), run, (leaves, cache, rows, ints(shape.packed_size)), True))
    for shape in buckets.decode_shapes if buckets.is_fused else []:
        for variant in PLAIN_VARIANTS:
            run = jit_with(functions.decode, donate=(1, 2), shape=shape, variant=variant)
            arguments = (leaves, cache, rows, ints(shape.packed_size))
            tasks.append(Task(f"decode {shape.num_rows} {variant}", run, arguments, True))
    last_hidden = jax.ShapeDtypeStruct((buckets.max_num_seqs, config.hidden_size), dtype)
    for bucket in buckets.sample:
        for variant in (*PLAIN_VARIANTS, *WIDE_VARIANTS):
            run = jit_with(functions.sample, donate=(1, 2), variant=variant)
            arguments = (leaves, rows, wide if variant in WIDE_VARIANTS else None, last_hidden, ints(bucket))
            tasks.append(Task(f"sample {bucket} {variant}", run, arguments))
        tasks.append(Task(f"beam {bucket}", jit_with(functions.beam, num_rows=bucket), (leaves, last_hidden)))
        arguments = (leaves, last_hidden, ints(bucket, RESULT_COLUMNS))
        tasks.append(Task(f"logprobs {bucket}", jit_with(functions.logprobs), arguments))
    for bucket in ROW_WRITER_BUCKETS:
        packed = ints(bucket, NUM_FIXED + max_blocks)
        tasks.append(Task(f"write rows {bucket}", jit_with(write_rows, donate=(0,)), (rows, packed)))
        masks = jax.ShapeDtypeStruct((bucket, wide.allowed_mask.shape[1]), jnp.uint32)
        run = jit_with(write_masks, donate=(0,))
        tasks.append(Task(f"write masks {bucket}", run, (wide, ints(bucket), masks)))
    for bucket in COPY_BUCKETS:
        tasks.append(Task(f"copy blocks {bucket}", jit_with(copy_blocks, donate=(0,)), (cache, ints(2, bucket))))
    run = jit_with(write_sampler_row, donate=(0,))
    tasks.append(Task("write sampler row", run, (wide, ints(), neutral)))
    return tasks


def forward_name(shape: StepShape) -> str:
    """Name the forward executable of a shape."""
    if shape.is_verify:
        return f"forward {shape.num_rows} rows of drafts"
    return f"forward {shape.num_rows} rows" if shape.is_decode else f"forward {shape.num_tokens} tokens"


def temporary_bytes(tasks: list[Task], executables: dict[str, jax.stages.Compiled]) -> int:
    """Return the bytes of temporaries that live at once: a forward step's beside the sampling or scoring after it."""
    largest = {True: 0, False: 0}
    for task in tasks:
        largest[task.is_full_model] = max(largest[task.is_full_model], _temp_bytes(executables[task.name]))
    return sum(largest.values())


def ints(*shape: int) -> jax.ShapeDtypeStruct:
    """Return the shape of an int32 array."""
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def _temp_bytes(executable: jax.stages.Compiled) -> int:
    analysis = executable.memory_analysis()
    return 0 if analysis is None else analysis.temp_size_in_bytes
