"""The list of everything that an engine compiles before it is ready: step functions and row writers in every bucket.

Knows shapes and names; the model runner, which holds the arrays, calls the executables by these names.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pagedjax.execution import kv_cache
from pagedjax.execution.block_copy import COPY_BUCKETS, copy_blocks
from pagedjax.execution.buckets import ROW_WRITER_BUCKETS, SCORE_ROWS, BucketTable, StepShape
from pagedjax.execution.request_state import NUM_FIXED, write_masks, write_rows, write_sampler_row
from pagedjax.execution.step import RESULT_COLUMNS, StepFunctions
from pagedjax.execution.tasks import Task, shapes_of
from pagedjax.models.config import ModelConfig

PLAIN_VARIANTS = ("plain",)  # need no wide rows
WIDE_VARIANTS = ("top_k", "full")


@dataclass(frozen=True)
class TaskSpec:
    """What the executables of a model follow from, beside its weights. It can be pickled.

    Attributes:
      max_blocks: of one request.
      state: shapes of the device rows, of the wide sampler rows, and of one of those.
    """

    config: ModelConfig
    dtype: np.dtype
    buckets: BucketTable
    num_blocks: int
    max_blocks: int
    max_logprobs: int
    state: tuple[Any, Any, Any]

    def functions(self, model: nnx.Module) -> StepFunctions:
        """Return the step functions of a model, which may be one of shapes alone."""
        return StepFunctions(
            model, block_size=self.buckets.block_size, num_blocks=self.num_blocks,
            max_num_seqs=self.buckets.max_num_seqs, max_logprobs=self.max_logprobs,
        )  # fmt: skip

    def tasks(self, functions: StepFunctions) -> list[Task]:
        """List every executable: decode and forward hold the whole model, the others the head or less."""
        config, dtype = self.config, self.dtype
        rows, wide, neutral = self.state
        leaves = shapes_of(functions.leaves)
        cache = kv_cache.shapes(config, num_blocks=self.num_blocks, block_size=self.buckets.block_size, dtype=dtype)
        tasks = []
        whole: dict[str, Any] = {"donate": (1, 2), "is_full_model": True}
        for shape in self.buckets.forward_shapes:
            arguments = (leaves, cache, rows, ints(shape.packed_size))
            static = {"num_tokens": shape.num_tokens, "shape": shape}
            tasks.append(Task.portable(forward_name(shape), functions.forward, arguments, **whole, **static))
        for shape in self.buckets.decode_shapes if self.buckets.is_fused else []:
            arguments = (leaves, cache, rows, ints(shape.packed_size))
            static = {"num_tokens": shape.num_tokens, "shape": shape}
            for variant in PLAIN_VARIANTS:
                name, static["variant"] = f"decode {shape.num_rows} {variant}", variant
                tasks.append(Task.portable(name, functions.decode, arguments, **whole, **static))
        for bucket in self.buckets.tokens:
            hidden = jax.ShapeDtypeStruct((bucket, config.hidden_size), dtype)
            arguments = (leaves, hidden, ints(SCORE_ROWS), ints(SCORE_ROWS))
            tasks.append(Task.portable(f"score {bucket}", functions.score, arguments))
        last_hidden = jax.ShapeDtypeStruct((self.buckets.max_num_seqs, config.hidden_size), dtype)
        for bucket in self.buckets.sample:
            for variant in (*PLAIN_VARIANTS, *WIDE_VARIANTS):
                arguments = (leaves, rows, wide if variant in WIDE_VARIANTS else None, last_hidden, ints(bucket))
                name = f"sample {bucket} {variant}"
                tasks.append(Task.portable(name, functions.sample, arguments, donate=(1, 2), variant=variant))
            tasks.append(Task.portable(f"beam {bucket}", functions.beam, (leaves, last_hidden), num_rows=bucket))
            arguments = (leaves, last_hidden, ints(bucket, RESULT_COLUMNS))
            tasks.append(Task.portable(f"logprobs {bucket}", functions.logprobs, arguments))
        for bucket in ROW_WRITER_BUCKETS:
            packed = ints(bucket, NUM_FIXED + self.max_blocks)
            tasks.append(Task.portable(f"write rows {bucket}", write_rows, (rows, packed), donate=(0,)))
            masks = jax.ShapeDtypeStruct((bucket, wide.allowed_mask.shape[1]), jnp.uint32)
            tasks.append(Task.portable(f"write masks {bucket}", write_masks, (wide, ints(bucket), masks), donate=(0,)))
        for bucket in COPY_BUCKETS:
            tasks.append(Task.portable(f"copy blocks {bucket}", copy_blocks, (cache, ints(2, bucket)), donate=(0,)))
        tasks.append(Task.portable("write sampler row", write_sampler_row, (wide, ints(), neutral), donate=(0,)))
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
