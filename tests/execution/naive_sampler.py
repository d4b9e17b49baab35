"""What the sampler should do, in float64 numpy and one row at a time, and the rows that its tests are made of."""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pagedjax.execution.gumbel import gumbel_noise, seed_words
from pagedjax.execution.sampler import Variant, sample
from pagedjax.execution.sampling_rows import SamplingRows

NUM_ROWS = 32
MAX_BIASES, MAX_STOP_IDS, MAX_BAD_WORDS, MAX_WORD_TOKENS = 4, 3, 2, 4

_sample = partial(jax.jit, static_argnames="variant")(sample)
_noise = jax.jit(gumbel_noise)


@dataclass
class Row:
    """One request's parameters and what it generated so far."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    position: int = 7
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    prompt: list[int] = field(default_factory=list)
    output: list[int] = field(default_factory=list)
    allowed: list[int] | None = None
    bias: dict[int, float] = field(default_factory=dict)
    stop_ids: list[int] = field(default_factory=list)
    min_position: int = 0
    bad_words: list[list[int]] = field(default_factory=list)


def draw(logits: np.ndarray, rows: list[Row], **options: Any) -> np.ndarray:
    """Sample with the code under test; every row must be valid."""
    token_ids, is_valid = sample_rows(logits, rows, **options)
    assert is_valid.all()
    return token_ids


def sample_rows(
    logits: np.ndarray, rows: list[Row], *, variant: Variant = "full", edits: bool = True, fill: bool = True
) -> tuple[np.ndarray, np.ndarray]:
    """Sample with the code under test, jitted; `fill` repeats rows up to NUM_ROWS, so that tests share executables."""
    num_rows = len(rows)
    if fill and num_rows < NUM_ROWS:
        logits, rows = np.resize(logits, (NUM_ROWS, logits.shape[1])), (rows * NUM_ROWS)[:NUM_ROWS]
    positions = jnp.array([row.position for row in rows], jnp.int32)
    packed = pack(rows, logits.shape[1], edits=edits)
    token_ids, is_valid = _sample(jnp.asarray(logits, jnp.float32), positions, packed, variant=variant)
    return np.asarray(token_ids)[:num_rows], np.asarray(is_valid)[:num_rows]


def pack(rows: list[Row], vocab_size: int, *, edits: bool = True) -> SamplingRows:
    """Turn rows into the arrays that the sampler takes."""

    def column(name: str, dtype: Any = np.float32) -> jax.Array:
        return jnp.array([getattr(row, name) for row in rows], dtype)

    floats = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
    fields: dict[str, Any] = {name: column(name) for name in floats}
    fields |= {name: column(name, np.int32) for name in ("top_k", "min_position")}
    fields["seeds"] = jnp.array([seed_words(row.seed) for row in rows], jnp.uint32)
    if edits:
        packed = [_pack_edits(row, vocab_size) for row in rows]
        fields |= {name: jnp.asarray(np.stack([one[name] for one in packed])) for name in packed[0]}
    return SamplingRows(**fields)


def _pack_edits(row: Row, vocab_size: int) -> dict[str, np.ndarray]:
    allowed = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    allowed[row.allowed if row.allowed is not None else slice(None)] = 1
    bad_words = np.full((MAX_BAD_WORDS, MAX_WORD_TOKENS), -1, np.int32)
    for target, word in zip(bad_words, row.bad_words, strict=False):
        target[-len(word) :] = word
    recent = [-1] * MAX_WORD_TOKENS + row.output
    return {
        "output_counts": np.bincount(np.array(row.output, np.int64), minlength=vocab_size).astype(np.int16),
        "prompt_mask": np.isin(np.arange(vocab_size), row.prompt),
        "allowed_mask": np.packbits(allowed, bitorder="little").view(np.uint32),
        "bias_ids": _fill(list(row.bias), MAX_BIASES, vocab_size),
        "bias_values": np.array([*row.bias.values(), *[0.0] * (MAX_BIASES - len(row.bias))], np.float32),
        "stop_ids": _fill(row.stop_ids, MAX_STOP_IDS, vocab_size),
        "bad_words": bad_words,
        "recent_token_ids": np.array(recent[-MAX_WORD_TOKENS:], np.int32),
    }


def _fill(values: list[int], length: int, pad: int) -> np.ndarray:
    return np.array([*values, *[pad] * (length - len(values))], np.int32)


def edited(logits: np.ndarray, row: Row) -> np.ndarray:
    """Bans, biases and penalties of one row."""
    logits = logits.astype(np.float64)
    if row.allowed is not None:
        logits[np.setdiff1d(np.arange(len(logits)), row.allowed)] = -np.inf
    for *prefix, last in row.bad_words:
        if row.output[len(row.output) - len(prefix) :] == prefix:
            logits[last] = -np.inf
    if row.position < row.min_position:
        logits[row.stop_ids] = -np.inf
    for token_id, value in row.bias.items():
        logits[token_id] += value
    for token_id in set(row.prompt) | set(row.output):
        over = logits[token_id] > 0
        logits[token_id] *= 1 / row.repetition_penalty if over else row.repetition_penalty
    for token_id in set(row.output):
        logits[token_id] -= row.frequency_penalty * row.output.count(token_id) + row.presence_penalty
    return logits


def probabilities(logits: np.ndarray, row: Row, *, slack: float = 0.0) -> np.ndarray:
    """The exact distribution that a row with temperature above 0 is drawn from; `slack` is added to top_p."""
    logits = edited(logits, row) / max(row.temperature, 0.01)
    weights = np.exp(logits - logits.max())
    order = np.argsort(-logits, kind="stable")
    weights[weights < row.min_p] = 0.0
    if row.top_k > 0:
        weights[order[row.top_k :]] = 0.0
    if row.top_p < 1:
        before = np.cumsum(weights[order]) - weights[order]
        weights[order[before >= max((row.top_p + slack) * weights.sum(), 1e-30)]] = 0.0
    return weights / weights.sum()


def expected_tokens(logits: np.ndarray, row: Row) -> set[int]:
    """The token of a row: more than one only where top_p lies within 2e-6 of what a set of tokens adds up to."""
    if row.temperature == 0:
        return {int(np.argmax(edited(logits, row)))}
    ids = jnp.arange(len(logits), dtype=jnp.int32)[None]
    seeds = jnp.array([seed_words(row.seed)], jnp.uint32)
    noise = np.asarray(_noise(seeds, jnp.array([row.position], jnp.int32), ids))[0]
    tokens = set()
    for slack in (-2e-6, 0.0, 2e-6):
        with np.errstate(divide="ignore"):
            tokens.add(int(np.argmax(np.log(probabilities(logits, row, slack=slack)) + noise)))
    return tokens
