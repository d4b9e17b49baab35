"""Compiled executables on disk, found by what they were made of, so that a second start neither traces nor compiles.

JAX's own cache is looked up by the lowered program, and lowering is most of a start. Here the key is made of what the
program follows from: the sources of this package and of the kernels, the versions and options of JAX, the device, and
the shapes. A key covers too much rather than too little; an entry that cannot be read is made again.
"""

import hashlib
import logging
import os
import pickle
import stat
from collections.abc import Iterable
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable

import pallas_kernels

logger = logging.getLogger(__name__)

ROOTS = (Path(__file__).parents[1], Path(pallas_kernels.__file__).parent)  # of the sources that make programs
UNRELATED_OPTIONS = ("cache", "dir", "log", "traceback", "platforms")  # parts of names of options that change no code
PLATFORMS = ("gpu",)  # an executable that a CPU has loaded from JAX's cache cannot be serialised again


class ExecutableCache:
    """Entries of one kind of engine, in a directory that only its owner can write to: they are pickles.

    Args:
      directory: made if it is missing.
      parts: what the programs follow from besides sources, versions, options and device; of the engine's own.
    """

    def __init__(self, directory: Path, parts: Iterable[object]):
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._directory = directory if _is_private(directory) else None
        self._prefix = "\n".join([_environment(), *map(repr, parts)])
        self.num_hits = 0

    def load(self, name: str, arguments: Any, options: dict[str, Any]) -> jax.stages.Compiled | None:
        """Return the executable of this name for arguments of these shapes, or None."""
        path = self._path(name, arguments, options)
        if path is None or not path.exists():
            return None
        try:
            executable = serialize_executable.deserialize_and_load(*pickle.loads(path.read_bytes()))
        except Exception as error:  # whatever is wrong with it, it can be made again
            logger.warning("the cached executable %s cannot be loaded and is made again: %s", path, error)
            return None
        self.num_hits += 1
        return executable

    def save(self, name: str, arguments: Any, options: dict[str, Any], executable: jax.stages.Compiled) -> None:
        """Keep an executable; a directory that cannot be written to is no reason to fail."""
        path = self._path(name, arguments, options)
        if path is None:
            return
        unfinished = path.with_suffix(f".{os.getpid()}")
        try:
            unfinished.write_bytes(pickle.dumps(serialize_executable.serialize(executable)))
            unfinished.replace(path)
        except (OSError, ValueError, jax.errors.JaxRuntimeError) as error:
            logger.warning("the executable %s is not cached: %s", name, error)
            unfinished.unlink(missing_ok=True)

    def _path(self, name: str, arguments: Any, options: dict[str, Any]) -> Path | None:
        if self._directory is None:
            return None
        leaves, structure = jax.tree.flatten(arguments)
        parts = [self._prefix, name, str(structure), *map(str, leaves), repr(sorted(options.items()))]
        return self._directory / hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _is_private(directory: Path) -> bool:
    found = directory.stat()
    if found.st_uid == os.getuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return True
    logger.warning("%s belongs to or can be written by others; executables are not cached there", directory)
    return False


@cache
def _environment() -> str:
    device = jax.local_devices()[0]
    options = {
        name: value for name, value in jax.config.values.items() if not any(part in name for part in UNRELATED_OPTIONS)
    }
    parts = [
        _sources(), *(version(name) for name in ("jax", "jaxlib")), device.client.platform_version, device.device_kind,
        repr(sorted(options.items(), key=lambda item: item[0])),
        os.environ.get("XLA_FLAGS", ""),
    ]  # fmt: skip
    return "\n".join(parts)


def _sources() -> str:
    digest = hashlib.sha256()
    for root in ROOTS:
        for path in sorted(root.rglob("*.py")):
            digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return digest.hexdigest()
