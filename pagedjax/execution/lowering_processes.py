"""Lowering in processes of their own: a step is seconds of Python, of which a process runs one thread at a time.

    here     LoweringProcesses(spec)    --name of a task-->    lowers it from shapes alone     another process
             Lowered, as if made here   <--exported program--

The other processes have no GPU: they run JAX on the CPU and lower for a Hopper GPU, whose kernels were tried here. They
are told what the tasks follow from, never an array. What goes wrong there is lowered here.
"""

import logging
import os
import pickle
import queue
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import fields
from typing import Any

import jax
from flax import nnx
from jax import export

from pagedjax.execution.executables import TaskSpec
from pagedjax.execution.tasks import Task
from pagedjax.models import model_class
from pallas_kernels import hopper

logger = logging.getLogger(__name__)

LEAST_TASKS = 8  # fewer are lowered here before the processes have started
MAX_PROCESSES = 8  # of 0.5 GB each
CUSTOM_CALLS = ("mosaic_gpu_v2",)  # that both sides know, since both are of one installation


def lower_all(tasks: Sequence[Task], spec: TaskSpec | None) -> Iterator[tuple[Task, jax.stages.Lowered]]:
    """Lower each task, those of `spec` in processes beside this one where they are many; yield them as they come."""
    apart = [task for task in tasks if task.is_portable]
    processes = None if spec is None else _start(spec, num_tasks=len(apart))
    if processes is None:
        yield from ((task, task.lower()) for task in tasks)
        return
    pool = ThreadPoolExecutor(processes.count, thread_name_prefix="lower")
    try:
        futures = {pool.submit(processes.lower, task): task for task in apart}
        yield from ((task, task.lower()) for task in tasks if not task.is_portable)
        for future in as_completed(futures):
            task, error = futures[future], future.exception()
            if error is not None:
                logger.warning("%s; it is lowered here", error)
            yield task, future.result() if error is None else task.lower()
    finally:
        processes.close()  # first: a thread may wait for one
        pool.shutdown(cancel_futures=True)


def _start(spec: TaskSpec, *, num_tasks: int) -> "LoweringProcesses | None":
    """Start processes where it pays and the system allows it."""
    num_processes = min(MAX_PROCESSES, (os.cpu_count() or 1) // 2)
    if num_tasks < LEAST_TASKS or num_processes < 2:
        return None
    try:
        return LoweringProcesses(spec, num_processes, is_hopper=hopper.platform() == "gpu")
    except OSError as error:
        logger.warning("no processes that lower can be started, so the start takes longer: %s", error)
        return None


class LoweringProcesses:
    """Some processes that lower tasks of one model; `lower` may be called from many threads."""

    def __init__(self, spec: TaskSpec, num_processes: int, *, is_hopper: bool):
        self._processes = [_Process((_plain_options(), spec, is_hopper)) for _ in range(num_processes)]
        self._idle: queue.SimpleQueue[_Process] = queue.SimpleQueue()
        for process in self._processes:
            self._idle.put(process)

    @property
    def count(self) -> int:
        return len(self._processes)

    def lower(self, task: Task) -> jax.stages.Lowered:
        """Lower a task in the next process that is idle.

        Raises:
          RuntimeError: the process could not do it, or has ended.
        """
        process = self._idle.get()
        try:
            answer = process.ask(task.name)
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            raise RuntimeError(f"a process that lowers has ended: {error!r}") from error
        finally:
            self._idle.put(process)  # one that has ended says so at once
        if isinstance(answer, str):
            raise RuntimeError(answer)
        return _import(task, *answer)

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()


class _Process:
    """One of them, and the two pipes between it and this process."""

    def __init__(self, first_message: Any):
        self._popen = subprocess.Popen(
            [sys.executable, "-m", "pagedjax.execution.lowering_processes"],
            env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        self._to: Any = self._popen.stdin
        self._from: Any = self._popen.stdout
        _send(self._to, first_message)

    def ask(self, name: str) -> Any:
        _send(self._to, name)
        return pickle.load(self._from)

    def kill(self) -> None:
        self._popen.kill()
        self._popen.wait()
        self._from.close()
        with suppress(OSError):  # what it has not read
            self._to.close()


def _export(task: Task, platform: str) -> tuple[dict[str, Any], Any]:
    """Lower a task; return the fields of its `Exported` and a value of the structure of its results."""
    leaves, structure = jax.tree.flatten(task.arguments)

    def flat(*leaves: Any) -> list[Any]:
        return jax.tree.leaves(task.function(*structure.unflatten(leaves)))

    checks = [export.DisabledSafetyCheck.custom_call(name) for name in CUSTOM_CALLS]
    exported = export.export(jax.jit(flat, keep_unused=True), platforms=[platform], disabled_checks=checks)(*leaves)
    parts = {field.name: getattr(exported, field.name) for field in fields(exported)}
    # of what cannot be pickled, the trees are known to the receiver, and there is no gradient
    parts |= {"in_tree": None, "out_tree": None, "_get_vjp": None}
    return parts, jax.tree.map(lambda _: 0, jax.eval_shape(task.function, *task.arguments))


def _import(task: Task, parts: dict[str, Any], results: Any) -> jax.stages.Lowered:
    leaves, outputs = jax.tree.leaves(task.arguments), jax.tree.structure(results)
    trees = {
        "in_tree": jax.tree.structure((tuple(leaves), {})),
        "out_tree": jax.tree.structure([0] * outputs.num_leaves),
    }
    exported = export.Exported(**(parts | trees))

    def run(*arguments: Any) -> Any:
        return outputs.unflatten(exported.call(*jax.tree.leaves(arguments)))

    run.__name__ = task.function.__name__
    return jax.jit(run, donate_argnums=task.donated).lower(*task.arguments)


def _plain_options() -> dict[str, Any]:
    """Return the options of JAX that a program may depend on."""
    plain = (bool, int, float, str, type(None))
    unrelated = ("platform", "device", "cache", "dir", "log", "traceback", "distributed")
    return {
        name: value
        for name, value in jax.config.values.items()
        if isinstance(value, plain) and not any(part in name for part in unrelated)
    }


def _send(stream: Any, value: Any) -> None:
    pickle.dump(value, stream)
    stream.flush()


def main() -> None:
    """Answer names with programs until the other side closes the pipe."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what anything else prints must not come between
    options, spec, is_hopper = pickle.load(sys.stdin.buffer)
    for name, value in options.items():
        if jax.config.values.get(name) != value:
            jax.config.update(name, value)
    if is_hopper:
        hopper.assume_hopper()

    def build() -> nnx.Module:
        return model_class(spec.config.architecture)(spec.config, dtype=spec.dtype, rngs=nnx.Rngs(0))

    tasks = {task.name: task for task in spec.tasks(spec.functions(nnx.eval_shape(build)))}
    while True:
        try:
            name = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            _send(answers, _export(tasks[name], "cuda" if is_hopper else "cpu"))
        except Exception as error:  # the other side lowers it then
            _send(answers, f"{name} cannot be lowered apart: {error!r}")


if __name__ == "__main__":
    main()
