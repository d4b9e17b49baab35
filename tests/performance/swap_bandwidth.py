"""How fast blocks of an 8B model go to the host and back, whether bit for bit, and what that costs a running step.

    PYTHONPATH=. python -m tests.performance.swap_bandwidth [--gib 4] [--small]

Scattered blocks of 32 layers, 8 KV heads, 16 tokens and head_dim 128 in bf16 go through the engine's own copies, with
nothing else on the device and beside a step that reads 13 GB of weights, writes the pool and whose result is read one
step later. One JSON line a figure; --small is for a machine without a GPU. Targets on an H200: 45 GB/s each way alone,
the step at most a tenth slower with as many copies under way as the engine has.
"""

import argparse
import functools
import json
import time
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pagedjax.config import EngineConfig
from pagedjax.execution import host_chunks
from pagedjax.execution.compilation import compile_all
from pagedjax.execution.host_chunks import HostChunks, HostPlan, copy_tasks, gather_blocks
from pagedjax.execution.phase_times import PhaseTimes
from pagedjax.models.batch import KVCache
from pagedjax.scheduling import swapping
from pagedjax.scheduling.swapping import BlockCopies, CopyIn, CopyOut
from tests.scheduling.fake_device import make_request

PREFILL_TOKENS_PER_SECOND = 41_000  # an 8B model's on an H200
GIB = 1 << 30
NOBODY = make_request("swap", [1])


@dataclass(frozen=True)
class Shape:
    num_layers: int = 32
    num_kv_heads: int = 8
    block_size: int = 16
    head_dim: int = 128
    num_matrices: int = 100
    width: int = 8192

    @property
    def block_bytes(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.block_size * self.head_dim * 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=4.0)
    parser.add_argument("--small", action="store_true")
    arguments = parser.parse_args()
    shape, gib = Shape(), arguments.gib
    if arguments.small:
        shape, gib = Shape(num_layers=3, num_matrices=4, width=256), 0.03
    report(device=jax.devices()[0].device_kind, jax=jax.__version__, gib=gib)
    num_moved = int(gib * GIB) // shape.block_bytes // 64 * 64
    pool = make_pool(shape, 2 * num_moved + 1)
    for chunk_mib, max_copies in ((64, 1), (64, 2), (128, 1), (128, 2)):
        host_chunks.CHUNK_BYTES[jax.default_backend()], host_chunks.MAX_COPIES = chunk_mib << 20, max_copies
        pool = measure(shape, pool, num_moved, gib)


def measure(shape: Shape, pool: KVCache, num_moved: int, gib: float) -> KVCache:
    """One size of chunk and number of copies: alone, then beside a step."""
    plan = HostPlan.build(EngineConfig(swap_space=gib * 1.01), shape.block_bytes)
    began = time.perf_counter()
    executables = compile_all(copy_tasks(plan, pool), PhaseTimes(), cache=None, show_progress=False)
    compiled = time.perf_counter()
    host = HostChunks(plan, executables, num_pool_blocks=pool[0][0].shape[0])
    pool = host.prepare(pool)
    name = f"{plan.chunk_size} blocks a chunk, {host_chunks.MAX_COPIES} copies"
    report(what=name, compile_seconds=compiled - began, pin_seconds=time.perf_counter() - compiled)
    pool = halves(plan, executables, pool, name)

    order = np.random.default_rng(0).permutation(np.arange(1, 2 * num_moved + 1))
    sources, targets = order[:num_moved], order[num_moved:]
    original = [gather_sums(pool, part) for part in np.split(sources, 8)]
    outs = [CopyOut(chunk, ids.tolist()) for chunk, ids in enumerate(np.split(sources, num_moved // plan.chunk_size))]
    ins = [
        CopyIn(NOBODY, chunk, ids.tolist()) for chunk, ids in enumerate(np.split(targets, num_moved // plan.chunk_size))
    ]
    num_bytes = num_moved * shape.block_bytes
    pool, seconds_out = run_alone(host, pool, outs)
    pool = jax.jit(lambda pool, ids: jax.tree.map(lambda a: a.at[ids].set(0), pool), donate_argnums=0)(pool, sources)
    pool, seconds_in = run_alone(host, pool, ins)
    moved = [gather_sums(pool, part) for part in np.split(targets, 8)]
    wrong = sum(int((one != other).sum()) for one, other in zip(original, moved, strict=True))
    report(
        what=name, out_gb_per_second=num_bytes / seconds_out / 1e9, in_gb_per_second=num_bytes / seconds_in / 1e9,
        blocks=num_moved, blocks_that_differ=wrong,
    )  # fmt: skip
    report_break_even(shape, plan, seconds_out / num_moved, seconds_in / num_moved, name)
    outs = [CopyOut(copy.chunk, copy.block_ids) for copy in outs]
    ins = [CopyIn(NOBODY, copy.chunk, copy.block_ids) for copy in ins]
    pool = beside_a_step(shape, host, pool, outs, ins, num_bytes, name)
    host.close()
    return pool


def run_alone(host: HostChunks, pool: KVCache, copies: list[Any]) -> tuple[KVCache, float]:
    """Carry out all copies, as many at once as are allowed; return the seconds until the last has ended."""
    jax.block_until_ready(pool)
    waiting, began = list(reversed(copies)), time.perf_counter()
    while waiting or host.has_copies:
        pool, num_started = advance(host, pool, waiting)
        if not num_started:
            host.wait()
    pool, _ = advance(host, pool, waiting)
    jax.block_until_ready(pool)
    return pool, time.perf_counter() - began


def advance(host: HostChunks, pool: KVCache, waiting: list[Any]) -> tuple[KVCache, int]:
    """What an iteration of the engine does: land, then start."""
    progress = host.progress()
    assert not progress.failed, "a copy failed"
    num_startable = progress.num_startable
    if waiting and isinstance(waiting[-1], CopyIn):
        num_startable = min(num_startable, swapping.MAX_STARTED_IN)
    started = [waiting.pop() for _ in range(min(num_startable, len(waiting)))]
    copies = BlockCopies(
        landed=progress.landed,
        out=[copy for copy in started if isinstance(copy, CopyOut)],
        started=[copy for copy in started if isinstance(copy, CopyIn)],
    )
    return host.carry_out(pool, copies), len(started)


def beside_a_step(
    shape: Shape, host: HostChunks, pool: KVCache, outs: list[Any], ins: list[Any], num_bytes: int, name: str
) -> KVCache:
    """Time steps without copies, with copies out and with copies in."""
    x = jnp.ones((64, shape.width), jnp.bfloat16)
    weights = [jnp.full((shape.width, shape.width), 1e-4, jnp.bfloat16) for _ in range(shape.num_matrices)]

    @functools.partial(jax.jit, donate_argnums=0)
    def step(pool: KVCache, x: jax.Array, weights: list[jax.Array]) -> tuple[KVCache, jax.Array, jax.Array]:
        for matrix in weights:
            x = x @ matrix
        row = x[:1, : shape.head_dim].reshape(1, 1, shape.head_dim)
        pool = [(k.at[0, :1, :1].set(row.astype(k.dtype)), v) for k, v in pool]
        return pool, x, jnp.argmax(x, axis=1).astype(jnp.int32)

    pool, _, ids = step(pool, x, weights)
    jax.block_until_ready(ids)
    quiet = None
    for what, copies in (("no copies", []), ("out", outs), ("in", ins)):
        waiting, seconds, before = list(reversed(copies)), [], None
        began = last = time.perf_counter()
        while len(seconds) < 100 if not copies else (waiting or host.has_copies):
            pool, _ = advance(host, pool, waiting)
            pool, _, ids = step(pool, x, weights)
            ids.copy_to_host_async()
            if before is not None:
                np.asarray(before)
            before, now = ids, time.perf_counter()
            seconds.append(now - last)
            last = now
        pool, _ = advance(host, pool, waiting)
        total = time.perf_counter() - began
        median, slowest = np.median(seconds[2:] or seconds), np.quantile(seconds[2:] or seconds, 0.99)
        quiet = quiet or median
        report(
            what=name, step_beside=what, steps=len(seconds), median_ms=1000 * median, p99_ms=1000 * slowest,
            median_slowdown=median / quiet, mean_slowdown=np.mean(seconds[2:] or seconds) / quiet,
            gb_per_second=num_bytes / total / 1e9 if copies else 0.0,
        )  # fmt: skip
    return pool


def halves(plan: HostPlan, executables: dict[str, Any], pool: KVCache, name: str) -> KVCache:
    """Time the jitted halves of a copy, which share the device with the step."""
    ids = np.arange(1, plan.chunk_size + 1, dtype=np.int32)
    staging = executables["gather blocks"](pool, ids)
    jax.block_until_ready(staging)
    began = time.perf_counter()
    for _ in range(20):
        staging = executables["gather blocks"](pool, ids)
    jax.block_until_ready(staging)
    middle = time.perf_counter()
    for _ in range(20):
        pool = executables["scatter blocks"](pool, staging, ids)
    jax.block_until_ready(pool)
    end = time.perf_counter()
    report(what=name, gather_us=(middle - began) / 20e-6, scatter_us=(end - middle) / 20e-6, chunk_bytes=staging.nbytes)
    return pool


def report_break_even(shape: Shape, plan: HostPlan, out: float, back: float, name: str) -> None:
    """Say from how many tokens on a copy out and in of one chunk takes less time than computing them."""
    chunk_seconds = plan.chunk_size * (out + back)
    report(
        what=name, swap_us_per_token=1e6 * (out + back) / shape.block_size,
        recompute_us_per_token=1e6 / PREFILL_TOKENS_PER_SECOND,
        swap_wins_from_tokens=chunk_seconds * PREFILL_TOKENS_PER_SECOND,
    )  # fmt: skip


def make_pool(shape: Shape, num_blocks: int) -> KVCache:
    """A pool in which every value differs from its neighbours in all bits."""

    def fill(seed: jax.Array) -> jax.Array:
        dims = (num_blocks, shape.num_kv_heads, shape.block_size, shape.head_dim)
        bits = jax.random.bits(jax.random.key(seed), dims, jnp.uint16)
        return jax.lax.bitcast_convert_type(bits & jnp.uint16(0xBFFF), jnp.bfloat16)  # neither inf nor NaN

    fill = jax.jit(fill)
    return [(fill(2 * i), fill(2 * i + 1)) for i in range(shape.num_layers)]


@jax.jit
def gather_sums(pool: KVCache, block_ids: jax.Array) -> jax.Array:
    """A number for each block that depends on every bit of it and on its place."""
    bits = jax.lax.bitcast_convert_type(gather_blocks(pool, block_ids), jnp.uint16).astype(jnp.uint32)
    bits = jnp.moveaxis(bits, 1, 0).reshape(block_ids.shape[0], -1)
    place = jnp.arange(bits.shape[1], dtype=jnp.uint32) * jnp.uint32(2654435761) | jnp.uint32(1)
    return (bits * place).sum(axis=1, dtype=jnp.uint32)


def report(**values: Any) -> None:
    print(json.dumps({k: round(float(v), 3) if isinstance(v, float) else v for k, v in values.items()}), flush=True)


if __name__ == "__main__":
    main()
