"""Swapping on a GPU, where memory spaces are real: a CPU takes any mixture of them.

python -m pytest -m gpu tests/test_swap_gpu.py
"""

import pytest

from pagedjax import SamplingParams
from tests.fakes import continuation, fake_engine, run_all
from tests.test_identity import make_llm, requests, tokens

pytestmark = pytest.mark.gpu


def test_swapped_and_resumed_requests_generate_what_undisturbed_ones_do_on_the_device():
    prompts = {str(i): [10 * i + j % 7 for j in range(30)] for i in range(8)}
    params = SamplingParams(max_tokens=80, temperature=0.0, ignore_eos=True)
    engine = fake_engine(num_gpu_blocks_override=25, swap_space=0.001, preemption_mode="swap")
    outs = run_all(engine, [(request_id, prompt, params) for request_id, prompt in prompts.items()])
    for request_id, prompt in prompts.items():
        assert outs[request_id].outputs[0].token_ids == continuation(prompt, 80)
    stats = engine.stats()
    assert stats["num_preemptions_swapped"] > 0
    assert stats["swap_in_blocks"] > 0
    assert (stats["swap_failures"], stats["num_compilations_after_ready"]) == (0, 0)
    assert {array.sharding.memory_kind for array in engine._runner.host._chunks.values()} == {"pinned_host"}
    engine.shutdown()


def test_a_model_in_float32_swaps_exactly_on_the_device():
    prompts, params = requests()
    with make_llm(dtype="float32", enable_prefix_caching=False) as llm:
        expected = [tokens(llm, [prompt], [one])[0] for prompt, one in zip(prompts, params, strict=True)]
    small = {"num_gpu_blocks_override": 40, "max_num_seqs": 16, "swap_space": 0.001, "preemption_mode": "swap"}
    with make_llm(dtype="float32", **small) as llm:
        assert tokens(llm, prompts, params) == expected
        stats = llm.engine.stats()
        assert stats["num_preemptions_swapped"] > 0
        assert stats["swap_in_blocks"] > 0
