"""What a bug report needs to say about a machine: versions, devices and the variables that steer JAX. No secrets."""

import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Iterator, Mapping

import jax

import pagedjax

PACKAGES = (
    "pagedjax", "jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "flax", "numpy", "transformers",
    "tokenizers", "safetensors", "orbax-checkpoint", "aiohttp", "prometheus-client", "gguf", "llguidance",
)  # fmt: skip
PREFIXES = ("JAX_", "XLA_", "CUDA_", "NVIDIA_", "LD_LIBRARY_PATH", "OMP_", "HF_HUB_OFFLINE")
SECRET_WORDS = ("KEY", "TOKEN", "SECRET", "PASSWORD")


def environment_lines(environ: Mapping[str, str] = os.environ) -> Iterator[str]:
    """Yield the report line by line; starts JAX's backend."""
    yield f"pagedjax {pagedjax.__version__}"
    yield f"Python {platform.python_version()} on {platform.platform()}"
    yield f"CPU: {os.cpu_count()} cores, {platform.machine()}"
    for name in PACKAGES:
        version = _version(name)
        if version is not None:
            yield f"{name}=={version}"
    yield from _devices()
    yield from _driver()
    for name in sorted(environ):
        if name.startswith(PREFIXES) and not any(word in name for word in SECRET_WORDS):
            yield f"{name}={environ[name]}"


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _devices() -> Iterator[str]:
    try:
        devices = jax.devices()
    except RuntimeError as error:
        yield f"JAX does not start: {error}"
        return
    for device in devices:
        limit = (device.memory_stats() or {}).get("bytes_limit") if device.platform != "cpu" else None
        memory = "" if limit is None else f", {limit / 2**30:.1f} GiB for JAX"
        yield f"device {device.id}: {device.platform}, {device.device_kind}{memory}"


def _driver() -> Iterator[str]:
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        ran = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        yield "nvidia-smi: not available"
        return
    yield from (f"nvidia-smi: {line}" for line in ran.stdout.splitlines())
