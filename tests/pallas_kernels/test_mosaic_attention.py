"""The Hopper kernels equal the dense reference: interpreted on a CPU, with threads, barriers and copies, without races.

Few workers, so that each walks several requests, a border cuts requests, and rings wrap.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention import mosaic_gpu
from tests.pallas_kernels.conftest import build_batch

# The interpreter fills memory with NaN; the rows of a tile that hold no query are multiplied, and dropped.
pytestmark = [
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
    pytest.mark.usefixtures("compiled_quickly"),
]

# Weights and outputs are rounded to 16 bits, 2 ** -9 in bfloat16 and 2 ** -12 in float16, and are up to 4 here.
HALF = {jnp.bfloat16: {"atol": 1.2e-2, "rtol": 1e-2}, jnp.float16: {"atol": 1.5e-3, "rtol": 2e-3}}

# (query_len, seq_len): decoding, whole prompts, a chunk over a context, nothing this step, an empty request.
MIXED = [(1, 130), (70, 70), (0, 40), (20, 150), (1, 1), (0, 0), (2, 2)]
DECODE = [(1, n) for n in (1, 17, 64, 65, 290)]
VERIFYING = [(5, 130), (1, 40), (8, 8), (9, 70), (0, 3), (3, 290)]
SHARED = [(2, 40), (0, 33), (1, 20), (3, 3), (0, 0), (0, 5)]  # as many tokens as requests, not one each


@pytest.fixture(autouse=True)
def _few_workers(monkeypatch):
    few = {head_dim: dataclasses.replace(tuning, num_programs=2) for head_dim, tuning in mosaic_gpu.DECODE.items()}
    monkeypatch.setattr(mosaic_gpu, "DECODE", few)
    jax.clear_caches()  # the tuning is no argument of the jitted op


@pytest.mark.parametrize(
    ("lens", "heads", "head_dim", "block_size", "dtype", "options"),
    [
        (DECODE, (9, 3), 64, 16, jnp.bfloat16, {}),
        (DECODE, (7, 1), 128, 16, jnp.bfloat16, {}),
        (SHARED, (4, 2), 64, 32, jnp.float16, {"window": 30, "soft_cap": 1.5, "sinks": True}),
        (VERIFYING, (2, 1), 64, 16, jnp.bfloat16, {"window": 100}),
        ([(1, 130), (70, 90), (1, 5)], (2, 1), 256, 16, jnp.bfloat16, {"window": 80}),
        (MIXED, (4, 1), 128, 16, jnp.bfloat16, {"soft_cap": 2.0}),
        (MIXED, (3, 1), 64, 64, jnp.bfloat16, {"window": 60, "sinks": True}),
    ],
)
def test_kernels_equal_the_reference_without_races(capfd, lens, heads, head_dim, block_size, dtype, options):
    padding = 3 if lens is MIXED else 0
    batch = build_batch(
        lens, heads=heads, head_dim=head_dim, block_size=block_size, num_blocks=1500 // block_size,
        max_blocks=300 // block_size + 1, pad_tokens=padding, pad_requests=padding,
    )  # fmt: skip
    options = dict(options)
    if options.pop("sinks", False):
        options |= {"sinks": jnp.linspace(-2, 3, heads[0], dtype=jnp.float32)}
    out = batch.attend(dtype=dtype, backend="mosaic_gpu", **options)
    expected = batch.attend(dtype=dtype, backend="reference", **options)
    np.testing.assert_allclose(out, expected, **HALF[dtype])
    np.testing.assert_array_equal(out[batch.num_tokens :], 0)
    assert "RACE" not in "".join(capfd.readouterr())


@pytest.mark.parametrize("lens", [[(1, 70), (1, 20)], [(9, 70)]])
def test_garbage_that_no_request_owns_cannot_change_a_bit(lens):
    batch = build_batch(lens, heads=(2, 1), head_dim=64, num_blocks=12, max_blocks=6)
    foreign = ~batch.owned()[:, None, :, None]
    spoiled = batch.replace(
        k_pool=np.where(foreign, np.float32("inf"), batch.k_pool), v_pool=np.where(foreign, np.nan, batch.v_pool)
    )
    options = {"dtype": jnp.bfloat16, "backend": "mosaic_gpu"}
    np.testing.assert_array_equal(batch.attend(**options), spoiled.attend(**options))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": jnp.float32}, "built are bfloat16 and float16"),
        ({"head_dim": 96}, "head_dim is 96; built are 64, 128, 256"),
        ({"block_size": 8}, "block_size is 8; built are 16, 32, 64"),
        ({"heads": (130, 2)}, "65 query heads share a KV head; built are up to 64"),
    ],
)
def test_what_is_not_built_is_refused_by_name(changes, message):
    arguments = {"heads": (4, 2), "head_dim": 64, "block_size": 16} | changes
    dtype = arguments.pop("dtype", jnp.bfloat16)
    batch = build_batch([(1, 5)], num_blocks=4, max_blocks=2, **arguments)
    with pytest.raises(NotImplementedError, match=message):
        batch.attend(dtype=dtype, backend="mosaic_gpu")


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the interpreter runs on a CPU")
def test_the_detector_sees_a_race(capfd):
    """So that its silence above says something."""

    def body(out, *, smem):
        smem[...] = plgpu.layout_cast(jnp.zeros((128,), jnp.float32), plgpu.Layout.WG_STRIDED((128,), vec_size=1))
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(smem, out)
        plgpu.wait_smem_to_gmem(0)

    plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((128,), jnp.float32),
        scratch_types={"smem": plgpu.SMEM((128,), jnp.float32)},
        num_threads=2,
        thread_name="warpgroup",
        interpret=plgpu.InterpretGPUParams(detect_races=True),
    )()
    assert "RACE" in "".join(capfd.readouterr())
