"""A look into a running engine: plain, picklable data for those who watch it. Taken between two steps."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class RequestView:
    """One unfinished request, its completions together."""

    request_id: str
    status: Literal["waiting", "running", "swapped"]
    num_prompt_tokens: int
    num_output_tokens: int
    max_tokens: int
    num_blocks: int
    num_cached_tokens: int
    num_preemptions: int


@dataclass(frozen=True)
class EngineView:
    """Requests, blocks and memory at one moment.

    `num_block_refs[i]` is how many requests hold block i (block 0 is the null block); `cached_block_ids` hold prefixes
    that can be found again, whether a request holds them or not. `ledger` names bytes of device memory.
    """

    requests: tuple[RequestView, ...]
    num_block_refs: tuple[int, ...]
    cached_block_ids: tuple[int, ...]
    ledger: tuple[tuple[str, int], ...]
