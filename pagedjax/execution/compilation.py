"""Ahead-of-time compilation: every executable before the engine is ready, in threads, with a cache on disk.

Also counts compilations, because one after start-up is a bug that a metric shows and a test forbids.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from tqdm import tqdm

from pagedjax.execution.phase_times import PhaseTimes
from pagedjax.execution.sampler import GPU_COMPILER_OPTIONS

DEFAULT_CACHE_DIR = "~/.cache/pagedjax/xla"
_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


@dataclass(frozen=True)
class Task:
    """One executable to build: `function` (already jitted) at the shapes of `arguments`."""

    name: str
    function: Any
    arguments: tuple
    is_full_model: bool = False


def enable_cache(directory: str | None) -> None:
    """Point JAX's persistent cache at `directory` (None: the default, '': off) unless the program set its own."""
    if directory == "" or jax.config.jax_compilation_cache_dir is not None:
        return
    path = Path(directory or DEFAULT_CACHE_DIR).expanduser()
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def compile_all(tasks: list[Task], phases: PhaseTimes, *, show_progress: bool) -> dict[str, jax.stages.Compiled]:
    """Lower each task here and compile in threads; return executables by name.

    The phase "lowering" lasts until every task is lowered, with compilations under way beside it; what is left of them
    then is "compiling".
    """
    options = GPU_COMPILER_OPTIONS if jax.default_backend() == "gpu" else {}
    num_threads = max(1, min(8, os.cpu_count() or 1))
    with (
        ThreadPoolExecutor(num_threads, thread_name_prefix="compile") as pool,
        tqdm(total=len(tasks), desc="Compiling", unit="executable", disable=not show_progress) as progress,
    ):

        def finish(lowered: jax.stages.Lowered) -> jax.stages.Compiled:
            compiled = lowered.compile(options)
            progress.update()
            return compiled

        futures = {task.name: pool.submit(finish, task.function.lower(*task.arguments)) for task in tasks}
        phases.end("lowering")
        executables = {name: future.result() for name, future in futures.items()}
    phases.end("compiling")
    return executables


class CompilationCounter:
    """Counts backend compilations in this process, from construction on."""

    def __init__(self) -> None:
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    def _on_event(self, event: str, duration_secs: float, **kwargs: Any) -> None:
        if event == _COMPILE_EVENT:
            self.count += 1


def shapes_of(tree: Any) -> Any:
    """The same tree with a `jax.ShapeDtypeStruct` in place of each array."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


def jit_with(function: Callable, *, donate: tuple[int, ...] = (), **static: Any) -> Any:
    """`jax.jit` of `function` with keyword arguments bound and positional arguments donated by number."""

    def bound(*args: Any) -> Any:
        return function(*args, **static)

    bound.__name__ = function.__name__
    return jax.jit(bound, donate_argnums=donate)
