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

from pagedjax.execution.executable_cache import ExecutableCache
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


def enable_cache(directory: str | None) -> Path | None:
    """Point JAX's persistent cache at `directory` (None: the default, '': off) unless the program set its own.

    Returns where executables are kept, beside that cache. None where it is off, and where a program that has its own
    cache named no directory to the engine.
    """
    path, current = Path(directory or DEFAULT_CACHE_DIR).expanduser(), jax.config.jax_compilation_cache_dir
    if directory == "" or (directory is None and current not in (None, str(path))):
        return None
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if current is None:
        jax.config.update("jax_compilation_cache_dir", str(path))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return path / "executables"


def compile_all(
    tasks: list[Task], phases: PhaseTimes, *, cache: ExecutableCache | None, show_progress: bool
) -> dict[str, jax.stages.Compiled]:
    """Load each task from the cache, or lower it here and compile in threads; return executables by name.

    The phase "lowering" lasts until every task that was not cached is lowered, with compilations under way beside it;
    what is left of them then is "compiling".
    """
    options = GPU_COMPILER_OPTIONS if jax.default_backend() == "gpu" else {}
    num_threads = max(1, min(8, os.cpu_count() or 1))
    with (
        ThreadPoolExecutor(num_threads, thread_name_prefix="compile") as pool,
        tqdm(total=len(tasks), desc="Compiling", unit="executable", disable=not show_progress) as progress,
    ):

        def load(task: Task) -> jax.stages.Compiled | None:
            return None if cache is None else cache.load(task.name, task.arguments, options)

        def finish(task: Task, lowered: jax.stages.Lowered) -> jax.stages.Compiled:
            compiled = lowered.compile(options)
            if cache is not None:
                cache.save(task.name, task.arguments, options, compiled)
            progress.update()
            return compiled

        executables = dict(zip([task.name for task in tasks], pool.map(load, tasks), strict=True))
        missing = [task for task in tasks if executables[task.name] is None]
        progress.update(len(tasks) - len(missing))
        if len(missing) < len(tasks):
            phases.end("loading executables")
        futures = {task.name: pool.submit(finish, task, task.function.lower(*task.arguments)) for task in missing}
        phases.end("lowering")
        executables |= {name: future.result() for name, future in futures.items()}
    phases.end("compiling")
    return {name: executable for name, executable in executables.items() if executable is not None}


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
