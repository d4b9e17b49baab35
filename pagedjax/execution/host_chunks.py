"""Copies of blocks between the pool and pinned host memory: chunks, staging buffers and what is under way.

    out   gather (jitted, pool to a staging buffer on the device), then a transfer to the host: that array is the chunk
    in    a transfer of a chunk to a staging buffer, then, when the scheduler says so, scatter (jitted, into the pool)

Transfers are apart from the jitted halves: within one jit they run at half the speed and hold up what comes behind.
A chunk is an array of its own that is never written again, so a copy in reads what was there when it was started,
whatever became of the chunk's number. Nothing here waits for the device except `wait` and `measure`.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding
from jaxtyping import Array, Float, Int

from pagedjax.config import EngineConfig
from pagedjax.device import HOST_LIMIT_VARIABLE, host_memory_bytes
from pagedjax.errors import ConfigError
from pagedjax.execution.tasks import Task, jit_with
from pagedjax.models.batch import KVCache
from pagedjax.scheduling.preemption import CopySpeed
from pagedjax.scheduling.swapping import BlockCopies, CopyIn, CopyOut, CopyProgress

logger = logging.getLogger(__name__)

GIB = 1 << 30
# Bytes of a copy, of which all are gathered however few blocks there are. On a GPU to dispatch that takes a third of a
# millisecond, whatever the size.
CHUNK_BYTES = {"cpu": 4 << 20, "gpu": 64 << 20}
MAX_CHUNK_BLOCKS = 64
MIN_CHUNKS = 8  # of the swap space: a request takes whole ones
MAX_COPIES = 2  # under way at once: all of them take less time than a step, whose ids would wait behind more
HOST_SHARE = 0.7  # of the host's memory, that may be pinned
MEASURED_COPIES = 4


@dataclass(frozen=True)
class HostPlan:
    """How many chunks of how many blocks; none without swap space."""

    num_chunks: int
    chunk_size: int
    block_bytes: int

    @classmethod
    def build(cls, config: EngineConfig, block_bytes: int) -> "HostPlan":
        """Divide the swap space into chunks.

        Raises:
          ConfigError: the host has less memory, or a chunk does not fit.
        """
        chunk_size, chunk_bytes = 1, min(CHUNK_BYTES[jax.default_backend()], config.swap_space * GIB / MIN_CHUNKS)
        while chunk_size < MAX_CHUNK_BLOCKS and 2 * chunk_size * block_bytes <= chunk_bytes:
            chunk_size *= 2
        limit = int(HOST_SHARE * host_memory_bytes())
        if config.swap_space * GIB > limit:
            raise ConfigError(
                f"swap_space is {config.swap_space:g} GiB, this host has {host_memory_bytes() / GIB:.1f} GiB and "
                f"{HOST_SHARE:.0%} of it may be pinned; set --swap-space to {limit / GIB:.1f} or less"
            )
        num_bytes = int(config.swap_space * GIB)
        if config.swap_space and num_bytes < chunk_size * block_bytes:
            raise ConfigError(
                f"swap_space is {config.swap_space:g} GiB, one copy takes {chunk_size * block_bytes / GIB:g} GiB "
                f"({chunk_size} blocks of {block_bytes} bytes); raise --swap-space, or set it to 0"
            )
        return cls(num_bytes // (chunk_size * block_bytes), chunk_size, block_bytes)

    @property
    def staging_bytes(self) -> int:
        """Device memory of the staging buffers: of copies under way, and of as many that have landed just now."""
        return 2 * MAX_COPIES * self.chunk_size * self.block_bytes if self.num_chunks else 0

    def lines(self, speed: CopySpeed, block_size: int) -> list[str]:
        """What is printed at start."""
        if not self.num_chunks:
            return []
        num_blocks, chunk_bytes = self.num_chunks * self.chunk_size, self.chunk_size * self.block_bytes
        return [
            f"Swap space: {num_blocks * block_size:,} tokens, {num_blocks} blocks in chunks of {self.chunk_size}; "
            f"{chunk_bytes / speed.seconds_out / 1e9:.1f} GB/s out, {chunk_bytes / speed.seconds_in / 1e9:.1f} GB/s in"
        ]


def gather_blocks(kv_cache: KVCache, block_ids: Int[Array, " n"]) -> Float[Array, "L2 n K S H"]:
    """Return the content of blocks: K and V of the first layer, then of the second, and so on."""
    with jax.named_scope("gather_blocks"):
        return jnp.stack([pool[block_ids] for layer in kv_cache for pool in layer])


def scatter_blocks(kv_cache: KVCache, staging: Float[Array, "L2 n K S H"], block_ids: Int[Array, " n"]) -> KVCache:
    """Write what `gather_blocks` returned to blocks. No id comes twice; those past the end of the pool are dropped."""
    with jax.named_scope("scatter_blocks"):
        content = iter(staging)

        def write(pool: Float[Array, "P K S H"]) -> Float[Array, "P K S H"]:
            # XLA writes a third as fast where ids may come twice
            return pool.at[block_ids].set(next(content), mode="drop", unique_indices=True)

        return [(write(k), write(v)) for k, v in kv_cache]


def copy_tasks(plan: HostPlan, cache: list[tuple[Any, Any]]) -> list[Task]:
    """List the executables; `cache` are the pool's shapes."""
    if not plan.num_chunks:
        return []
    block_ids = jax.ShapeDtypeStruct((plan.chunk_size,), jnp.int32)
    k, _ = cache[0]
    staging = jax.ShapeDtypeStruct((2 * len(cache), plan.chunk_size, *k.shape[1:]), k.dtype)
    return [
        Task("gather blocks", jit_with(gather_blocks), (cache, block_ids)),
        Task("scatter blocks", jit_with(scatter_blocks, donate=(0,)), (cache, staging, block_ids)),
    ]


def transfer(array: jax.Array, sharding: SingleDeviceSharding) -> jax.Array:
    """Start to copy an array to another memory of its device."""
    return jax.device_put(array, sharding)


class HostChunks:
    """The host side of one pool. `executables` are those of `copy_tasks`, by name."""

    def __init__(self, plan: HostPlan, executables: dict[str, jax.stages.Compiled], *, num_pool_blocks: int):
        self.plan = plan
        self.speed = CopySpeed()
        self._executables = executables
        self._num_pool_blocks = num_pool_blocks
        device = jax.local_devices()[0]
        self._host = SingleDeviceSharding(device, memory_kind="pinned_host")
        self._device = SingleDeviceSharding(device, memory_kind="device")
        self._num_bytes_out = self._num_bytes_in = 0
        self._chunks: dict[int, jax.Array] = {}
        self._under_way: deque[tuple[CopyIn | CopyOut, jax.Array | None]] = deque()  # None: it failed at once
        self._landed: dict[CopyIn, jax.Array] = {}  # staging buffers of copies that the scheduler has not answered yet

    @property
    def has_copies(self) -> bool:
        """Whether copies are under way."""
        return bool(self._under_way)

    def stats(self) -> dict[str, float]:
        """Return bytes copied, whole chunks, under their metric names."""
        return {"swap_out_bytes": self._num_bytes_out, "swap_in_bytes": self._num_bytes_in}

    def progress(self) -> CopyProgress:
        """Return what became of copies since the last call, and how many more may be under way."""
        progress = CopyProgress()
        self._landed.clear()  # what the last plan did not take, nobody wants
        if self._under_way:
            waiting = deque()
            for copy, array in self._under_way:
                if array is not None and not array.is_ready():  # pyright: ignore[reportAttributeAccessIssue]  untyped
                    waiting.append((copy, array))
                elif array is None or _has_failed(array):
                    progress.failed.append(copy)
                elif isinstance(copy, CopyIn):
                    progress.landed.append(copy)
                    self._landed[copy] = array
            self._under_way = waiting
        if self.plan.num_chunks:
            progress.num_startable = MAX_COPIES - len(self._under_way)
        return progress

    def carry_out(self, kv_cache: KVCache, copies: BlockCopies) -> KVCache:
        """Dispatch an iteration's copies, before its step; the pool is donated and a new one returned."""
        for copy in copies.landed:
            targets = self._targets(copy.block_ids)
            kv_cache = self._executables["scatter blocks"](kv_cache, self._landed.pop(copy), targets)
        for copy in copies.out:
            self._chunks.pop(copy.chunk, None)  # before its successor needs the room
            array = self._start(copy, lambda copy=copy: self._gather(kv_cache, copy.block_ids), self._host)
            if array is not None:
                self._chunks[copy.chunk] = array
                self._num_bytes_out += array.nbytes
        for copy in copies.started:
            array = self._start(copy, lambda copy=copy: self._chunks.get(copy.chunk), self._device)
            self._num_bytes_in += 0 if array is None else array.nbytes
        return kv_cache

    def wait(self) -> None:
        """Wait until the oldest copy has ended, for when there is nothing else to do."""
        array = self._under_way[0][1] if self._under_way else None
        if array is not None:
            _has_failed(array)

    def prepare(self, kv_cache: KVCache) -> KVCache:
        """Pin the host memory and measure the speed of copies; to be called once, before any request.

        Raises:
          ConfigError: the host does not give as much.
        """
        staging = self._gather(kv_cache, [])
        try:
            if jax.default_backend() == "gpu":  # its allocator keeps what it has pinned once, which takes a while
                jax.block_until_ready([transfer(staging, self._host) for _ in range(self.plan.num_chunks)])
            chunk = jax.block_until_ready(transfer(staging, self._host))
        except jax.errors.JaxRuntimeError as error:
            raise ConfigError(
                f"swap_space is {self.plan.num_chunks * staging.nbytes / GIB:.2f} GiB, the host does not give that "
                f"much pinned memory: {str(error).splitlines()[0]}; lower --swap-space, or raise {HOST_LIMIT_VARIABLE}"
            ) from error
        kv_cache = self._measure_in(kv_cache, chunk)[0]  # the first run of an executable on a GPU takes longer
        seconds_out = self._measure_out(kv_cache)
        kv_cache, seconds_in = self._measure_in(kv_cache, chunk)
        self.speed = CopySpeed(seconds_out, seconds_in)
        return kv_cache

    def _measure_out(self, kv_cache: KVCache) -> float:
        began = time.perf_counter()
        staging = [self._gather(kv_cache, []) for _ in range(MEASURED_COPIES)]
        jax.block_until_ready([transfer(array, self._host) for array in staging])
        return (time.perf_counter() - began) / MEASURED_COPIES

    def _measure_in(self, kv_cache: KVCache, chunk: jax.Array) -> tuple[KVCache, float]:
        began = time.perf_counter()
        nowhere = self._targets([])
        for array in [transfer(chunk, self._device) for _ in range(MEASURED_COPIES)]:
            kv_cache = self._executables["scatter blocks"](kv_cache, array, nowhere)
        jax.block_until_ready(kv_cache)
        return kv_cache, (time.perf_counter() - began) / MEASURED_COPIES

    def close(self) -> None:
        """Free the host memory."""
        for array in [*self._chunks.values(), *self._landed.values(), *(array for _, array in self._under_way)]:
            if array is not None and not array.is_deleted():
                array.delete()
        self._chunks.clear()
        self._landed.clear()
        self._under_way.clear()

    def _gather(self, kv_cache: KVCache, block_ids: Sequence[int]) -> jax.Array:
        return self._executables["gather blocks"](kv_cache, self._padded(block_ids))

    def _start(
        self, copy: CopyIn | CopyOut, source: Callable[[], jax.Array | None], sharding: SingleDeviceSharding
    ) -> jax.Array | None:
        """Start a transfer of what `source` makes; one that cannot start is reported with the next progress."""
        moved = None
        try:
            array = source()
            moved = None if array is None else transfer(array, sharding)
        except jax.errors.JaxRuntimeError:
            logger.warning("a copy of %d blocks cannot start", self.plan.chunk_size, exc_info=True)
        self._under_way.append((copy, moved))
        return moved

    def _targets(self, block_ids: Sequence[int | None]) -> np.ndarray:
        """Where a chunk's blocks go; what goes nowhere has an id of its own past the end of the pool."""
        targets = self._num_pool_blocks + np.arange(self.plan.chunk_size, dtype=np.int32)
        for i, block_id in enumerate(block_ids):
            if block_id is not None:
                targets[i] = block_id
        return targets

    def _padded(self, block_ids: Sequence[int]) -> np.ndarray:
        padded = np.zeros(self.plan.chunk_size, np.int32)  # block 0, the null block, may be read
        padded[: len(block_ids)] = block_ids
        return padded


def _has_failed(array: jax.Array) -> bool:
    try:
        array.block_until_ready()
    except jax.errors.JaxRuntimeError:
        logger.warning("a copy between device and host failed", exc_info=True)
        return True
    return False
