"""What the kernels written in Mosaic GPU share: where they run, wgmma's shapes and layouts, its two products.

On a CPU they are interpreted, with race detection, which is for tests. The interpreter knows neither a wgmma operand in
registers nor a carried accumulator; with `p_smem` the second product goes through shared memory instead.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

COMPUTE_CAPABILITY = "9.0"
# ptxas of these CUDA releases miscompiles causal masks in kernels of this kind, as JAX's own says: [first, past last).
BROKEN_CUDA = (12080, 12091)

DTYPES = (jnp.bfloat16, jnp.float16)
MULTIPROCESSORS = 132  # of an H100 or H200
ROWS = 64  # M of one wgmma
ROWS_OF_A_TILE = 8  # of shared memory that wgmma reads
MASKED = -1e30  # finite: a row with no key in a tile then keeps a finite maximum
LOG2E = math.log2(math.e)  # scores are kept in base 2, so that exp2 suffices
# Registers: a matrix of 64 rows, one value a row, one value a column.
MATRIX, PER_ROW, PER_COLUMN = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)

_is_assumed = False


def assume_hopper() -> None:
    """Lower for a Hopper GPU from now on, with kernels that were found to be sound, in a process that has none."""
    global _is_assumed
    _is_assumed = True


def platform() -> str:
    """Return what programs are lowered for: "cpu" or "gpu"."""
    return "gpu" if _is_assumed else jax.default_backend()


def unavailable() -> str | None:
    """Say why the default device cannot run the kernels, or None: it is a Hopper GPU with a compiler to be trusted."""
    if _is_assumed:
        return None
    device = jax.local_devices()[0]
    if getattr(device, "compute_capability", None) != COMPUTE_CAPABILITY:
        return f"the kernels are for GPUs of compute capability {COMPUTE_CAPABILITY}"
    version = cuda_version(device.client.platform_version)
    if BROKEN_CUDA[0] <= version < BROKEN_CUDA[1]:
        return f"CUDA {version // 1000}.{version % 1000 // 10} miscompiles the kernels; install the extra cuda13"
    return None


def unfit(x: Any, w: Any, *, depth: int, columns: int) -> str | None:
    """Say what a kernel for x @ w lacks for these arrays, or None.

    Its tiles take `depth` values of the sum and `columns` of w at a time, and TMA takes 8 rows.
    """
    if x.dtype not in DTYPES or w.dtype != x.dtype:
        return f"x is {x.dtype} and w {w.dtype}; built are bfloat16 and float16, the same for both"
    if len(x) % ROWS_OF_A_TILE:
        return f"x has {len(x)} rows; built are multiples of {ROWS_OF_A_TILE}"
    if w.shape[0] % depth or w.shape[1] % columns:
        return f"the weights are {w.shape[0]} x {w.shape[1]}; built are multiples of {depth} and {columns}"
    return None


def choose(missing: str | None, is_sound: Callable[[], bool]) -> tuple[str, str]:
    """Return the backend of an op that has a kernel and a reference, and why.

    `missing` is what stops the kernel, if anything does; `is_sound` tries it, and is asked only where it could run.
    """
    if missing is None and not (_is_assumed or is_sound()):
        missing = "the kernel gave wrong results when it was tried"
    return ("mosaic_gpu", "the kernel for Hopper GPUs") if missing is None else ("reference", missing)


def run[T](op: str, backends: Mapping[str, Callable[..., T]], backend: str, *arrays: Any, **options: Any) -> T:
    """Compute an op with one of its backends, under its name in a profile.

    Raises ValueError for a name that none of them has.
    """
    if backend not in backends:
        raise ValueError(f"{op} backend is {backend!r}; choose one of {', '.join(backends)}")
    with jax.named_scope(f"{op}_{backend}"):
        return backends[backend](*arrays, **options)


def kernel_agrees(
    backends: Mapping[str, Callable[..., Any]], draw: Callable[[np.random.Generator], tuple], **options: Any
) -> bool:
    """Run an op's kernel once on the default device, and return whether it agrees with the reference: compilers err.

    `draw` makes the arguments. They are real arrays, even while a caller is being traced: tracing is a matter of one
    thread.
    """

    def try_it() -> bool:
        arguments = draw(np.random.default_rng(0))
        return agree(*(jax.tree.leaves(backends[name](*arguments, **options)) for name in ("mosaic_gpu", "reference")))

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(try_it).result()


def agree(actual: Sequence[jax.Array], expected: Sequence[jax.Array]) -> bool:
    """Return whether a kernel's results are the reference's, up to rounding to 16 bits twice."""

    def is_close(a: jax.Array, b: jax.Array) -> jax.Array:
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        return jnp.all(jnp.abs(a - b) <= 0.05 + 0.02 * jnp.abs(b))  # NaN is not below

    return all(bool(is_close(a, b)) for a, b in zip(actual, expected, strict=True))


def cuda_version(platform_version: str) -> int:
    """Return 13000 for "... cuda 13000", 0 where nothing says."""
    words = platform_version.split()
    return next((int(number) for name, number in pairwise(words) if name == "cuda" and number.isdigit()), 0)


def interpretation() -> plgpu.InterpretGPUParams | None:
    """Return how to interpret a kernel: on a CPU; None compiles."""
    return plgpu.InterpretGPUParams(detect_races=True) if platform() == "cpu" else None


def wgmma_smem(shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory for an operand of wgmma, of 16-bit values and whole tiles of 8 x 64."""
    tiling: Any = plgpu.TilingTransform  # abstract to a type checker
    swizzle: Any = plgpu.SwizzleTransform
    return plgpu.SMEM(shape, dtype, transforms=(tiling((8, 64)), swizzle(128)))


def load_rows(smem: Any) -> Any:
    """Load a matrix that lies in SMEM as in GMEM; for 256 columns JAX 0.11 seeks a way without conflicts for ever."""
    return plgpu.load(smem, layout=MATRIX, optimized=smem.shape[1] <= 128)


def matmul(a_smem: Any, b_smem: Any, shape: tuple[int, int], issued: Callable[[], None] = lambda: None) -> Any:
    """A @ B in float32 with both operands in SMEM; `issued` runs between the start of the product and its end."""

    def run(acc: Any) -> Any:
        plgpu.wgmma(acc, a_smem, b_smem)
        issued()
        return acc[...]

    return pl.run_scoped(run, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))


def accumulate(acc: Any, p: Any, v_smem: Any, p_smem: Any | None) -> Any:
    """acc + P @ V, with P in registers when compiled."""
    if p_smem is None:
        start = plgpu.WGMMAAccumulatorRef.init(acc)
        return pl.run_state(lambda ref: plgpu.wgmma(ref, p, v_smem))(start)
    p_smem[...] = p
    plgpu.commit_smem()
    return acc + matmul(p_smem, v_smem, acc.shape)
