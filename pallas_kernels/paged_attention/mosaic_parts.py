"""What the Mosaic attention kernels share: wgmma's shapes and layouts, and its two products.

Interpret mode on a CPU knows neither an operand in registers nor a carried accumulator; with `p_smem` the second
product goes through shared memory instead.
"""

import math
from collections.abc import Callable
from typing import Any

from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

ROWS = 64  # M of one wgmma
MASKED = -1e30  # finite: a row with no key in a tile then keeps a finite maximum
LOG2E = math.log2(math.e)  # scores are kept in base 2, so that exp2 suffices
MATRIX, VECTOR = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA.reduce(1)


def matmul(a_smem: Any, b_smem: Any, shape: tuple[int, int], issued: Callable[[], None] = lambda: None) -> Any:
    """A @ B in float32 with both operands in SMEM; `issued` runs between the start of the product and its end."""

    def run(acc):
        plgpu.wgmma(acc, a_smem, b_smem)
        issued()
        return acc[...]

    return pl.run_scoped(run, plgpu.ACC(shape, jnp.float32))


def accumulate(acc: Any, p: Any, v_smem: Any, p_smem: Any | None) -> Any:
    """acc + P @ V, with P in registers when compiled."""
    if p_smem is None:
        return pl.run_state(lambda ref: plgpu.wgmma(ref, p, v_smem))(plgpu.ACC.init(acc))
    p_smem[...] = p
    plgpu.commit_smem()
    return acc + matmul(p_smem, v_smem, acc.shape)
