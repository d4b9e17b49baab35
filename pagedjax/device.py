"""Which device JAX runs on, what is to be settled about it before JAX starts, and how full its memory is.

Looks at files and environment variables first: a GPU that JAX would silently ignore is an error here.
"""

import math
import os
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any

import jax

from pagedjax.errors import ConfigError

MEMORY_SHARE_VARIABLES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")  # the second is the older name
HOST_LIMIT_VARIABLE = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"  # of pinned memory
CONTAINER_LIMITS = ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory/memory.limit_in_bytes")  # cgroups 2 and 1
HOST_LIMIT_GIB = 14  # what JAX allows at least where nobody says otherwise, with room for its own transfers


def reserve_device_memory(share: float, environ: MutableMapping[str, str] = os.environ) -> None:
    """Have JAX take `share` of each GPU's memory when it starts; a share that the environment names already stays."""
    if not any(name in environ for name in MEMORY_SHARE_VARIABLES):
        environ[MEMORY_SHARE_VARIABLES[0]] = str(share)


def allow_pinned_memory(num_gib: float, environ: MutableMapping[str, str] = os.environ) -> None:
    """Have JAX pin up to `num_gib` of host memory, and a little for its own transfers, unless a limit is set."""
    if num_gib > HOST_LIMIT_GIB and HOST_LIMIT_VARIABLE not in environ:
        environ[HOST_LIMIT_VARIABLE] = str(math.ceil(num_gib) + 2)


def host_memory_bytes(root: Path = Path("/")) -> int:
    """Return the memory of this host, or of the container that this process may not leave."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [path.read_text().strip() for name in CONTAINER_LIMITS if (path := root / name).is_file()]
    return min([total, *(int(text) for text in limits if text.isdigit())])


def check_devices() -> str:
    """Start JAX's backend and return its platform, "cpu" or "gpu".

    Raises:
      ConfigError: a GPU is visible but JAX cannot use it, and the CPU was not asked for; or the platform that was
        asked for does not start.
    """
    try:
        platform = jax.default_backend()
    except RuntimeError as error:
        raise ConfigError(
            f"JAX cannot start on JAX_PLATFORMS={jax.config.jax_platforms or ''}: {error}; "
            "install its plugin (pip install 'pagedjax[cuda13]') or set JAX_PLATFORMS=cpu"
        ) from error
    if platform == "cpu" and not _cpu_asked_for() and has_visible_gpu():
        raise ConfigError(
            "an NVIDIA GPU is visible but JAX runs on the CPU: its CUDA plugin is missing or does not start; "
            "install it (pip install 'pagedjax[cuda13]', or 'pagedjax[cuda12]' for drivers older than 580), "
            "or set JAX_PLATFORMS=cpu to use the CPU"
        )
    if platform not in ("cpu", "gpu"):
        raise ConfigError(f"JAX runs on {platform!r}; pagedjax supports NVIDIA GPUs and CPUs, set JAX_PLATFORMS=cpu")
    return platform


def default_device() -> Any:
    """Return the `jax.Device` that JAX makes arrays on: what `jax.default_device` names, else the first."""
    named = jax.config.jax_default_device
    return jax.local_devices(backend=named)[0] if isinstance(named, str | None) else named


def has_visible_gpu(root: Path = Path("/"), environ: Mapping[str, str] = os.environ) -> bool:
    """Whether this process may use an NVIDIA GPU: the driver shows one and CUDA_VISIBLE_DEVICES does not hide it."""
    if environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1", "NoDevFiles"):
        return False
    return any(root.glob("dev/nvidia[0-9]*"))


def device_memory() -> dict[str, float]:
    """Return bytes in use, their peak and the limit of JAX's share of the device; nothing where JAX does not count."""
    stats = jax.local_devices()[0].memory_stats() or {}
    names = {
        "bytes_in_use": "device_memory_used_bytes",
        "peak_bytes_in_use": "device_memory_peak_bytes",
        "bytes_limit": "device_memory_limit_bytes",
    }
    return {name: float(stats[key]) for key, name in names.items() if key in stats}


def _cpu_asked_for() -> bool:
    return (jax.config.jax_platforms or "").split(",")[0] == "cpu"
