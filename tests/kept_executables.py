"""Executables that engines of one test process share: tests build many engines of few kinds, and compiling is slow.

Most tests use few of the executables that their engine lists. Each is compiled when it is first called, and kept. What
an engine proves stays: it has no others than those it lists, and calls them at no other shapes.
"""

import threading
from contextlib import contextmanager
from typing import Any, ClassVar

import jax
import pytest
from flax import nnx

from pagedjax.execution import buckets, model_runner
from pagedjax.execution.compilation import CompilationCounter
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


class CompiledWhenCalled(jax.stages.Compiled):
    """An executable in name, until it is called."""

    lock: ClassVar[threading.RLock] = threading.RLock()  # options of compilation are those of the process
    compiling: ClassVar[threading.local] = threading.local()

    def __init__(self, task, cache, *, is_optimised):
        self.task, self.cache, self.is_optimised = task, cache, is_optimised
        self.executable = None

    def __call__(self, *arguments):
        if self.executable is None:
            with self.lock:
                self.executable = self.cache.load(self.task.name, self.task.arguments, {}) or self.compile()
        return self.executable(*arguments)

    def compile(self):
        self.compiling.is_listed = True
        try:
            with optimising(self.is_optimised):
                executable = self.task.lower().compile()
        finally:
            self.compiling.is_listed = False
        self.cache.save(self.task.name, self.task.arguments, {}, executable)
        return executable

    def memory_analysis(self):
        """Nothing is known of an executable that is not compiled, as on some devices."""


class CounterOfOthers(CompilationCounter):
    """Does not count what an engine compiles before it is ready when it is no test's."""

    @staticmethod
    def _note(here, event, duration_secs, **kwargs):
        if not getattr(CompiledWhenCalled.compiling, "is_listed", False):
            CompilationCounter._note(here, event, duration_secs, **kwargs)


@contextmanager
def optimising(is_optimised):
    """Compile with optimisations or, in half the time, without most of them."""
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", not is_optimised)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", before)


@contextmanager
def sharing_executables(*, is_optimised=True, is_ahead=False):
    """Share those of the engines that are built inside, which compile them ahead of time or when they are called."""

    def executable_cache(runner, loaded, functions):
        draft = None if runner._draft is None else nnx.split(runner._draft.model)[0]
        kind = loaded.config, nnx.split(loaded.model)[0], repr(functions), runner._config.speculation
        return KeptExecutables(*kind, draft, is_optimised)

    def compile_none(tasks, phases, *, cache, **options):
        phases.end("lowering")
        phases.end("compiling")
        return {task.name: CompiledWhenCalled(task, cache, is_optimised=is_optimised) for task in tasks}

    with pytest.MonkeyPatch.context() as patch, optimising(is_optimised):
        patch.setattr(ModelRunner, "_executable_cache", executable_cache)
        if not is_ahead:
            patch.setattr(model_runner, "compile_all", compile_none)
            patch.setattr(model_runner, "CompilationCounter", CounterOfOthers)
        yield


@contextmanager
def few_buckets(*, num_rows=(), num_tokens=()):
    """Have only these sizes of batches and steps, and the largest, for engines whose every size is slow to compile."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(buckets.SAMPLE_BUCKETS, "cpu", num_rows)
        for sizes in (buckets.DECODE_SIZES, buckets.VERIFY_SIZES):
            patch.setitem(sizes, "cpu", (*num_rows, LARGEST))
        patch.setitem(buckets.TOKEN_SIZES, "cpu", (*num_tokens, LARGEST))
        yield
