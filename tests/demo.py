"""Engines of the embedded model compile once for all files that use this (`tests/conftest.py` keeps these together)."""

from contextlib import contextmanager

from tests.kept_executables import few_buckets, sharing_executables

OPTIONS = {
    "model": "demo", "max_model_len": 1024, "max_num_seqs": 32, "max_num_batched_tokens": 256,
    "num_gpu_blocks_override": 769,
}  # fmt: skip


@contextmanager
def compiling_once():
    """Without optimisation, which takes longer than it gains: matrix products come from a library."""
    with sharing_executables(is_optimised=False), few_buckets(num_rows=(4,), num_tokens=(32,)):
        yield
