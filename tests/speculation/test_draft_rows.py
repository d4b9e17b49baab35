"""A draft model computes as many rows as a GPU has at least in a batch, though fewer requests draft."""

from pagedjax import SamplingParams
from pagedjax.speculation import draft_model
from tests.fakes import continuation, fake_engine, run_all


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
