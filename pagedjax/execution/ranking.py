"""The order of tokens that everything here means by "first": larger logit first, equal logits by smaller token id.

Two-stage searches without sorting the vocabulary: the maxima of tiles say which few tiles can hold the first
tokens, and only those are looked at. Knows nothing of requests.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

TILE = 128


def first_token(logits: Float[Array, "B V"]) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
    """Return id and logit of the first token of each row; the id is in range whatever the logits hold."""
    tiles = _pad(logits, TILE).reshape(logits.shape[0], -1, TILE)
    tile = jnp.argmax(jnp.max(tiles, axis=2), axis=1).astype(jnp.int32)
    row = jnp.take_along_axis(tiles, tile[:, None, None], axis=1)[:, 0]  # [B, TILE]
    lane = jnp.argmax(row, axis=1).astype(jnp.int32)
    value = jnp.take_along_axis(row, lane[:, None], axis=1)[:, 0]
    return jnp.minimum(tile * TILE + lane, logits.shape[1] - 1), value


def first_tokens(logits: Float[Array, "B V"], num: int) -> tuple[Int[Array, "B n"], Float[Array, "B n"]]:
    """Return ids and logits of the first `num` (1 to 128) tokens of each row, in order; past V the ids are V and up.

    A tile that holds one of them has one of the first `num` maxima: otherwise each of those tiles holds an
    element before it. Equal maxima are taken from the left, so this covers ties.
    """
    assert 1 <= num <= TILE, f"num is {num}, first_tokens finds 1 to {TILE} tokens"
    logits = jnp.where(logits == 0, jnp.float32(0.0), logits)  # top_k puts -0.0 after 0.0
    logits = _pad(logits, TILE)
    ids = None
    for tile in (TILE, TILE // 8):
        if logits.shape[1] > 2 * num * tile:
            index, logits = _first_tiles(logits, num, tile)
            ids = index if ids is None else jnp.take_along_axis(ids, index, axis=1)
    index, logits = _top(logits, num)
    return index if ids is None else jnp.take_along_axis(ids, index, axis=1), logits


def all_token_ids(logits: Float[Array, "B V"]) -> Int[Array, "B V"]:
    """Return 0 to V - 1 in each row."""
    return jnp.broadcast_to(jnp.arange(logits.shape[1], dtype=jnp.int32), logits.shape)


def _first_tiles(logits: Float[Array, "B V"], num: int, tile: int) -> tuple[Int[Array, "B W"], Float[Array, "B W"]]:
    """Return columns and logits of the `num` tiles with the largest maxima, columns ascending."""
    tiles = logits.reshape(logits.shape[0], -1, tile)
    chosen, _ = _top(jnp.max(tiles, axis=2), num)
    chosen = jnp.sort(chosen, axis=1)  # [B, num]
    columns = chosen[:, :, None] * tile + jnp.arange(tile, dtype=jnp.int32)[None, None, :]
    kept = tiles[jnp.arange(logits.shape[0], dtype=jnp.int32)[:, None], chosen]  # [B, num, tile]
    return columns.reshape(logits.shape[0], -1), kept.reshape(logits.shape[0], -1)


def _top(logits: Float[Array, "B V"], num: int) -> tuple[Int[Array, "B n"], Float[Array, "B n"]]:
    values, index = lax.top_k(logits, num)
    return index.astype(jnp.int32), values


def _pad(logits: Float[Array, "B V"], multiple: int) -> Float[Array, "B W"]:
    """Lengthen the rows to a multiple with -inf."""
    return jnp.pad(logits, ((0, 0), (0, -logits.shape[1] % multiple)), constant_values=-jnp.inf)
