"""Add to the residual and normalise it, in one pass: what lies between any two matrix products of a decoder.

XLA makes two or three kernels of it, which at small batches cost more than their bytes.
"""

import jax
from jaxtyping import Array, Float

from pallas_kernels.add_rms_norm.mosaic_gpu import mosaic_add_rms_norm, unsupported
from pallas_kernels.add_rms_norm.reference import reference_add_rms_norm
from pallas_kernels.hopper import is_available

BACKENDS = {"mosaic_gpu": mosaic_add_rms_norm, "reference": reference_add_rms_norm}


def add_rms_norm(
    x: Float[Array, "T D"],
    delta: Float[Array, "T D"],
    scale: Float[Array, " D"],
    *,
    eps: float,
    backend: str | None = None,
) -> tuple[Float[Array, "T D"], Float[Array, "T D"]]:
    """Return x + delta, and its root mean square norm times `scale`, both in the type of x.

    The sum is rounded to that type before it is normalised; the norm is taken in float32 and rounded before it is
    scaled, as Llama does.
    """
    if backend is None:
        backend = "mosaic_gpu" if is_available() and unsupported(x) is None else "reference"
    if backend not in BACKENDS:
        raise ValueError(f"add_rms_norm backend is {backend!r}; choose one of {', '.join(BACKENDS)}")
    with jax.named_scope(f"add_rms_norm_{backend}"):
        return BACKENDS[backend](x, delta, scale, eps=eps)
