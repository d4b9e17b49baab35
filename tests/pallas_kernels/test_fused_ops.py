"""The fused elementwise kernels equal their references: interpreted on a CPU, without races."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels.add_rms_norm as norm_op
import pallas_kernels.gated_matmul as gated_op
import pallas_kernels.matmul as matmul_op
import pallas_kernels.rope_and_cache as rope_op
from pallas_kernels.add_rms_norm import add_rms_norm
from pallas_kernels.rope_and_cache import rope_and_cache

pytestmark = pytest.mark.usefixtures("compiled_quickly")

# Both sides round at the same places, but sums of squares differ in order: the norm may round to the next value, and
# so may what it is multiplied into. Rotation can cancel, so that the error is one of the larger operand.
LAST_PLACE = {jnp.bfloat16: 2.0**-7, jnp.float16: 2.0**-10}


def normal(seed: int, *shape: int, dtype=jnp.float32) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def assert_last_place(actual: jax.Array, expected: jax.Array) -> None:
    assert actual.dtype == expected.dtype
    tolerance = 2 * LAST_PLACE[expected.dtype.type]
    np.testing.assert_allclose(
        actual.astype(jnp.float32), expected.astype(jnp.float32), rtol=tolerance, atol=4 * tolerance
    )


@pytest.mark.parametrize(("dim", "dtype"), [(256, jnp.float16), (1024, jnp.bfloat16)])
def test_add_rms_norm_equals_the_reference(capfd, dim, dtype):
    x, delta, scale = normal(0, 3, dim, dtype=dtype), normal(1, 3, dim, dtype=dtype), normal(2, dim, dtype=dtype)
    total, normed = add_rms_norm(x, delta, scale, eps=1e-5, backend="mosaic_gpu")
    expected_total, expected = add_rms_norm(x, delta, scale, eps=1e-5, backend="reference")
    np.testing.assert_array_equal(total.astype(jnp.float32), expected_total.astype(jnp.float32))
    assert_last_place(normed, expected)
    assert "RACE" not in "".join(capfd.readouterr())


@pytest.mark.parametrize(
    ("heads", "head_dim", "block_size", "has_norm", "dtype"),
    [
        ((4, 2), 64, 16, False, jnp.bfloat16),
        ((16, 8), 128, 32, True, jnp.bfloat16),
        ((64, 8), 64, 16, True, jnp.float16),
    ],
)
def test_rope_and_cache_equals_the_reference(capfd, heads, head_dim, block_size, has_norm, dtype):
    (num_heads, num_kv_heads), num_blocks = heads, 5
    slots = [
        17,
        num_blocks * block_size,
        3,
        num_blocks * block_size + 4,
        num_blocks * block_size - 1,
    ]  # two are dropped
    pool = (num_blocks, num_kv_heads, block_size, head_dim)
    angles = normal(3, len(slots), head_dim // 2)
    arguments = (
        normal(0, len(slots), num_heads + 2 * num_kv_heads, head_dim, dtype=dtype), jnp.cos(angles), jnp.sin(angles),
        normal(1, *pool, dtype=dtype), normal(2, *pool, dtype=dtype), jnp.asarray(slots, jnp.int32),
        (normal(4, head_dim, dtype=dtype), normal(5, head_dim, dtype=dtype)) if has_norm else None,
    )  # fmt: skip
    expected = rope_and_cache(*arguments, eps=1e-6, backend="reference")
    for actual, wanted in zip(rope_and_cache(*arguments, eps=1e-6, backend="mosaic_gpu"), expected, strict=True):
        assert_last_place(actual, wanted)
    assert "RACE" not in "".join(capfd.readouterr())


def test_sizes_that_are_not_built_are_refused_by_name():
    x = jnp.zeros((1, 576), jnp.bfloat16)
    with pytest.raises(NotImplementedError, match="rows have 576 values; built are multiples of 256 up to 8192"):
        add_rms_norm(x, x, x[0], eps=1e-5, backend="mosaic_gpu")
    pool = jnp.zeros((2, 1, 16, 64), jnp.bfloat16)
    heads, table = jnp.zeros((1, 3, 64), jnp.bfloat16), jnp.zeros((1, 32), jnp.float32)
    with pytest.raises(NotImplementedError, match="1 query heads of 64 are no multiple of 128 values"):
        rope_and_cache(heads, table, table, pool, pool, jnp.zeros(1, jnp.int32), backend="mosaic_gpu")


def test_an_unknown_backend_is_a_value_error():
    x = jnp.zeros((1, 256), jnp.bfloat16)
    with pytest.raises(ValueError, match="backend is 'triton'; choose one of mosaic_gpu, reference"):
        add_rms_norm(x, x, x[0], eps=1e-5, backend="triton")


@pytest.fixture
def _on_hopper(monkeypatch):
    """As if the device ran the kernels; a CPU interprets them."""
    for op in (norm_op, gated_op, matmul_op, rope_op):
        monkeypatch.setattr(op, "unavailable", lambda: None)
        op.is_sound.cache_clear()
    yield
    for op in (norm_op, gated_op, matmul_op, rope_op):
        op.is_sound.cache_clear()


@pytest.mark.usefixtures("_on_hopper")
@pytest.mark.parametrize("is_wrong", [False, True])
def test_a_kernel_runs_only_where_it_agrees_with_the_reference(monkeypatch, is_wrong):
    """It is tried when it is first wanted, which is while a step is traced."""

    def wrong(*arguments, **options):
        results = op.BACKENDS["reference"](*arguments, **options)
        return jax.tree.map(lambda result: result.at[0].set(jnp.nan), results)

    x, pool = jnp.zeros((2, 512), jnp.bfloat16), jnp.zeros((2, 2, 16, 64), jnp.bfloat16)
    expected = ("reference", "the kernel gave wrong results when it was tried") if is_wrong else (
        "mosaic_gpu", "the kernel for Hopper GPUs"
    )  # fmt: skip
    products = [jnp.zeros((64, 64), jnp.bfloat16)] * 2
    gated = [jnp.zeros((256, 64), jnp.bfloat16), jnp.zeros((64, 14336), jnp.bfloat16)]
    heads = jnp.zeros((2, 8, 64), jnp.bfloat16)
    for op, arrays in ((norm_op, [x]), (matmul_op, products), (gated_op, gated), (rope_op, [heads, pool])):
        if is_wrong:
            monkeypatch.setitem(op.BACKENDS, "mosaic_gpu", wrong)
        chosen = []
        jax.jit(lambda *traced, op=op, chosen=chosen: chosen.append(op.default_backend(*traced))).trace(*arrays)
        assert chosen == [expected]
