"""How the product is cut into tiles, and for which shapes the kernel is the faster; measured on an H200."""

from dataclasses import dataclass

from pallas_kernels.hopper import MULTIPROCESSORS

SMEM = 225 * 1024  # bytes of a program
MAX_STAGES = 8
# What one program takes whose tile has so many rows and columns, in microseconds for weights of 4096 rows. A tile of
# 64 x 64 is bound by what it reads, so it goes further in one step.
COSTS = {(64, 64): 12.5, (64, 128): 16.0, (64, 192): 21.0, (128, 64): 16.5, (128, 128): 25.0, (128, 192): 36.0}
DEPTHS = {(64, 64): 128}
DEPTH = 64  # of the others
COLUMNS = 64  # that divide the width
MIN_ROWS, MAX_ROWS = 64, 2048  # fewer are bound by reading alone, for more XLA's tiles are as good
MAX_WEIGHTS = 32 << 20  # values; XLA is as good for more of them, and for a large sum of few rows not quite
MAX_WEIGHTS_OF_FEW_ROWS, FEW_ROWS = 64 << 20, 128


@dataclass(frozen=True)
class Tile:
    """What one program computes: `rows` of x times `columns` of w, `depth` values of the sum a step."""

    rows: int
    columns: int
    depth: int
    stages: int  # steps in the ring


def tile_for(num_rows: int, depth: int, width: int) -> Tile:
    """Return the tile with which a product [num_rows, depth] x [depth, width] takes least: whole waves count."""

    def cost(size: tuple[int, int]) -> float:
        num_programs = -(-num_rows // size[0]) * (width // size[1])
        return -(-num_programs // MULTIPROCESSORS) * COSTS[size]

    rows, columns = min((size for size in COSTS if width % size[1] == 0), key=cost)
    step = DEPTHS.get((rows, columns), DEPTH)
    step = step if depth % step == 0 else DEPTH
    stages = (SMEM - 2 * rows * columns) // (2 * step * (rows + columns))
    return Tile(rows, columns, step, min(MAX_STAGES, stages))


def is_faster(num_rows: int, depth: int, width: int) -> bool:
    """Whether the kernel is faster than XLA."""
    most = MAX_WEIGHTS_OF_FEW_ROWS if num_rows <= FEW_ROWS else MAX_WEIGHTS
    return MIN_ROWS <= num_rows <= MAX_ROWS and depth * width <= most
