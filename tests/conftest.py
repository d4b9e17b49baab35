"""What every test runs under: JAX on the CPU, strict dtypes and ranks, fixed seeds, a cache of compiled code.

JAX reads these variables when it is first imported, and processes that a test starts inherit them. Variables
that are set already win, so `JAX_ENABLE_X64=1` or `JAX_PLATFORMS=cuda` on the command line work. This file imports
none of the project's packages: the jaxtyping hook must come first.
"""

import hashlib
import importlib
import os
import platform
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest


def _processor() -> str:
    """Identify this processor: compiled code must not move to one that lacks its instructions."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else [platform.processor()]
    flags = {line for line in lines if line.startswith(("model name", "flags", "Features"))}
    return hashlib.sha256("\n".join(sorted(flags)).encode()).hexdigest()[:12]


CACHE_HOME = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
SHARES_MODEL = ("tests/test_smollm2.py", "tests/servers/test_demo_model.py", "tests/servers/test_structured_demo.py")
THE_MODEL = "the embedded model"
WORKER = os.environ.get("PYTEST_XDIST_WORKER", "")  # each its own: a reader may find another's entry half written
# Tests compile more than they compute: XLA's older emitters of loops take half the time of those through MLIR, and what
# is not split for several threads takes less of them.
COMPILING_QUICKLY = (
    "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters --xla_cpu_parallel_codegen_split_count=1"
)

for name, value in {
    "JAX_PLATFORMS": "cpu",
    "JAX_NUMPY_DTYPE_PROMOTION": "strict",
    "JAX_NUMPY_RANK_PROMOTION": "raise",
    "JAX_COMPILATION_CACHE_DIR": str(CACHE_HOME / "pagedjax-tests" / _processor() / WORKER),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.2",
    "XLA_FLAGS": "" if WORKER in ("", "gw0") else COMPILING_QUICKLY,  # the first compiles as users do
    # The interpreter of kernels runs each warpgroup in a thread, which may hold one of XLA's pool while it waits for
    # another, whose operations need one too. As many as there are cores, two perhaps, are too few: they wait for ever.
    "PJRT_NPROC": "8",
    "HF_HUB_OFFLINE": "1",  # no test reaches a network
    "TOKENIZERS_PARALLELISM": "false",
}.items():
    os.environ.setdefault(name, value)

importlib.import_module("tests.typechecking")  # the jaxtyping hook looks it up by name


@pytest.fixture(autouse=True)
def _fixed_seeds() -> None:
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002  libraries under test may draw from the global generator


@pytest.fixture(scope="module")
def compiled_quickly() -> Iterator[None]:
    """Compile without most optimisations: for tests whose results need not be those of optimised code, bit for bit."""
    import jax

    jax.clear_caches()
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
    jax.clear_caches()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put files with slow tests first, so that no worker begins a long one when the others are at their end."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)  # stable


@pytest.hookimpl(optionalhook=True)  # xdist may be missing
def pytest_xdist_auto_num_workers() -> int:
    """One more than there are cores: the first worker has few files, and ends early."""
    return 1 + (os.cpu_count() or 1)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """Give each file to one worker, and the files with the embedded model to the first, which has no others."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path = super()._split_scope(nodeid)
            return THE_MODEL if path in SHARES_MODEL else path

        def _assign_work_unit(self, node: Any) -> None:
            is_first = node.gateway.id == "gw0"
            suitable = [scope for scope in self.workqueue if (scope == THE_MODEL) == is_first]
            if is_first and not suitable and len(self.nodes) > 1:
                node.shutdown()  # when it has done what it has
                return
            if suitable:
                self.workqueue.move_to_end(suitable[0], last=False)
            super()._assign_work_unit(node)

    return Scheduling(config, log)
