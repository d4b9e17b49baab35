"""The product of few rows equals jnp's: interpreted on a CPU, without races."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.matmul import default_backend, matmul
from pallas_kernels.matmul.mosaic_gpu import mosaic_matmul, unsupported
from pallas_kernels.matmul.tuning import COSTS, Tile, tile_for

pytestmark = pytest.mark.usefixtures("compiled_quickly")


def normal(seed: int, *shape: int, dtype=jnp.bfloat16) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, dtype)


FEW_ROWS = (40, 192, 64, Tile(64, 64, 64, stages=8))  # a ring that is never full
WIDE = (128, 320, 192, Tile(64, 192, 64, stages=2))
CUT = (192, 256, 128, Tile(128, 64, 128, stages=2))  # the last tile has rows that there are not


@pytest.mark.parametrize(
    ("num_rows", "depth", "width", "tile", "dtype"),
    [
        (*FEW_ROWS, jnp.bfloat16),
        (*WIDE, jnp.bfloat16),
        (*CUT, jnp.bfloat16),
        (*CUT, jnp.float16),
        pytest.param(*FEW_ROWS, jnp.float16, marks=pytest.mark.fuzz),
        pytest.param(*WIDE, jnp.float16, marks=pytest.mark.fuzz),
    ],
)
def test_the_product_is_that_of_float32_rounded_once(capfd, num_rows, depth, width, tile, dtype):
    x, w = normal(0, num_rows, depth, dtype=dtype), normal(1, depth, width, dtype=dtype)
    y = mosaic_matmul(x, w, tile=tile)
    assert y.dtype == dtype
    exact = x.astype(jnp.float32) @ w.astype(jnp.float32)
    np.testing.assert_allclose(y.astype(jnp.float32), exact, rtol=float(jnp.finfo(dtype).eps), atol=1e-4)
    assert "RACE" not in "".join(capfd.readouterr())


@pytest.mark.parametrize(
    ("num_rows", "width", "rows", "columns"),
    [(64, 6144, 64, 64), (128, 6144, 64, 128), (256, 6144, 64, 192), (512, 6144, 128, 192), (768, 6144, 64, 192),
     (256, 4096, 64, 128), (512, 4096, 128, 128)],
)  # fmt: skip
def test_the_tile_is_the_one_that_was_fastest(num_rows, width, rows, columns):
    tile = tile_for(num_rows, 4096, width)
    assert (tile.rows, tile.columns) == (rows, columns)


def test_every_tile_fits_and_divides_the_sum():
    for depth in (64, 192, 4096):
        for rows, columns in COSTS:
            tile = tile_for(rows, depth, columns)
            assert depth % tile.depth == 0
            assert tile.stages >= 3


@pytest.mark.parametrize(
    ("x", "w", "reason"),
    [
        ((64, 256), (256, 128), None),
        ((100, 256), (256, 128), "x has 100 rows; built are multiples of 8"),
        ((8, 4096), (4096, 4096), "XLA is faster"),
        ((8, 1024), (1024, 6144), "XLA is faster"),
        ((64, 256), (256, 96), "256 x 96; built are multiples of 64"),
        ((4096, 256), (256, 128), "XLA is faster"),
        ((64, 4096), (4096, 28672), "XLA is faster"),
        ((256, 14336), (14336, 4096), "XLA is faster"),
        ((128, 14336), (14336, 4096), None),
    ],
)
def test_what_is_left_to_xla(x, w, reason):
    why = unsupported(jax.ShapeDtypeStruct(x, jnp.bfloat16), jax.ShapeDtypeStruct(w, jnp.bfloat16))
    assert why is None if reason is None else reason in (why or "")


def test_float32_is_left_to_xla_and_keeps_its_accuracy():
    x, w = normal(0, 64, 256, dtype=jnp.float32), normal(1, 256, 128, dtype=jnp.float32)
    assert "float32" in (unsupported(x, w) or "")
    assert default_backend(x, w)[0] == "reference"
    np.testing.assert_allclose(matmul(x, w), np.asarray(x, np.float64) @ np.asarray(w, np.float64), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("num_rows", "width", "dtype", "reason"),
    [
        (64, 32, jnp.bfloat16, "the weights are 64 x 32; built are multiples of 64 and 64"),
        (64, 64, jnp.float32, "x is bfloat16 and w float32"),
        (65, 64, jnp.bfloat16, "x has 65 rows"),
    ],
)
def test_the_kernel_alone_refuses_what_it_is_not_built_for(num_rows, width, dtype, reason):
    """It failed with what is wrong inside: "min() iterable argument is empty"."""
    x, w = normal(0, num_rows, 64), normal(1, 64, width, dtype=dtype)
    with pytest.raises(NotImplementedError, match=f"the mosaic_gpu backend of matmul: {reason}"):
        matmul(x, w, backend="mosaic_gpu")


@pytest.mark.parametrize("dtypes", [(jnp.bfloat16, jnp.float32), (jnp.float32, jnp.bfloat16)])
def test_of_two_types_the_result_has_that_of_x_and_keeps_its_accuracy(dtypes):
    """It had the wider type of the two, and was refused where JAX promotes none."""
    x, w = normal(0, 8, 256, dtype=dtypes[0]), normal(1, 256, 16, dtype=dtypes[1])
    y = matmul(x, w)
    assert y.dtype == dtypes[0]
    exact = np.asarray(x, np.float64) @ np.asarray(w, np.float64)
    np.testing.assert_allclose(np.asarray(y, np.float64), exact, rtol=float(jnp.finfo(dtypes[0]).eps), atol=1e-4)


def test_an_unknown_backend_is_a_value_error():
    x = jnp.zeros((64, 64), jnp.bfloat16)
    with pytest.raises(ValueError, match="matmul backend is 'cublas'; choose one of mosaic_gpu, reference"):
        matmul(x, x, backend="cublas")
