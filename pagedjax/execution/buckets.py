"""The table of every shape the device ever sees.

Padding to a bucket bounds the number of executables, and knowing them all in advance is what lets the
engine compile before it says it is ready. Knows nothing of requests.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

ROW_WRITER_BUCKETS = (1, 8, 64)
SAMPLE_BUCKETS = {"cpu": (1, 16), "gpu": (8, 64)}  # and max_num_seqs
# Sizes below a limit, which is always a bucket too; above the last they double. A CPU compiles slowly; up to 16 rows it
# takes little longer than to read the weights, above its time follows the rows, padding included. On a GPU that is so
# from 256 tokens on.
DECODE_SIZES = {
    "cpu": (1, 4, 16, 24, 32, 48, 64, 128, 256, 512),
    "gpu": (8, 16, 32, 64, 128, 256, 320, 384, 448, 512),
}
# Rows of a decode step that a platform has at least, even where fewer requests may run: on a GPU, XLA makes a reduction
# of a product of one row, which takes up to half again as long as the product of eight.
MIN_DECODE_ROWS = {"cpu": 1, "gpu": 8}
TOKEN_SIZES = {"cpu": (16, 64, 256, 1024, 4096, 16384), "gpu": (64, 128, 256, 512, 768, 1024, 1536, 2048, 3072, 4096)}
VERIFY_SIZES = {"cpu": (1, 4, 16, 64, 256), "gpu": (1, 8, 32, 128)}  # of rows, each with all drafts there can be
IS_FUSED = {"cpu": False, "gpu": True}  # one call a decode step saves a GPU a gap; apart, a CPU compiles half as much
SCORE_ROWS = 64  # hidden rows scored at once for prompt_logprobs


@dataclass(frozen=True)
class StepShape:
    """Padded sizes of one step: B request rows, T tokens, and the block table entries that may change."""

    num_rows: int
    num_tokens: int
    block_size: int
    is_decode: bool  # one query token a row, taken from the device's own last tokens
    is_verify: bool = False  # a few query tokens a row, each of which attends as if it were a row of its own

    @property
    def num_updates(self) -> int:
        """Most new blocks: a row that grows by n tokens gets at most n // block_size + 1, and one copy of another."""
        return self.num_rows if self.is_decode else 2 * self.num_rows + self.num_tokens // self.block_size

    @property
    def packed_size(self) -> int:
        """Length of the int32 array of changes: rows, query lengths, three per update, token ids unless decoding."""
        return 2 * self.num_rows + 3 * self.num_updates + (0 if self.is_decode else self.num_tokens)


def sizes_up_to(limit: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The sizes below the limit, those that follow by doubling the last, and the limit."""
    below = [size for size in sizes if size < limit]
    while sizes[-1] < limit and below[-1] * 2 < limit:
        below.append(below[-1] * 2)
    return (*below, limit)


def bucket_for(size: int, buckets: tuple[int, ...]) -> int:
    """The smallest bucket that holds `size`."""
    for bucket in buckets:
        if size <= bucket:
            return bucket
    raise AssertionError(f"nothing may schedule {size}, above the largest bucket {buckets[-1]}")


def in_parts[T](items: Sequence[T], buckets: tuple[int, ...]) -> Iterator[tuple[Sequence[T], int]]:
    """Cut items into parts that fit the largest bucket; yield each with its own."""
    for start in range(0, len(items), buckets[-1]):
        part = items[start : start + buckets[-1]]
        yield part, bucket_for(len(part), buckets)


@dataclass(frozen=True)
class BucketTable:
    """All step shapes of one engine.

    Attributes:
      decode: row buckets of the decode step.
      is_fused: whether a plain decode step samples in the same call.
      tokens: token buckets of the forward step.
      sample: row buckets of the sampling step.
      max_draft_tokens: most drafts that a row verifies in one step; 0 without speculation.
      verify: row buckets of a step of drafts and nothing else.
    """

    decode: tuple[int, ...]
    tokens: tuple[int, ...]
    sample: tuple[int, ...]
    is_fused: bool
    max_num_seqs: int
    block_size: int
    max_draft_tokens: int = 0
    verify: tuple[int, ...] = ()

    @classmethod
    def build(
        cls, *, max_num_seqs: int, max_num_batched_tokens: int, block_size: int, platform: str,
        max_draft_tokens: int = 0,
    ) -> "BucketTable":  # fmt: skip
        """Choose the buckets for a "cpu" or a "gpu"."""
        return cls(
            decode=sizes_up_to(max(max_num_seqs, MIN_DECODE_ROWS[platform]), DECODE_SIZES[platform]),
            tokens=sizes_up_to(max_num_batched_tokens, TOKEN_SIZES[platform]),
            sample=(*(b for b in SAMPLE_BUCKETS[platform] if b < max_num_seqs), max_num_seqs),
            is_fused=IS_FUSED[platform],
            max_num_seqs=max_num_seqs,
            block_size=block_size,
            max_draft_tokens=max_draft_tokens,
            verify=sizes_up_to(max_num_seqs, VERIFY_SIZES[platform]) if max_draft_tokens else (),
        )

    def decode_shape(self, num_rows: int) -> StepShape:
        bucket = bucket_for(num_rows, self.decode)
        return StepShape(bucket, bucket, self.block_size, is_decode=True)

    def forward_shape(self, num_tokens: int) -> StepShape:
        """Rows follow from tokens: no step has more rows than tokens or than `max_num_seqs`."""
        bucket = bucket_for(num_tokens, self.tokens)
        return StepShape(min(bucket, self.max_num_seqs), bucket, self.block_size, is_decode=False)

    def verify_shape(self, num_rows: int, num_tokens: int) -> StepShape:
        """The shape with the fewest tokens for a step in which every row computes its newest token and drafts."""
        fitting = [shape for shape in self.verify_shapes if shape.num_rows >= num_rows]
        return min([*fitting[:1], self.forward_shape(num_tokens)], key=lambda shape: shape.num_tokens)

    @property
    def verify_shapes(self) -> list[StepShape]:
        """Every shape for drafts and nothing else; the largest batches go with the other forward steps."""
        width = 1 + self.max_draft_tokens
        shapes = [StepShape(n, n * width, self.block_size, is_decode=False, is_verify=True) for n in self.verify]
        return [shape for shape in shapes if shape.num_tokens <= self.tokens[-1]]

    @property
    def decode_shapes(self) -> list[StepShape]:
        """Every shape of a decode step."""
        return [self.decode_shape(bucket) for bucket in self.decode]

    @property
    def forward_shapes(self) -> list[StepShape]:
        """Every shape of `forward`; decode steps are among them where they are not fused with sampling."""
        shapes = [*(self.forward_shape(bucket) for bucket in self.tokens), *self.verify_shapes]
        return shapes if self.is_fused else [*shapes, *self.decode_shapes]
