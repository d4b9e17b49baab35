"""The verifying step on made-up logits: what is accepted, recorded and rolled back, by every variant and rule."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pagedjax.execution.request_state import empty_rows, neutral_sampler_rows
from pagedjax.execution.step import StepFunctions
from pagedjax.speculation.verification import Verification, force
from tests.fakes import FakeModel

pytestmark = pytest.mark.usefixtures("compiled_quickly")

K = 2
VOCAB_SIZE = 40  # two words of masks, the second with padding

FUNCTIONS = StepFunctions(FakeModel(), block_size=8, num_blocks=9, max_num_seqs=4, max_logprobs=2)


@cache
def verifier(variant):
    """Compiled once for each shape."""
    verification = Verification(FUNCTIONS, max_draft_tokens=K, max_logprobs=2)
    return jax.jit(lambda *args: verification.verify(*args, variant=variant))


def run(logits, drafts, num_drafts, *, variant, temperature=0.0, top_k=0, chances=None, context_len=10, seeds=None):
    """Verify one step of B rows; `logits` are [B, 1 + K, V], `context_len` is that of all before it."""
    num_rows = len(logits)
    state = empty_rows(num_rows, 8, max_draft_tokens=K)
    ints = np.zeros((num_rows, 4), np.int32)
    ints[:, 0] = top_k
    ints[:, 1] = np.arange(num_rows) if seeds is None else seeds
    state = replace(
        state,
        context_lens=jnp.asarray(context_len + 1 + np.asarray(num_drafts), jnp.int32),
        drafts=jnp.asarray(drafts, jnp.int32),
        floats=state.floats.at[:, 0].set(temperature).at[:, 1].set(1.0).at[:, 3].set(1.0),
        ints=jnp.asarray(ints),
    )
    wide = neutral_sampler_rows(num_rows, VOCAB_SIZE) if variant in ("edited", "standard") else None
    masks = None
    if wide is not None:
        masks = jnp.full((num_rows, K, -(-VOCAB_SIZE // 32)), 0xFFFFFFFF, jnp.uint32)
    batch = jnp.asarray(np.stack([np.arange(num_rows), num_drafts, np.zeros(num_rows)]), jnp.int32)
    hidden = jnp.asarray(logits, jnp.float32).reshape(-1, VOCAB_SIZE)
    history = jnp.full((num_rows, 32), -7, jnp.int32)
    return verifier(variant)(FUNCTIONS.leaves, state, history, wide, masks, chances, hidden, batch)


def peaks(token_ids):
    """Logits whose largest is at each of `token_ids` [B, 1 + K]."""
    return np.eye(VOCAB_SIZE, dtype=np.float32)[np.asarray(token_ids)]


@pytest.mark.parametrize("variant", ["plain", "edited", "standard"])
def test_the_longest_run_of_right_drafts_is_accepted_and_rows_go_on_behind_it(variant):
    logits = peaks([[5, 6, 7], [5, 6, 7], [5, 6, 7], [5, 6, 7]])
    drafts, num_drafts = [[5, 6], [5, 9], [9, 6], [5, 6]], [2, 2, 2, 0]
    state, history, wide, result = run(logits, drafts, num_drafts, variant=variant)
    assert result[:, -2].tolist() == [3, 2, 1, 1]
    assert result[:, -1].tolist() == [1, 1, 1, 1]
    for row, count in enumerate([3, 2, 1, 1]):
        assert result[row, :count].tolist() == [5, 6, 7][:count]
        assert history[row, 10].item() == -7
        assert history[row, 11 : 11 + count].tolist() == [5, 6, 7][:count]
        if wide is not None:
            assert {i: int(n) for i, n in enumerate(wide.output_counts[row]) if n} == dict.fromkeys(
                [5, 6, 7][:count], 1
            )
    assert result[:, 1 + K : 1 + 2 * K].tolist() == drafts
    assert state.last_token_ids.tolist() == [7, 6, 5, 5]
    assert state.context_lens.tolist() == [13, 12, 11, 11]


@pytest.mark.parametrize("variant", ["plain", "edited"])
def test_a_row_whose_logits_fail_behind_a_right_draft_keeps_what_came_before(variant):
    logits = peaks([[5, 6, 7]] * 4)
    logits[:2, 1] = np.nan
    _, _, _, result = run(logits, [[5, 6], [9, 6]] * 2, [2] * 4, variant=variant)
    assert result[:, -2:].tolist() == [[1, 0], [1, 1], [3, 1], [1, 1]]  # the second never got there


def test_variants_agree_on_filtered_rows():
    logits = np.random.default_rng(0).normal(size=(4, 1 + K, VOCAB_SIZE)).astype(np.float32) * 3
    drafts, num_drafts = np.zeros((4, K), np.int32), [2, 2, 1, 0]
    *_, sampled = run(logits, drafts, num_drafts, variant="filtered", temperature=0.8, top_k=5)
    drafts[:, :] = sampled[:, :K]
    results = [
        run(logits, drafts, num_drafts, variant=variant, temperature=0.8, top_k=5)[3].tolist()
        for variant in ("filtered", "edited")
    ]
    assert results[0] == results[1]
    assert [row[-2] for row in results[0]] == [3, 3, 2, 1]


@pytest.mark.parametrize("chance_of_draft", [None, 0.25])
def test_the_standard_rule_keeps_the_distribution_in_a_step(chance_of_draft):
    """8,000 rows, a draft that is likely or not and was looked up or drawn; chi-square of the first token."""
    num_rows, p = 8_000, np.array([0.5, 0.3, 0.15, 0.05])
    logits = np.full((1, 1 + K, VOCAB_SIZE), -np.inf, np.float32)
    logits[:, :, :4] = np.log(p)
    logits = np.broadcast_to(logits, (num_rows, 1 + K, VOCAB_SIZE))
    random = np.random.default_rng(1)
    drafts, chances = np.full((num_rows, K), 2), None
    if chance_of_draft is not None:
        q = np.full(4, 0.25)
        drafts = random.choice(4, (num_rows, K), p=q)
        chances = np.zeros((num_rows, K, VOCAB_SIZE), np.float32)
        chances[:, :, :4] = q
        chances = jnp.asarray(chances)
    *_, result = run(
        logits, drafts, [K] * num_rows, variant="standard", temperature=1.0, chances=chances,
        seeds=random.integers(0, 2**31, num_rows),
    )  # fmt: skip
    accepted = np.asarray(result[:, -2]) - 1
    assert 0 < accepted.mean() < K
    counts = np.bincount(np.asarray(result[:, 0]), minlength=4)[:4]
    chi_square = ((counts - num_rows * p) ** 2 / (num_rows * p)).sum()
    assert chi_square < 16.27  # 3 degrees of freedom, p = 0.001


def test_forced_acceptance_is_a_chance_of_each_draft():
    seeds = jnp.stack([jnp.arange(4000, dtype=jnp.uint32), jnp.zeros(4000, jnp.uint32)], axis=1)
    tokens, drafts = jnp.full(4000, 3, jnp.int32), jnp.full(4000, 3, jnp.int32).at[::2].set(8)
    positions = jnp.full(4000, 17, jnp.int32)
    shares = [float(jnp.mean(force(tokens, drafts, seeds, positions, rate) == drafts)) for rate in (0.0, 0.8, 1.0)]
    assert shares[0] == 0.0
    assert shares[1] == pytest.approx(0.8, abs=0.02)
    assert shares[2] == 1.0
    assert force(tokens, jnp.full(4000, -1, jnp.int32), seeds, positions, 1.0).tolist() == tokens.tolist()
