"""What a draft model computes: as many rows as a GPU has at least in a batch, and keys and values in its own blocks."""

import random

import numpy as np

from pagedjax import SamplingParams
from pagedjax.scheduling.scheduler import Scheduler
from pagedjax.speculation import draft_model
from tests.fakes import continuation, fake_engine, run_all
from tests.speculation import test_hostile


def test_drafts_of_few_requests_are_computed_in_a_batch_that_is_fast(monkeypatch):
    computed, run = set(), draft_model.DraftFunctions._run

    def note(self, leaves, kv_cache, state, rows, *rest):
        computed.add(rows.shape[0])
        return run(self, leaves, kv_cache, state, rows, *rest)

    monkeypatch.setattr(draft_model, "MIN_DECODE_ROWS", {"cpu": 8})
    monkeypatch.setattr(draft_model.DraftFunctions, "_run", note)
    config = {"method": "draft_model", "model": "fake", "num_speculative_tokens": 2, "is_adaptive": False}
    engine = fake_engine(speculative_config=config, max_num_seqs=2, draft_errs_every=5)
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    prompts = {str(i): [i, 2, 3] for i in range(3)}
    outs = run_all(engine, [(request_id, prompt, params) for request_id, prompt in prompts.items()])
    assert [outs[name].outputs[0].token_ids for name in prompts] == [continuation(one, 24) for one in prompts.values()]
    assert engine.stats()["spec_decode_num_accepted_tokens"] > 0
    assert computed == {8, 16}  # the first pass computes two tokens a row
    engine.shutdown()


def test_a_draft_model_writes_into_no_block_that_another_request_has_been_given(monkeypatch):
    """It drafts as many tokens as there may be at most, and where the plan had given away the blocks of refused ones,
    it wrote through a table that still named them. Tokens stayed right, and drafts of that prefix were refused."""
    monkeypatch.setitem(test_hostile.METHODS["draft_model"], "num_speculative_tokens", 12)
    engine, rng = test_hostile.make_engine("draft_model", num_gpu_blocks_override=20), random.Random(0)
    test_hostile.choose_at_random(engine, rng)
    proposer, take, num_taken, num_checked = engine._runner._speculator._proposer, Scheduler._take_spare_blocks, 0, 0

    def note_taken(scheduler, taker):
        nonlocal num_taken
        is_taken = take(scheduler, taker)
        num_taken += is_taken
        return is_taken

    monkeypatch.setattr(Scheduler, "_take_spare_blocks", note_taken)
    requests = list(test_hostile.random_requests(rng, 40))
    while requests or engine.has_unfinished_requests():
        if requests and rng.random() < 0.4:
            request_id, prompt, most = requests.pop()
            engine.add_request(request_id, prompt, SamplingParams(temperature=0.0, max_tokens=most, ignore_eos=True))
        engine.step()
        keys = np.asarray(proposer._kv_cache[0][0])[:, 0, :, 0]  # of the fake model: its tokens
        for request in engine._scheduler.running:
            if request.row is None:
                continue
            for i, block_id in enumerate(request.block_ids[: proposer._num_right_blocks[request.row]]):
                if block_id in proposer._right_blocks:
                    num_checked += 1
                    assert keys[block_id].tolist() == request.all_token_ids[i * 8 : (i + 1) * 8]
    assert num_taken > 0 < num_checked
    engine.shutdown()
