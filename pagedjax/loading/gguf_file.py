"""The GGUF container: header, metadata and the table of tensors, read from a memory map.

Checks every length against the file's size, so that a truncated or damaged file is a CheckpointError naming it. Needs
no `gguf` package, knows no quantisation type and no model: `gguf.py` and `gguf_config.py` give the content meaning.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pagedjax.errors import CheckpointError

Metadata = Mapping[str, Any]
"""Key -> int, float, bool, str, list of str, or a 1-D numpy array."""

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 4

_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: np.dtype("<u1"),
    1: np.dtype("<i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    7: np.dtype("?"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True)
class TensorEntry:
    """One row of the tensor table. `shape` is [out, in], the reverse of the file's order; `offset` is into the file."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int


class GGUFFile:
    """An open GGUF file. `metadata` and `tensors` are read at once, tensor bytes on demand."""

    def __init__(self, path: Path):
        """Raises CheckpointError where `path` is missing, not a GGUF file, truncated or damaged."""
        self.path = path
        self._map = _map(path)
        reader = _Reader(path, self._map)
        try:
            num_tensors, num_keys = reader.header()
            self.metadata: Metadata = dict(reader.key_value() for _ in range(num_keys))
            entries = [reader.tensor_entry() for _ in range(num_tensors)]
        except CheckpointError:
            self._map.close()
            raise
        alignment = self.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            self._map.close()
            raise CheckpointError(f"{path} is damaged: general.alignment is {alignment!r}; download it again")
        start = -(-reader.position // alignment) * alignment  # tensor data begins at the next multiple
        self.tensors = {e.name: TensorEntry(e.name, e.shape, e.type_id, start + e.offset) for e in entries}

    def tensor_bytes(self, entry: TensorEntry, num_bytes: int) -> np.ndarray:
        """Return a read-only uint8 view of a tensor's bytes; it must not outlive `close`."""
        if entry.offset + num_bytes > len(self._map):
            raise CheckpointError(
                f"{self.path} is truncated: tensor {entry.name} ends at byte {entry.offset + num_bytes}, "
                f"the file has {len(self._map)}; download it again"
            )
        return np.frombuffer(self._map, np.uint8, num_bytes, entry.offset)

    def close(self) -> None:
        """Unmap the file."""
        self._map.close()


def _map(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
        raise CheckpointError(
            f"{path} cannot be read as a GGUF file: {error}; check the path or download it again"
        ) from error


class _Reader:
    """A position in the map that moves forward and never past the end."""

    def __init__(self, path: Path, data: mmap.mmap):
        self.path = path
        self.data = data
        self.position = 0

    def header(self) -> tuple[int, int]:
        """Check magic and version; return the number of tensors and of metadata keys."""
        magic = self._bytes(4)
        if magic != MAGIC:
            raise CheckpointError(f"{self.path} is not a GGUF file: it starts with {magic!r}, not {MAGIC!r}")
        version = self._scalar(4)
        if version not in VERSIONS:
            reason = "big-endian" if int(version).to_bytes(4, "little").endswith(b"\x03") else f"version {version}"
            raise CheckpointError(f"{self.path} is {reason} GGUF; supported are little-endian versions 2 and 3")
        return self._scalar(10), self._scalar(10)

    def key_value(self) -> tuple[str, Any]:
        key = self._string()
        return key, self._value(self._scalar(4), key)

    def tensor_entry(self) -> TensorEntry:
        name = self._string()
        num_dimensions = self._scalar(4)
        if num_dimensions > MAX_DIMENSIONS:
            raise self._damaged(f"tensor {name} has {num_dimensions} dimensions")
        shape = tuple(self._scalar(10) for _ in range(num_dimensions))[::-1]
        if math.prod(shape) == 0:
            raise self._damaged(f"tensor {name} has the shape {shape}")
        return TensorEntry(name, shape, type_id=self._scalar(4), offset=self._scalar(10))

    def _value(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array(key)
        if kind not in _SCALARS:
            raise self._damaged(f"metadata key {key} has the unknown type {kind}")
        return self._scalar(kind)

    def _array(self, key: str) -> list[str] | np.ndarray:
        kind, count = self._scalar(4), self._scalar(10)
        if kind == _STRING:
            return self._strings(count)
        if kind not in _SCALARS:
            raise self._damaged(f"metadata key {key} is an array of the type {kind}")
        dtype = _SCALARS[kind]
        return np.frombuffer(self._bytes(count * dtype.itemsize), dtype)

    def _strings(self, count: int) -> list[str]:
        """Read many strings; apart from `_string` because vocabularies hold hundreds of thousands."""
        self._check_room(count * _LENGTH.size)
        data, position, unpack = self.data, self.position, _LENGTH.unpack_from
        strings = []
        try:
            for _ in range(count):
                begin = position + 8
                position = begin + unpack(data, position)[0]
                strings.append(data[begin:position].decode())
        except (struct.error, UnicodeDecodeError, OverflowError) as error:
            raise self._damaged(f"string {len(strings)} of an array cannot be read ({error})") from error
        self._check_room(position - self.position)
        self.position = position
        return strings

    def _string(self) -> str:
        raw = self._bytes(self._scalar(10))
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise self._damaged(f"a string is not UTF-8 ({error})") from error

    def _scalar(self, kind: int) -> Any:
        dtype = _SCALARS[kind]
        return np.frombuffer(self._bytes(dtype.itemsize), dtype)[0].item()

    def _bytes(self, count: int) -> bytes:
        self._check_room(count)
        begin = self.position
        self.position += count
        return self.data[begin : self.position]

    def _check_room(self, count: int) -> None:
        if self.position + count > len(self.data):
            raise CheckpointError(
                f"{self.path} is truncated or damaged: its header needs byte {self.position + count}, "
                f"the file has {len(self.data)}; download it again"
            )

    def _damaged(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path} is damaged before byte {self.position}: {what}; download it again")
