"""How the op is cut into tiles, and for which shapes the kernel is the faster; measured on an H200."""

from dataclasses import dataclass

from pallas_kernels.hopper import MULTIPROCESSORS

ROWS, COLUMNS, DEPTH, STAGES = 128, 128, 64, 4  # of a tile; columns of each half; STAGES fill the shared memory
TILES_WIDE = 8  # rows of tiles that are taken together, so that what they read stays in the L2 cache
MIN_ROWS_OF_PAIRS = 2048  # from here on, two programs that share columns read them once
MIN_ROWS, FEW_ROWS = 129, 256
MIN_BUSY, MIN_BUSY_OF_FEW_ROWS = 0.9, 0.8  # share of the programs of all waves that must have a tile


@dataclass(frozen=True)
class Cut:
    """How many programs work, and how many of them are a cluster that shares columns."""

    num_programs: int
    cluster: int = 1


def cut_for(num_rows: int, num_columns: int) -> Cut:
    """Return how a product of so many rows and columns of each half is shared out."""
    if num_rows >= MIN_ROWS_OF_PAIRS:
        return Cut(MULTIPROCESSORS, cluster=2)
    return Cut(min(MULTIPROCESSORS, _num_tiles(num_rows, num_columns)))


def is_faster(num_rows: int, num_columns: int) -> bool:
    """Whether the kernel is faster than XLA for so many rows of x and columns of each half."""
    num_tiles = _num_tiles(num_rows, num_columns)
    num_waves = -(-num_tiles // MULTIPROCESSORS)
    busy = num_tiles / (num_waves * MULTIPROCESSORS)
    return num_rows >= MIN_ROWS and busy >= (MIN_BUSY_OF_FEW_ROWS if num_rows <= FEW_ROWS else MIN_BUSY)


def _num_tiles(num_rows: int, num_columns: int) -> int:
    return -(-num_rows // ROWS) * -(-num_columns // COLUMNS)
