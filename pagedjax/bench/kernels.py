"""`pagedjax bench kernels`: device time of paged attention, and its share of what the GPU can read or multiply.

Both ceilings are measured first, in the same run: reading 4 GiB, and a product of two 8192 x 8192 matrices. All are
normal random numbers: equal ones take less power, so that a GPU multiplies them faster. Decoding counts the bytes of
the keys and values that are read, prefill the multiplications that the causal mask leaves. Times are the profiler's and
hold all kernels of a call, in a program of several calls, as the layers of a model make them.
"""

import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pagedjax.bench.result_file import check_writable, write_json
from pagedjax.bench.trace import kernel_seconds
from pagedjax.config import check_range, option
from pagedjax.errors import ConfigError
from pallas_kernels.paged_attention import paged_attention

LAYERS = 8  # calls in one program
POOL_BYTES = 8 << 30  # of all layers together; large contexts share pools, which the caches do not hold anyway
READ_BYTES = 4 << 30
MATRIX = 8192
DECODE = ("64x2048", "256x512", "8x8192", "1x131072", "1x131072+63x512", "1x640", "8x640", "64x640")
PREFILL = ("4x8192", "8x2048", "2x1024@8192")
_SHAPE = re.compile(r"(\d+)x(\d+)(?:@(\d+))?")


@dataclass(frozen=True, kw_only=True)
class KernelFlags:
    """What to time."""

    decode: tuple[str, ...] = option(
        DECODE, "Requests x context of batches of single tokens; + joins kinds.", several=True
    )
    prefill: tuple[str, ...] = option(
        PREFILL, "Requests x query tokens, @ the context with them where there is more.", several=True
    )
    num_heads: int = option(32, "Query heads.")
    num_kv_heads: int = option(8, "KV heads.")
    head_dim: int = option(128, "Size of a head.")
    block_size: int = option(16, "Token slots of a block.")
    backend: str | None = option(None, "Backend of the op; what the engine would take if unset.")
    num_iters: int = option(3, "Runs of each program that are timed.")
    output_json: str | None = option(None, "File for the figures, as JSON.")

    def __post_init__(self) -> None:
        for name in ("num_heads", "num_kv_heads", "head_dim", "block_size", "num_iters"):
            check_range(self, name, 1)
        for text in (*self.decode, *self.prefill):
            requests(text)


CONFIGS = (KernelFlags,)


def run(flags: KernelFlags) -> int:
    """Print one line a shape.

    Raises:
      ConfigError: there is no GPU; times on a CPU would say nothing of the kernels.
    """
    if jax.default_backend() != "gpu":
        raise ConfigError(f"bench kernels times a GPU's kernels, and JAX runs on a {jax.default_backend()} here")
    check_writable(flags.output_json)
    read, matmul = ceilings(flags.num_iters)
    print(f"{jax.local_devices()[0].device_kind}: reads {read / 1e12:.2f} TB/s, multiplies {matmul / 1e12:.0f} TFLOP/s")
    rows = [measure(flags, text, is_decode=True, ceiling=read) for text in flags.decode]
    rows += [measure(flags, text, is_decode=False, ceiling=matmul) for text in flags.prefill]
    write_json(flags.output_json, {"read_bytes_per_s": read, "matmul_flop_per_s": matmul, "results": rows})
    return 0


def requests(text: str) -> list[tuple[int, int]]:
    """Return (query tokens, context with them) of each request of "4x8192", "2x1024@8192" or "1x9+2x5".

    Raises:
      ConfigError: it is none of these.
    """
    found = [_SHAPE.fullmatch(part) for part in text.split("+")]
    if None in found:
        raise ConfigError(f"shape {text!r} is not like 64x2048, 1x131072+63x512 or 2x1024@8192")
    lens = []
    for count, tokens, context in (match.groups() for match in found if match):
        lens += [(int(tokens), int(context or tokens))] * int(count)
        if int(tokens) < 1 or (lens and lens[-1][1] < lens[-1][0]):
            raise ConfigError(f"shape {text!r} has more query tokens than context, or none")
    return lens


def ceilings(num_iters: int) -> tuple[float, float]:
    """Measured bytes read and operations multiplied in a second."""
    numbers = jax.random.normal(jax.random.key(0), (READ_BYTES // 4,))
    read = READ_BYTES / device_seconds(jax.jit(jnp.sum), (numbers,), num_iters)
    matrices = normal(1, MATRIX, MATRIX), normal(2, MATRIX, MATRIX)
    return read, 2 * MATRIX**3 / device_seconds(jax.jit(jnp.matmul), matrices, num_iters)


def measure(flags: KernelFlags, text: str, *, is_decode: bool, ceiling: float) -> dict[str, Any]:
    """Time one shape and print its line."""
    lens = [(1, context) for _, context in requests(text)] if is_decode else requests(text)
    seconds = device_seconds(*_program(flags, lens), flags.num_iters) / LAYERS
    amount = num_bytes(flags, lens) if is_decode else num_flops(flags, lens)
    unit = "TB/s" if is_decode else "TFLOP/s"
    kind = "decode" if is_decode else "prefill"
    print(
        f"{kind:8}{text:>18}{seconds * 1e6:10.1f} us{amount / seconds / 1e12:9.2f} {unit:8}"
        f"{amount / seconds / ceiling:7.3f} of the ceiling",
        flush=True,
    )
    return {"kind": kind, "shape": text, "seconds": seconds, unit: amount / seconds / 1e12,
            "share": amount / seconds / ceiling}  # fmt: skip


def num_bytes(flags: KernelFlags, lens: list[tuple[int, int]]) -> int:
    """Bytes of keys and values that decoding reads, 16 bits a value."""
    return sum(context for _, context in lens) * flags.num_kv_heads * flags.head_dim * 2 * 2


def num_flops(flags: KernelFlags, lens: list[tuple[int, int]]) -> int:
    """Operations of both products over the keys that each query token sees."""
    seen = sum(query * (context - query) + query * (query + 1) // 2 for query, context in lens)
    return 4 * flags.num_heads * flags.head_dim * seen


def device_seconds(program: Callable, arguments: tuple, num_iters: int) -> float:
    """Device time of one run, all kernels together, by the profiler; compiled and warmed up before."""
    jax.block_until_ready(program(*arguments))
    with tempfile.TemporaryDirectory() as directory:
        with jax.profiler.trace(directory):
            jax.block_until_ready([program(*arguments) for _ in range(num_iters)])
        return sum(kernel_seconds(Path(directory)).values()) / num_iters


def _program(flags: KernelFlags, lens: list[tuple[int, int]]) -> tuple[Callable, tuple]:
    """LAYERS calls, each on the output of the one before, and their arguments: blocks lie scattered."""
    used = [-(-context // flags.block_size) for _, context in lens]
    num_blocks = sum(used) + 1
    tables = np.zeros((len(lens), max(used)), np.int32)
    ids = np.random.default_rng(0).permutation(np.arange(1, num_blocks, dtype=np.int32))
    for row, count, end in zip(tables, used, np.cumsum(used), strict=True):
        row[:count] = ids[end - count : end]
    shape = (num_blocks, flags.num_kv_heads, flags.block_size, flags.head_dim)
    num_pools = int(np.clip(POOL_BYTES // (4 * np.prod(shape)), 1, LAYERS))
    pools = [(normal(2 * i + 1, *shape), normal(2 * i + 2, *shape)) for i in range(num_pools)]
    starts = np.cumsum([0, *(query for query, _ in lens)]).astype(np.int32)
    q = normal(0, int(starts[-1]), flags.num_heads, flags.head_dim)

    def attend(q: jax.Array, pools: Any, *integers: jax.Array) -> jax.Array:
        for layer in range(LAYERS):
            k, v = pools[layer % num_pools]
            q = paged_attention(q, k, v, *integers, scale=flags.head_dim**-0.5, backend=flags.backend)
        return q

    integers = (tables, starts, np.array([context for _, context in lens], np.int32))
    return jax.jit(attend), (q, pools, *map(jnp.asarray, integers))


def normal(seed: int, *shape: int) -> jax.Array:
    """Draw bfloat16 numbers on the device."""
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)
