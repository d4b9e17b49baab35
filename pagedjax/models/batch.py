"""The forward contract: what every model receives besides tokens, and the KV cache it writes.

Built inside the jitted step from the device-resident rows (`execution.step`); models only read it.
"""

from dataclasses import dataclass

import jax
from jaxtyping import Array, Float, Int

KVCache = list[tuple[Float[Array, "P K S H"], Float[Array, "P K S H"]]]  # one (k, v) pool a layer


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AttentionBatch:
    """A ragged batch of B requests with T tokens in all.

    Request b owns the tokens [query_start_loc[b], query_start_loc[b + 1]). A padding token has
    slot_mapping == num_slots (one past the end: its write is dropped).
    """

    positions: Int[Array, " T"]
    slot_mapping: Int[Array, " T"]  # block_id * block_size + offset
    block_tables: Int[Array, "B M"]  # unallocated entries are 0, the null block
    query_start_loc: Int[Array, " B+1"]
    seq_lens: Int[Array, " B"]  # this step's tokens included; 0 for a padding request
