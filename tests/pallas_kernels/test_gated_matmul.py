"""The gated product equals jnp's: interpreted on a CPU, without races."""

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from pallas_kernels.gated_matmul import default_backend, gated_matmul
from pallas_kernels.gated_matmul.mosaic_gpu import mosaic_gated_matmul, unsupported
from pallas_kernels.gated_matmul.reference import activate
from pallas_kernels.gated_matmul.tuning import Cut


def normal(seed: int, *shape: int, dtype=jnp.bfloat16) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, dtype)


@pytest.mark.parametrize(
    ("num_rows", "depth", "width", "cut", "dtype", "act"),
    [
        # a ring that is never full in a tile; the last rows are not there
        (40, 128, 256, Cut(num_programs=1), jnp.bfloat16, "silu"),
        # several tiles a program, the ring goes on from one to the next
        (304, 320, 128, Cut(num_programs=2), jnp.bfloat16, "silu"),
        # columns shared by two programs
        (200, 192, 128, Cut(num_programs=2, cluster=2), jnp.bfloat16, "silu"),
        (200, 192, 128, Cut(num_programs=2, cluster=2), jnp.float16, "gelu_pytorch_tanh"),
    ],
)
def test_the_gated_product_is_that_of_float32_rounded_once(capfd, num_rows, depth, width, cut, dtype, act):
    x, w = normal(0, num_rows, depth, dtype=dtype), normal(1, depth, 2 * width, dtype=dtype) / 8
    y = mosaic_gated_matmul(x, w, act=act, cut=cut)
    assert y.dtype == dtype
    gate, up = jnp.split(x.astype(jnp.float32) @ w.astype(jnp.float32), 2, axis=1)
    np.testing.assert_allclose(
        y.astype(jnp.float32), activate(gate, act) * up, rtol=float(jnp.finfo(dtype).eps), atol=1e-4
    )
    assert "RACE" not in "".join(capfd.readouterr())


@pytest.mark.parametrize(
    ("x", "w", "reason"),
    [
        ((256, 4096), (4096, 28672), None),
        ((1024, 4096), (4096, 28672), None),
        ((8192, 4096), (4096, 28672), None),
        ((8190, 4096), (4096, 28672), "x has 8190 rows; built are multiples of 8"),
        ((64, 4096), (4096, 28672), "XLA is faster"),
        ((512, 4096), (4096, 28672), "XLA is faster"),
        ((256, 1024), (1024, 6144), "XLA is faster"),  # too few tiles
        ((1024, 4096), (4096, 28544), "4096 x 28544; built are multiples of 64 and 256"),
    ],
)
def test_what_is_left_to_xla(x, w, reason):
    why = unsupported(jax.ShapeDtypeStruct(x, jnp.bfloat16), jax.ShapeDtypeStruct(w, jnp.bfloat16))
    assert why is None if reason is None else reason in (why or "")


def test_float32_is_left_to_xla_and_keeps_its_accuracy():
    x, w = normal(0, 256, 128, dtype=jnp.float32), normal(1, 128, 256, dtype=jnp.float32)
    assert "float32" in (unsupported(x, w) or "")
    assert default_backend(x, w)[0] == "reference"
    gate, up = np.split(np.asarray(x, np.float64) @ np.asarray(w, np.float64), 2, axis=1)
    np.testing.assert_allclose(gated_matmul(x, w, act="silu"), gate / (1 + np.exp(-gate)) * up, rtol=1e-5, atol=1e-3)


def test_an_unknown_backend_is_a_value_error():
    x = jnp.zeros((256, 256), jnp.bfloat16)
    with pytest.raises(ValueError, match="gated_matmul backend is 'cublas'; choose one of mosaic_gpu, reference"):
        gated_matmul(x, x, act="silu", backend="cublas")


@pytest.mark.parametrize(
    ("dtype", "width", "reason"),
    [(jnp.float32, 256, "x is float32 and w float32"), (jnp.bfloat16, 128, "the weights are 64 x 128; built are")],
)
def test_the_kernel_alone_refuses_what_it_is_not_built_for(dtype, width, reason):
    """It failed with what is wrong inside, the swizzle of float32."""
    with pytest.raises(NotImplementedError, match=f"the mosaic_gpu backend of gated_matmul: {reason}"):
        gated_matmul(normal(0, 8, 64, dtype=dtype), normal(1, 64, width, dtype=dtype), act="silu", backend="mosaic_gpu")


@pytest.mark.parametrize("act", ["gelu", "relu", None])
def test_an_unknown_activation_is_a_value_error(monkeypatch, act):
    """Whatever was not silu was computed as the tanh approximation of GELU."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    x = jnp.ones((8, 8), jnp.float32)
    with pytest.raises(ValueError, match=f"act is {act!r}; choose one of silu, gelu_pytorch_tanh"):
        gated_matmul(x, x, act=act)
