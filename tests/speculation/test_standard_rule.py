"""The standard rule in an engine: greedy output is that of plain decoding, sampled output keeps to what was asked for.

That sampled tokens keep the distribution is shown where they are drawn, in `tests/execution/test_rejection.py`.
"""

import re
from dataclasses import replace

import pytest

from tests.fakes import fake_engine, run_all
from tests.kept_executables import few_buckets
from tests.speculation.every_kind import comparable, requests_of_every_kind

DRAFT = {"method": "draft_model", "model": "fake", "num_speculative_tokens": 3, "is_adaptive": False}


@pytest.fixture(scope="module")
def engine():
    """With a draft model that errs, and too few blocks."""
    config = DRAFT | {"rejection_sample_method": "standard"}
    with few_buckets():
        engine = fake_engine(speculative_config=config, draft_errs_every=3, num_gpu_blocks_override=24, swap_space=0.01)
    yield engine
    assert engine.stats()["num_compilations_after_ready"] == 0
    engine.shutdown()


@pytest.fixture(autouse=True)
def _drafts_are_accepted_and_refused(engine):
    before = engine.stats()
    yield
    after = engine.stats()
    drafted, accepted = (
        after[name] - before[name] for name in ("spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens")
    )
    assert 0 < accepted < drafted
    assert after["num_blocks_used"] == 0


def test_greedy_requests_of_every_kind_give_what_they_give_without_drafts(engine):
    requests, plain = requests_of_every_kind(seed=7, count=24), fake_engine()
    requests = [(name, prompt, replace(params, temperature=0.0)) for name, prompt, params in requests]
    expected = run_all(plain, requests)
    plain.shutdown()
    preemptions = engine.stats()["num_preemptions"]
    outs = run_all(engine, requests)
    for request_id, prompt, params in requests:
        assert comparable(outs[request_id]) == comparable(expected[request_id]), (prompt, params)
    assert engine.stats()["num_preemptions"] > preemptions


@pytest.mark.fuzz
def test_sampled_requests_keep_to_their_forms_bans_and_lengths(engine):
    requests = [one for one in requests_of_every_kind(seed=8, count=80) if one[2].temperature > 0]
    outs, num_forms, num_bans = run_all(engine, requests), 0, 0
    for request_id, _, params in requests:
        form = params.structured_outputs
        for out in outs[request_id].outputs:
            assert len(out.token_ids) <= params.max_tokens
            if form is not None and form.regex is not None and (out.finish_reason, out.stop_reason) == ("stop", None):
                assert re.fullmatch(form.regex, out.text)
                num_forms += 1
            if params.allowed_token_ids is not None:
                assert set(out.token_ids) <= set(params.allowed_token_ids)
                num_bans += 1
    assert num_forms > 2
    assert num_bans > 10
