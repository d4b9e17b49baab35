"""The KV cache pool and the ledger that says where the memory goes.

The pool has one shape for the life of the engine: per layer `k, v: [num_blocks, num_kv_heads, block_size, head_dim]`,
block 0 being the null block. How many blocks there are is computed here, before anything runs. Knows nothing of
requests.
"""

import os
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pagedjax.config import AUTO, CPU_KV_CACHE_BYTES, EngineConfig
from pagedjax.device import MEMORY_SHARE_VARIABLES
from pagedjax.errors import ConfigError
from pagedjax.models.batch import KVCache
from pagedjax.models.config import ModelConfig

GIB = 1 << 30
DEFAULT_MEM_FRACTION = "0.75"  # what JAX reserves when nobody says otherwise
MARGIN_BYTES = 1 << 30  # left to the runtime on a GPU: fragments, step results, small arrays
LOW_CONCURRENCY, SHORT_MODEL_LEN = 4, 2048  # fewer requests than this, each longer than that: a hint at start
SAMPLER_ROWS = 16  # float32 copies of a row's logits that the full sampler may hold
COARSE_BLOCKS = 64  # num_blocks is a multiple, so that small changes of free memory keep hitting the compile cache


def block_bytes(model: ModelConfig, *, block_size: int, dtype: jnp.dtype) -> int:
    """Bytes of one block over all layers, K and V."""
    values = model.num_layers * 2 * model.num_kv_heads * block_size * model.head_dim
    return values * jnp.dtype(dtype).itemsize


def shapes(model: ModelConfig, *, num_blocks: int, block_size: int, dtype: DTypeLike) -> list[tuple[Any, Any]]:
    """The pool as shapes."""
    pool = jax.ShapeDtypeStruct((num_blocks, model.num_kv_heads, block_size, model.head_dim), dtype)
    return [(pool, pool)] * model.num_layers


def allocate(model: ModelConfig, *, num_blocks: int, block_size: int, dtype: jnp.dtype) -> KVCache:
    """A pool of zeros."""
    shape = (num_blocks, model.num_kv_heads, block_size, model.head_dim)
    return [(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in range(model.num_layers)]


@dataclass(frozen=True)
class Ledger:
    """Where device memory goes, in bytes."""

    budget: int  # what the engine may use in all
    weights: int
    request_state: int
    temporaries: int  # the largest step's and the largest sampler's
    margin: int
    foreign: int  # live arrays that are not ours
    block: int  # bytes of one block
    num_blocks: int
    block_size: int
    max_model_len: int
    device: str
    swap_staging: int = 0
    max_num_seqs: int = LOW_CONCURRENCY
    draft_weights: int = 0  # of a draft model, which has a block beside each of the target's
    draft_block: int = 0  # bytes of one of those

    @property
    def num_tokens(self) -> int:
        return (self.num_blocks - 1) * self.block_size

    @property
    def max_concurrency(self) -> float:
        """Requests of max_model_len tokens that fit at once."""
        return (self.num_blocks - 1) / -(-self.max_model_len // self.block_size)

    def rows(self) -> list[tuple[str, int]]:
        """What takes how many bytes; the first row is the whole."""
        return [
            ("memory the engine may use", self.budget),
            ("weights", self.weights),
            *([("weights of the draft model", self.draft_weights)] if self.draft_weights else []),
            ("request state", self.request_state),
            ("temporaries of the largest step and sampler", self.temporaries),
            *([("staging for swapped blocks", self.swap_staging)] if self.swap_staging else []),
            ("margin", self.margin),
            ("other arrays in this process", self.foreign),
            (f"KV cache, {self.num_blocks} blocks of {self.block} bytes", self.num_blocks * self.block),
            *([(f"KV cache of the draft model, {self.draft_block} bytes a block", self.num_blocks * self.draft_block)]
              if self.draft_block else []),
        ]  # fmt: skip

    def lines(self) -> list[str]:
        """The table printed at start, with the two lines operators look for."""
        lines = [
            *self.table(),
            f"{self.device.upper()} KV cache size: {self.num_tokens:,} tokens",
            f"Maximum concurrency for {self.max_model_len:,} tokens per request: {self.max_concurrency:.2f}x",
        ]
        if self.max_concurrency < min(LOW_CONCURRENCY, self.max_num_seqs) and self.max_model_len > SHORT_MODEL_LEN:
            lines.append(
                f"Hint: {self.max_concurrency:.1f} requests of max_model_len fit at once. Where requests are shorter, "
                "set --max-model-len to the 99th percentile of their lengths plus a fifth: longer ones are then "
                "refused, in place of holding up all others"
            )
        return lines

    def table(self) -> list[str]:
        """The rows as lines of text."""
        rows = [f"  {name:<48} {size / GIB:9.3f} GiB" for name, size in self.rows()]
        return [f"Memory on {self.device}:", *rows]


def plan(
    config: EngineConfig, model: ModelConfig, *, dtype: jnp.dtype, max_model_len: int,
    weights: int, request_state: int, temporaries: int, swap_staging: int = 0, draft_weights: int = 0,
    draft_block: int = 0,
) -> Ledger:  # fmt: skip
    """Decide num_blocks, and max_model_len where it is AUTO.

    Raises:
      ConfigError: not even one request of max_model_len fits; the message has the ledger and says what would.
    """
    device = jax.local_devices()[0]
    one_block = block_bytes(model, block_size=config.block_size, dtype=dtype)
    budget, foreign, margin = _budget(config, device, weights + draft_weights + request_state)
    room = budget - weights - draft_weights - request_state - temporaries - swap_staging - margin - foreign
    if config.kv_cache_memory_bytes is not None or device.platform == "cpu":
        room = config.kv_cache_memory_bytes or CPU_KV_CACHE_BYTES
        budget = weights + draft_weights + request_state + temporaries + swap_staging + room
        margin = foreign = 0
    num_blocks = config.num_gpu_blocks_override or _coarse(max(room, 0) // (one_block + draft_block))
    if max_model_len == AUTO:
        num_tokens = (num_blocks - 1) // config.auto_concurrency * config.block_size
        max_model_len = min(max(num_tokens, config.block_size), model.max_position_embeddings)
    blocks_per_request = -(-max_model_len // config.block_size)
    is_stated = bool(config.num_gpu_blocks_override or config.kv_cache_memory_bytes)
    if not (is_stated and config.enable_prefix_caching):  # what was asked for may be for prefixes
        num_blocks = min(num_blocks, config.max_num_seqs * blocks_per_request + 1)  # requests use no more
    ledger = Ledger(
        budget=budget, weights=weights, draft_weights=draft_weights, request_state=request_state,
        temporaries=temporaries, margin=margin, foreign=foreign, block=one_block, draft_block=draft_block,
        num_blocks=num_blocks, block_size=config.block_size, max_model_len=max_model_len,
        device=device.platform, swap_staging=swap_staging, max_num_seqs=config.max_num_seqs,
    )  # fmt: skip
    if ledger.max_concurrency < 1:
        raise ConfigError(_too_small(config, model, ledger, room))
    return ledger


def not_allocated(ledger: Ledger, reason: str) -> str:
    """Say that the device refuses the pool that the ledger has room for: something else takes memory meanwhile."""
    size = ledger.num_blocks * (ledger.block + ledger.draft_block)
    return (
        f"the device refuses a KV cache of {size / GIB:.2f} GiB: {reason.splitlines()[0]}; "
        "lower --gpu-memory-utilization or --kv-cache-memory-bytes, or stop what else uses the device\n"
        + "\n".join(ledger.table())
    )


def estimate_temporaries(config: EngineConfig, model: ModelConfig, dtype: jnp.dtype) -> int:
    """Guess the temporaries, before compilation measures them: one chunk's activations, the full sampler's logits."""
    tokens = config.max_num_batched_tokens or 0
    activations = tokens * (3 * model.intermediate_size + 6 * model.hidden_size) * jnp.dtype(dtype).itemsize
    logits = SAMPLER_ROWS * config.max_num_seqs * model.vocab_size * 4
    return activations + logits


def _coarse(num_blocks: int) -> int:
    return num_blocks // COARSE_BLOCKS * COARSE_BLOCKS if num_blocks > 4 * COARSE_BLOCKS else num_blocks


def _budget(config: EngineConfig, device: Any, ours: int) -> tuple[int, int, int]:
    """(bytes the engine may use, bytes of foreign arrays, margin).

    JAX reserves a fraction of the device when it starts; the command line sets that fraction to the utilisation, and
    inside a running JAX the engine can have no more than what was reserved.
    """
    stats = device.memory_stats() if device.platform != "cpu" else None
    if not stats:
        return 0, 0, 0
    limit = stats["bytes_limit"]
    reserved = [os.environ[name] for name in MEMORY_SHARE_VARIABLES if name in os.environ]
    total = limit / float([*reserved, DEFAULT_MEM_FRACTION][0])
    foreign = max(0, stats["bytes_in_use"] - ours)
    return min(limit, int(total * config.gpu_memory_utilization)), foreign, MARGIN_BYTES


def _too_small(config: EngineConfig, model: ModelConfig, ledger: Ledger, room: int) -> str:
    """Say what is missing, what would fit, and where the memory is."""
    fits = max(0, (ledger.num_blocks - 1) * config.block_size)
    num_needed = -(-ledger.max_model_len // config.block_size) + 1  # with the null block
    needed = num_needed * (ledger.block + ledger.draft_block)
    amounts = f"{needed / GIB:.2f} GiB of KV cache, there is room for {max(room, 0) / GIB:.2f} GiB"
    remedies = [f"set --max-model-len to {fits} or less"] if fits else []
    if config.num_gpu_blocks_override:
        amounts = f"{num_needed} blocks of KV cache, there is room for {config.num_gpu_blocks_override} blocks"
        remedies.insert(0, f"raise --num-gpu-blocks-override to {num_needed}")
    elif config.kv_cache_memory_bytes or ledger.device == "cpu":
        remedies.insert(0, f"raise --kv-cache-memory-bytes to {needed}")
    else:
        bytes_per_seq = ledger.request_state // config.max_num_seqs + SAMPLER_ROWS * model.vocab_size * 4
        max_num_seqs = config.max_num_seqs - -(-(needed - room) // bytes_per_seq)
        remedies += [f"set --max-num-seqs to about {max_num_seqs} or less"] if max_num_seqs > 0 else []
        remedies.append("raise --gpu-memory-utilization, lower --max-num-batched-tokens, or use a smaller dtype")
    if ledger.draft_weights:
        remedies.append("use a smaller draft model or none (--speculative-config)")
    message = f"one request of max_model_len {ledger.max_model_len} needs {amounts} ({fits} tokens)"
    return "\n".join([f"{message}; {', or '.join(remedies)}", *ledger.table()])
