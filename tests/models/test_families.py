"""Every model family against golden logits and greedy tokens of transformers (tests/oracles/make_tiny_models.py)."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from pagedjax.loading.arrays import model_from_params
from pagedjax.loading.hf_config import model_config_from_hf
from tests.models.paged_forward import PagedForward
from tests.oracles import tiny_models

pytestmark = pytest.mark.usefixtures("compiled_quickly")

ORACLES = Path(__file__).parents[1] / "oracles"
CASES = list(tiny_models.CASES)
DECODE_BUCKET_CASES = ("mistral", "gemma3")  # a second executable, of four tokens; the others decode in padding of 48
RELATIVE_ERROR = 2e-4  # of the largest logit; float32 in another order of summation gives about 4e-6


@pytest.fixture(scope="module")
def golden():
    return dict(np.load(ORACLES / "golden" / "tiny_models.npz"))


@pytest.fixture(scope="module", params=CASES)
def case(request):
    return request.param


@pytest.fixture(scope="module")
def forward(case):
    """One pool for all tests of a case, so that its steps are traced once; each test has requests of its own."""
    config = model_config_from_hf(tiny_models.CASES[case])
    model = model_from_params(tiny_models.weights(case), config, dtype=jnp.float32).model
    return PagedForward(model, jnp.float32, token_buckets=(4, 48) if case in DECODE_BUCKET_CASES else (48,))


def check_logits(logits: np.ndarray, prompt: list[int], expected: np.ndarray) -> None:
    positions = [position for position in tiny_models.LOGIT_POSITIONS if position < len(prompt)]
    np.testing.assert_allclose(logits[positions], expected, rtol=0, atol=RELATIVE_ERROR * np.abs(expected).max())


def test_logits_and_greedy_tokens_of_a_batch_equal_transformers(case, forward, golden):
    prompts = {str(len(prompt)): prompt for prompt in tiny_models.prompts(case)}
    logits = forward(prompts)
    for name, prompt in prompts.items():
        check_logits(logits[name], prompt, golden[f"{case}/{name}/logits"])
    greedy = {name: [int(rows[-1].argmax())] for name, rows in logits.items()}
    for _ in range(tiny_models.NUM_GREEDY_TOKENS - 1):
        for name, rows in forward({name: ids[-1:] for name, ids in greedy.items()}).items():
            greedy[name].append(int(rows[-1].argmax()))
    assert greedy == {name: golden[f"{case}/{name}/greedy"].tolist() for name in prompts}


@pytest.mark.parametrize("chunk_size", [1, 13])
def test_a_prompt_in_chunks_gives_the_logits_of_the_whole(case, forward, golden, chunk_size):
    prompt = tiny_models.prompts(case)[-1]
    chunks = [prompt[i : i + chunk_size] for i in range(0, len(prompt), chunk_size)]
    name = f"in chunks of {chunk_size}"
    logits = np.concatenate([forward({name: chunk})[name] for chunk in chunks])
    check_logits(logits, prompt, golden[f"{case}/{len(prompt)}/logits"])
