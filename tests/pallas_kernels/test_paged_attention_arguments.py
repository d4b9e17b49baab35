"""Arguments that cannot work are refused before anything is traced, with the values."""

import jax.numpy as jnp
import jaxtyping
import pytest

from pallas_kernels.paged_attention import paged_attention


@pytest.fixture(autouse=True)
def _no_shape_checks_but_ours(monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


def attend(**changes):
    arguments = {
        "q": jnp.zeros((5, 4, 16), jnp.float32),
        "k_pool": jnp.zeros((7, 2, 8, 16), jnp.float32),
        "v_pool": jnp.zeros((7, 2, 8, 16), jnp.float32),
        "block_tables": jnp.zeros((3, 6), jnp.int32),
        "query_start_loc": jnp.zeros((4,), jnp.int32),
        "seq_lens": jnp.zeros((3,), jnp.int32),
        "scale": 0.25,
    }
    return paged_attention(**{**arguments, **changes})


def test_the_unchanged_arguments_are_accepted():
    assert attend().shape == (5, 4, 16)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": jnp.zeros((5, 64), jnp.float32)}, r"q has shape \(5, 64\); it must have 3 axes"),
        ({"q": jnp.zeros((0, 4, 16), jnp.float32)}, r"q has shape \(0, 4, 16\); each axis must be at least 1"),
        ({"k_pool": jnp.zeros((7, 0, 8, 16), jnp.float32)}, r"k_pool has shape \(7, 0, 8, 16\); each axis"),
        ({"block_tables": jnp.zeros((3, 0), jnp.int32)}, r"block_tables has shape \(3, 0\); each axis"),
        ({"seq_lens": jnp.zeros((0,), jnp.int32)}, r"seq_lens has shape \(0,\); each axis"),
        ({"q": jnp.zeros((5, 3, 16), jnp.float32)}, "q has 3 heads and the pool 2"),
        ({"q": jnp.zeros((5, 4, 32), jnp.float32)}, r"k_pool has shape \(7, 2, 8, 16\)"),
        ({"v_pool": jnp.zeros((7, 2, 16, 16), jnp.float32)}, r"v_pool has shape \(7, 2, 16, 16\)"),
        ({"block_tables": jnp.zeros((4, 6), jnp.int32)}, r"block_tables has shape \(4, 6\)"),
        ({"query_start_loc": jnp.zeros((3,), jnp.int32)}, r"query_start_loc has shape \(3,\)"),
        ({"sinks": jnp.zeros((2,), jnp.float32)}, r"sinks has shape \(2,\)"),
        ({"seq_lens": jnp.zeros((3,), jnp.uint32)}, "seq_lens is uint32; it must be int32"),
        ({"scale": 0.0}, r"scale is 0\.0"),
        ({"window": 0}, "window is 0; it must be at least 1"),
        ({"soft_cap": -1.0}, r"soft_cap is -1\.0"),
        ({"backend": "triton"}, "backend is 'triton'; choose one of mosaic_gpu, blockwise, reference"),
    ],
)
def test_contradictions_are_value_errors(changes, message):
    with pytest.raises(ValueError, match=message):
        attend(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": jnp.zeros((5, 4, 16), jnp.int8)}, "q is int8; built are float32, bfloat16, float16"),
        ({"v_pool": jnp.zeros((7, 2, 8, 16), jnp.bfloat16)}, "k_pool is float32 and v_pool bfloat16"),
    ],
)
def test_types_without_an_implementation_are_named(changes, message):
    with pytest.raises(NotImplementedError, match=message):
        attend(**changes)
