"""Engines of the embedded model compile once for all files that use this (`tests/conftest.py` keeps these together)."""

from contextlib import contextmanager

from tests.kept_executables import few_buckets, sharing_executables

OPTIONS = {
    "model": "demo", "max_model_len": 1024, "max_num_seqs": 32, "max_num_batched_tokens": 256,
    "num_gpu_blocks_override": 769,
}  # fmt: skip


@contextmanager
def compiling_once():
    """Share executables, of two sizes each."""
    with sharing_executables(), few_buckets(num_rows=(4,), num_tokens=(32,)):
        yield
