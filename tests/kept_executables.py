"""Executables that engines of one test process share: tests build many engines of few kinds, and compiling is slow."""

from contextlib import contextmanager
from typing import Any, ClassVar

import jax
import pytest
from flax import nnx

from pagedjax.execution import buckets
from pagedjax.execution.executable_cache import ExecutableCache
from pagedjax.execution.model_runner import ModelRunner

LARGEST = 1 << 20  # above all limits


class KeptExecutables(ExecutableCache):
    """Keeps them in memory; found by all that the programs of this process differ in."""

    kept: ClassVar[dict[tuple, Any]] = {}

    def __init__(self, *parts):
        self.parts = parts  # the rest of a cache on disk is replaced

    def load(self, name, arguments, options):
        return self.kept.get(self._key(name, arguments))

    def save(self, name, arguments, options, executable):
        self.kept[self._key(name, arguments)] = executable

    def _key(self, name, arguments):
        leaves, structure = jax.tree.flatten(arguments)
        return *self.parts, name, structure, tuple(map(str, leaves))


@contextmanager
def sharing_executables(*, is_optimised=True):
    """Share those of the engines that are built inside; without optimisation they compile in half the time."""

    def executable_cache(runner, loaded, functions):
        draft = None if runner._draft is None else nnx.split(runner._draft.model)[0]
        kind = loaded.config, nnx.split(loaded.model)[0], repr(functions), runner._config.speculation
        return KeptExecutables(*kind, draft, is_optimised)

    before = jax.config.values["jax_disable_most_optimizations"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModelRunner, "_executable_cache", executable_cache)
        jax.config.update("jax_disable_most_optimizations", not is_optimised)
        try:
            yield
        finally:
            jax.config.update("jax_disable_most_optimizations", before)


@contextmanager
def few_buckets(*, num_rows=(), num_tokens=()):
    """Have only these sizes of batches and steps, and the largest, for engines whose every size is slow to compile."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(buckets.SAMPLE_BUCKETS, "cpu", num_rows)
        for sizes in (buckets.DECODE_SIZES, buckets.VERIFY_SIZES):
            patch.setitem(sizes, "cpu", (*num_rows, LARGEST))
        patch.setitem(buckets.TOKEN_SIZES, "cpu", (*num_tokens, LARGEST))
        yield
