"""The embedded SmolLM2-135M-Instruct: last logits of every short prompt against transformers (make_smollm2.py)."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from pagedjax.config import EngineConfig
from pagedjax.loading import load_model
from tests.models.paged_forward import NUM_ROWS, PagedForward

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("compiled_quickly")]

GOLDEN = json.loads((Path(__file__).parents[1] / "oracles" / "golden" / "smollm2.json").read_text())["prompts"]
MAX_TOKENS = 48  # of a step
NAMES = [name for name, prompt in GOLDEN.items() if len(prompt["token_ids"]) <= MAX_TOKENS]
RELATIVE_ERROR = 2e-4


@pytest.fixture(scope="module")
def last_logits():
    """By name of the prompt, as many prompts in a step as there is room for."""
    forward = PagedForward(load_model(EngineConfig(model="demo", dtype="float32")).model, jnp.float32)
    found, batches = {}, [{}]
    for name in NAMES:
        token_ids, batch = GOLDEN[name]["token_ids"], batches[-1]
        if len(batch) == NUM_ROWS or sum(map(len, batch.values())) + len(token_ids) > MAX_TOKENS:
            batches.append(batch := {})
        batch[name] = token_ids
    for batch in batches:
        found |= {name: logits[-1].astype(np.float64) for name, logits in forward(batch).items()}
        for name in batch:
            forward.free += forward.tables.pop(name)  # so that the pool serves every prompt
    return found


def test_there_are_enough_prompts():
    assert len(NAMES) >= 20


@pytest.mark.parametrize("name", NAMES)
def test_last_logits_equal_transformers(last_logits, name):
    golden, logits = GOLDEN[name], last_logits[name]
    scale = np.abs(golden["top_logits"]).max()
    np.testing.assert_allclose(logits[golden["top_ids"]], golden["top_logits"], rtol=0, atol=RELATIVE_ERROR * scale)
    assert np.linalg.norm(logits) == pytest.approx(golden["logits_norm"], rel=RELATIVE_ERROR)
    assert logits.mean() == pytest.approx(golden["logits_mean"], abs=RELATIVE_ERROR * scale)
