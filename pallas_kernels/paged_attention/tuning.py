"""How the blockwise backend cuts its work, by platform. Knows no shapes: a size that fits one model fits all."""

from dataclasses import dataclass

from pallas_kernels.hopper import MULTIPROCESSORS, platform


@dataclass(frozen=True)
class Tiling:
    """Sizes of one iteration. Changing chunk_tokens changes the order of sums, so it is one number a platform."""

    chunk_tokens: int  # cached tokens, rounded to whole blocks
    rows: int  # requests in a group of single tokens
    queries: int  # query tokens in a tile of one request


# Two cores of an AMD EPYC (Zen 3), 2026-11, float32, 9 query heads over 3 of 64. Milliseconds of processor time:
# - 30 layers decoding, chunks of 64 / 128: 13 / 20 (16 requests of 40 tokens), 57 / 55 (16 of 256), 5.6 / 5.7 (1)
# - 4 layers of a prompt of 2048 tokens, queries of 32 / 64 / 128: 955 / 800 / 800 (dense: 4029)
CPU = Tiling(chunk_tokens=64, rows=16, queries=64)

# Not measured. On a GPU each iteration is a dozen kernels and a wait for the host, so few and large ones.
GPU = Tiling(chunk_tokens=512, rows=64, queries=256)


def tiling() -> Tiling:
    """The sizes for what this process lowers for."""
    return CPU if platform() == "cpu" else GPU


@dataclass(frozen=True)
class DecodeTuning:
    """How the Mosaic decode kernel uses a multiprocessor."""

    streams: int  # pairs of warpgroups, one loading and one computing
    tile: int  # keys of one step
    stages: int  # tiles in a stream's ring
    min_tiles: int  # least share of a worker
    num_programs: int = MULTIPROCESSORS


@dataclass(frozen=True)
class PrefillTuning:
    """How a program of the Mosaic prefill kernel is built."""

    warpgroups: int  # that compute, 64 rows each
    kv_tile: int  # keys of one step
    stages: int  # tiles in the ring


# By head_dim; H200, 2026-11, bfloat16, 32 query heads over 8.
DECODE = {
    64: DecodeTuning(streams=2, tile=64, stages=4, min_tiles=1),
    128: DecodeTuning(2, 64, 2, 1),
    256: DecodeTuning(1, 64, 2, 1),
}
PREFILL = {
    64: PrefillTuning(warpgroups=2, kv_tile=128, stages=2),
    128: PrefillTuning(2, 128, 2),
    256: PrefillTuning(2, 64, 1),
}
