"""Shapes, bytes and operations of the kernel measurements by hand; the times themselves need a GPU."""

import jax
import pytest

from pagedjax.bench import kernels
from pagedjax.bench.kernels import KernelFlags, num_bytes, num_flops, requests
from pagedjax.errors import ConfigError

SMALL = KernelFlags(num_heads=4, num_kv_heads=2, head_dim=16)


def test_shapes_name_requests():
    assert requests("2x5") == [(5, 5), (5, 5)]
    assert requests("1x9+2x5@7") == [(9, 9), (5, 7), (5, 7)]


@pytest.mark.parametrize("text", ["", "x5", "4", "4x", "1x5+", "1x5@4", "1x0", "1 x 5"])
def test_other_shapes_are_refused_before_anything_runs(text):
    with pytest.raises(ConfigError, match="shape"):
        KernelFlags(decode=(text,))


def test_decoding_reads_keys_and_values_once():
    assert num_bytes(SMALL, [(1, 10), (1, 3)]) == 13 * 2 * 16 * 2 * 2


def test_prefill_multiplies_what_the_mask_leaves():
    """Two tokens after three: they see four and five keys; 16 products a key and head, twice, two operations each."""
    assert num_flops(SMALL, [(2, 5)]) == (4 + 5) * 4 * 16 * 2 * 2


def test_a_machine_without_a_gpu_is_refused():
    with pytest.raises(ConfigError, match="JAX runs on a cpu here"):
        kernels.run(SMALL)


def test_the_program_attends_layer_by_layer():
    program, arguments = kernels._program(SMALL, [(1, 20), (3, 3)])
    assert jax.eval_shape(program, *arguments).shape == (4, 4, 16)
    assert len({int(block) for block in arguments[2].ravel() if block}) == 3
