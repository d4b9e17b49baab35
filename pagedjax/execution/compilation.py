"""Ahead-of-time compilation: every executable before the engine is ready, in threads, with a cache on disk.

Also counts compilations, because one after start-up is a bug that a metric shows and a test forbids.
"""

import logging
import os
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache
from tqdm import tqdm

from pagedjax.errors import ConfigError
from pagedjax.execution.executable_cache import ExecutableCache
from pagedjax.execution.lowering_processes import TaskSpec, lower_all
from pagedjax.execution.phase_times import PhaseTimes
from pagedjax.execution.sampler import GPU_COMPILER_OPTIONS
from pagedjax.execution.tasks import Task

logger = logging.getLogger(__name__)

DEFAULT_CACHE_DIR = "~/.cache/pagedjax/xla"
MAX_TRITON_TOKENS = 128  # for more rows cuBLAS is as fast as what XLA makes with Triton, and takes less time to choose
_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


def cache_directory(directory: str | None) -> Path | None:
    """Return where compiled programs are kept (None: the default, '': nowhere), and make it.

    None where that is off, where a program has a cache of JAX's own and named none to the engine, and, with a warning,
    where the default cannot be written to.

    Raises:
      ConfigError: `directory` cannot be written to.
    """
    if directory == "" or (directory is None and jax.config.jax_compilation_cache_dir is not None):
        return None
    try:
        path = Path(directory or DEFAULT_CACHE_DIR).expanduser()
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not os.access(path, os.W_OK):
            raise PermissionError(f"{path} cannot be written to")
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home directory
        if directory is not None:
            raise ConfigError(
                f"compilation_cache_dir is {directory!r}, which is of no use ({error}); "
                "choose a directory that can be written to, or '' for none"
            ) from error
        logger.warning("nothing that is compiled is kept for the next start: %s; set --compilation-cache-dir", error)
        return None
    return path


@contextmanager
def jax_cache_in(directory: Path | None) -> Iterator[None]:
    """Have JAX's persistent cache in `directory`, of whatever is compiled inside, unless the program has its own."""
    if directory is None or jax.config.jax_compilation_cache_dir is not None:
        yield
        return
    options = {
        "jax_compilation_cache_dir": str(directory),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in options}
    try:
        _update(options)
        yield
    finally:
        _update(before)


def _update(options: dict[str, Any]) -> None:
    for name, value in options.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()  # it goes on with the directory of its first use otherwise


def compile_all(
    tasks: list[Task],
    phases: PhaseTimes,
    *,
    cache: ExecutableCache | None,
    show_progress: bool,
    spec: TaskSpec | None = None,
) -> dict[str, jax.stages.Compiled]:
    """Load each task from the cache, or lower it and compile in threads; return executables by name.

    With `spec`, processes beside this one lower the tasks that follow from it. The phase "lowering" lasts until every
    task that was not cached is lowered, with compilations under way beside it; what is left of them is "compiling".
    """
    with (
        ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="compile") as pool,
        tqdm(total=len(tasks), desc="Compiling", unit="executable", disable=not show_progress) as progress,
    ):

        def load(task: Task) -> jax.stages.Compiled | None:
            return None if cache is None else cache.load(task.name, task.arguments, compiler_options(task))

        def finish(task: Task, lowered: jax.stages.Lowered) -> jax.stages.Compiled:
            options = compiler_options(task)
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
        futures = {task.name: pool.submit(finish, task, lowered) for task, lowered in lower_all(missing, spec)}
        phases.end("lowering")
        executables |= {name: future.result() for name, future in futures.items()}
    phases.end("compiling")
    return {name: executable for name, executable in executables.items() if executable is not None}


def compiler_options(task: Task) -> dict[str, Any]:
    """Return what a task is compiled with on this process's platform."""
    if jax.default_backend() != "gpu":
        return {}
    return GPU_COMPILER_OPTIONS | {"xla_gpu_enable_triton_gemm": task.num_tokens <= MAX_TRITON_TOKENS}


class CompilationCounter:
    """Counts the backend compilations of each thread, from construction on."""

    def __init__(self) -> None:
        self._here = threading.local()
        listener = partial(self._note, self._here)  # without self, which JAX would keep for ever
        jax.monitoring.register_event_duration_secs_listener(listener)
        weakref.finalize(self, jax.monitoring.unregister_event_duration_listener, listener).atexit = False

    @property
    def count(self) -> int:
        """Those of the calling thread."""
        return getattr(self._here, "count", 0)

    @staticmethod
    def _note(here: Any, event: str, duration_secs: float, **kwargs: Any) -> None:
        if event == _COMPILE_EVENT:
            here.count = getattr(here, "count", 0) + 1
