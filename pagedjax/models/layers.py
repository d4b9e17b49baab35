"""The parts that every decoder shares: linear, embedding, RMS norm, gated MLP.

Kernels are stored [in, out]; projections with one input share one kernel, so that a layer has few
leaves. Nothing here knows attention, the cache or a model family.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from pallas_kernels.add_rms_norm import add_rms_norm
from pallas_kernels.add_rms_norm.reference import rms_norm
from pallas_kernels.gated_matmul import gated_matmul
from pallas_kernels.gated_matmul.reference import Activation, combine
from pallas_kernels.matmul import matmul
from pallas_kernels.matmul.reference import full_precision

INIT_STDDEV = 0.02  # what transformers initialises with; keeps activations of random models finite in bfloat16


class Linear(nnx.Module):
    """y = x kernel + bias."""

    def __init__(self, in_dim: int, out_dim: int, *, use_bias: bool = False, dtype: DTypeLike, rngs: nnx.Rngs):
        self.kernel = nnx.Param(_random(rngs, (in_dim, out_dim), dtype))
        self.bias = nnx.Param(jnp.zeros((out_dim,), dtype)) if use_bias else None

    def __call__(self, x: Float[Array, "T I"]) -> Float[Array, "T O"]:
        """Project every token."""
        y = matmul(x, self.kernel[...])
        return y if self.bias is None else y + self.bias[...][None, :]


class Embedding(nnx.Module):
    """A table of one row a token, read forwards for inputs and transposed for tied logits."""

    def __init__(self, vocab_size: int, dim: int, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.embedding = nnx.Param(_random(rngs, (vocab_size, dim), dtype))

    def __call__(self, token_ids: Int[Array, " T"]) -> Float[Array, "T D"]:
        """Look up every token."""
        return self.embedding[...].at[token_ids].get(mode="clip")

    def logits(self, hidden: Float[Array, "B D"]) -> Float[Array, "B V"]:
        """Multiply by the transposed table; float32 accumulation is kept, not rounded to the weights' type."""
        return jax.lax.dot_general(
            hidden,
            self.embedding[...],
            (((1,), (1,)), ((), ())),
            precision=full_precision(hidden.dtype),
            preferred_element_type=jnp.float32,
        )


class OutputHead(nnx.Module):
    """The separate matrix from hidden states to logits."""

    def __init__(self, dim: int, vocab_size: int, *, dtype: DTypeLike, rngs: nnx.Rngs):
        self.kernel = nnx.Param(_random(rngs, (dim, vocab_size), dtype))

    def logits(self, hidden: Float[Array, "B D"]) -> Float[Array, "B V"]:
        """Multiply; float32 accumulation is kept, not rounded to the weights' type."""
        precision = full_precision(hidden.dtype)
        return jnp.matmul(hidden, self.kernel[...], precision=precision, preferred_element_type=jnp.float32)


class RMSNorm(nnx.Module):
    """Root mean square norm over the last axis, in float32. `unit_offset` multiplies by 1 + scale, as Gemma does."""

    def __init__(self, dim: int, *, eps: float, unit_offset: bool = False, dtype: DTypeLike):
        self.scale = nnx.Param(jnp.zeros((dim,), dtype) if unit_offset else jnp.ones((dim,), dtype))
        self.eps = eps
        self.unit_offset = unit_offset

    def __call__(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
        """Normalise every row; the result has the type of `x`."""
        if not self.unit_offset:  # Llama casts first
            return rms_norm(x, self.scale[...], self.eps)
        scale = jnp.float32(1.0) + self.scale[...].astype(jnp.float32)
        return rms_norm(x.astype(jnp.float32), scale, self.eps).astype(x.dtype)  # Gemma scales in float32, casts last

    def add(
        self, x: Float[Array, "T D"], delta: Float[Array, "T D"]
    ) -> tuple[Float[Array, "T D"], Float[Array, "T D"]]:
        """Return x + delta, and that normalised."""
        if self.unit_offset:
            return x + delta, self(x + delta)
        return add_rms_norm(x, delta, self.scale[...], eps=self.eps)


class GatedMLP(nnx.Module):
    """down(act(gate) * up), gate and up being the halves of one projection."""

    def __init__(
        self,
        dim: int,
        mlp_dim: int,
        *,
        act: Activation,
        use_bias: bool,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
    ):
        self.gate_up = Linear(dim, 2 * mlp_dim, use_bias=use_bias, dtype=dtype, rngs=rngs)
        self.down = Linear(mlp_dim, dim, use_bias=use_bias, dtype=dtype, rngs=rngs)
        self.act: Activation = act

    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        """Run the MLP on every token."""
        if self.gate_up.bias is None:
            return self.down(gated_matmul(x, self.gate_up.kernel[...], act=self.act))
        return self.down(combine(self.gate_up(x), self.act))


def soft_cap(x: Float[Array, "..."], cap: float | None) -> Float[Array, "..."]:
    """Squash into (-cap, cap) by tanh; None leaves `x` as it is."""
    return x if cap is None else jnp.tanh(x / jnp.asarray(cap, x.dtype)) * jnp.asarray(cap, x.dtype)


def _random(rngs: nnx.Rngs, shape: tuple[int, ...], dtype: DTypeLike) -> Float[Array, "..."]:
    return jax.nn.initializers.normal(INIT_STDDEV)(rngs.params(), shape, dtype)
