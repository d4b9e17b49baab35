"""Kernels are taken where they can run, and every one lowers for CUDA on a machine without a GPU."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import hopper
from pallas_kernels.add_rms_norm import add_rms_norm
from pallas_kernels.gated_matmul.mosaic_gpu import mosaic_gated_matmul
from pallas_kernels.gated_matmul.tuning import Cut
from pallas_kernels.matmul.mosaic_gpu import mosaic_matmul
from pallas_kernels.matmul.tuning import COSTS, tile_for
from pallas_kernels.paged_attention import default_backend, paged_attention
from pallas_kernels.rope_and_cache import rope_and_cache


@pytest.mark.parametrize(
    ("capability", "version", "reason"),
    [
        ("9.0", "PJRT C API\ncuda 13000", None),
        ("9.0", "", None),
        ("9.0", "cuda 12060", None),
        ("9.0", "cuda 12080", "CUDA 12.8 miscompiles"),
        ("9.0", "cuda 12090", "CUDA 12.9 miscompiles"),
        ("8.0", "cuda 13000", "compute capability 9.0"),
        (None, "cpu", "compute capability 9.0"),
    ],
)
def test_only_a_hopper_gpu_with_a_sound_compiler_runs_the_kernels(monkeypatch, capability, version, reason):
    device = SimpleNamespace(client=SimpleNamespace(platform_version=version))
    if capability is not None:
        device.compute_capability = capability
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    assert (hopper.unavailable() is None) == (reason is None)
    assert (reason or "") in (hopper.unavailable() or "")


@pytest.mark.parametrize(
    ("is_hopper", "head_dim", "backend", "reason"),
    [(False, 64, "blockwise", "9.0"), (True, 64, "mosaic_gpu", "Hopper"), (True, 96, "blockwise", "head_dim is 96")],
)
def test_the_default_backend_says_why(monkeypatch, is_hopper, head_dim, backend, reason):
    missing = None if is_hopper else hopper.unavailable()  # the real one: on a GPU that has kernels there is none
    if not is_hopper and missing is None:
        pytest.skip("this is a Hopper GPU")
    monkeypatch.setattr("pallas_kernels.paged_attention.unavailable", lambda: missing)
    name, why = default_backend(array((1, 4, head_dim)), array((9, 2, 16, head_dim)))
    assert name == backend
    assert reason in why


@pytest.fixture
def _compiled(monkeypatch):
    monkeypatch.setattr(hopper, "_is_assumed", True)
    jax.clear_caches()
    yield
    jax.clear_caches()


def count_kernels(function, *arguments) -> int:
    return jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text().count("@mosaic_gpu")


def array(shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.mark.usefixtures("_compiled")
@pytest.mark.parametrize(
    ("num_tokens", "group", "head_dim", "num_kernels"),
    [(4, 1, 128, 2), (4, 3, 64, 2), (4, 5, 128, 2), (4, 64, 64, 2), (300, 4, 64, 3), (300, 7, 128, 3)],
)
def test_attention_lowers_for_cuda(num_tokens, group, head_dim, num_kernels):
    pool, ints = array((9, 2, 16, head_dim)), lambda *shape: array(shape, jnp.int32)
    arguments = (array((num_tokens, 2 * group, head_dim)), pool, pool, ints(4, 8), ints(5), ints(4))

    def attend(*arrays):
        return paged_attention(*arrays, scale=0.1, window=40, soft_cap=3.0, backend="mosaic_gpu")

    assert count_kernels(attend, *arguments) == num_kernels


@pytest.mark.usefixtures("_compiled")
def test_fused_ops_lower_for_cuda():
    row, pool, table = array((4, 1024)), array((9, 2, 16, 128)), array((4, 64), jnp.float32)

    def add(x, delta, scale):
        return add_rms_norm(x, delta, scale, eps=1e-5, backend="mosaic_gpu")

    def rope(heads, cos, sin, k, v, slots, scale):
        return rope_and_cache(heads, cos, sin, k, v, slots, (scale, scale), eps=1e-5, backend="mosaic_gpu")

    assert count_kernels(add, row, row, array((1024,))) == 1
    arguments = (array((4, 12, 128)), table, table, pool, pool, array((4,), jnp.int32), array((128,)))
    assert count_kernels(rope, *arguments) == 1


@pytest.mark.usefixtures("_compiled")
@pytest.mark.parametrize(("rows", "columns"), COSTS)
def test_the_product_lowers_for_cuda_with_every_tile(rows, columns):
    tile = tile_for(rows, 256, columns)
    assert count_kernels(lambda x, w: mosaic_matmul(x, w, tile=tile), array((rows, 256)), array((256, columns))) == 1


@pytest.mark.usefixtures("_compiled")
@pytest.mark.parametrize("num_rows", [256, 4096])  # the second in clusters
@pytest.mark.parametrize("act", ["silu", "gelu_pytorch_tanh"])
def test_the_gated_product_lowers_for_cuda(num_rows, act):
    arguments = array((num_rows, 256)), array((256, 1024))
    assert count_kernels(lambda x, w: mosaic_gated_matmul(x, w, act=act), *arguments) == 1


@pytest.mark.usefixtures("_compiled")
@pytest.mark.parametrize(
    "product",
    [
        lambda x, w: mosaic_matmul(x, w, tile=tile_for(64, 256, 256)),
        lambda x, w: mosaic_gated_matmul(x, w, act="silu", cut=Cut(num_programs=2)),
        lambda x, w: mosaic_gated_matmul(x, w, act="silu", cut=Cut(num_programs=2, cluster=2)),
    ],
    ids=["plain", "gated", "in clusters"],
)
def test_products_lower_for_cuda_with_64_bit_types_on(product):
    """The index of a loop was of another type than what it was divided by."""
    with jax.enable_x64(True):
        assert count_kernels(product, array((64, 256)), array((256, 256))) == 1
