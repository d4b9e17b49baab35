"""Speculation under whatever a controller, clients and memory may do: random numbers of drafts, ends and preemptions.

The fake model's tokens are known by hand, so every output is checked, also those of requests that were cut short. The
engine's books are checked after each step.
"""

import random

import pytest

from pagedjax import InvalidRequestError, SamplingParams
from tests.fakes import continuation, fake_engine, run_all
from tests.kept_executables import few_buckets
from tests.speculation.every_kind import comparable, requests_of_every_kind

METHODS = {
    "ngram": {
        "method": "ngram",
        "num_speculative_tokens": 4,
        "prompt_lookup_min": 1,
        "prompt_lookup_max": 3,
    },
    "draft_model": {"method": "draft_model", "model": "fake", "num_speculative_tokens": 4},
    "suffix": {"method": "suffix", "num_speculative_tokens": 6, "suffix_decoding_max_spec_factor": 4.0},
}
MAX_MODEL_LEN = 128
REPEATED = [[11, 22, 33, 44], [55] * 20]  # prompts that come again and again, so that their outputs are known


def make_engine(method, **options):
    """An engine with one bucket of each kind: none is tested here, and each takes a while to compile."""
    errs_every = 3 if method == "draft_model" else None
    config = METHODS[method] | {"is_adaptive": False}
    with few_buckets():
        return fake_engine(speculative_config=config, draft_errs_every=errs_every, **options)


def choose_at_random(engine, rng):
    """Replace what the controller decides by chance, so that drafting stops and starts row by row."""

    def choose(request_ids, *, limits, has_prompts):
        style = rng.random()
        if style < 0.3:
            return [0] * len(request_ids)
        return [limit if style < 0.5 else rng.randint(0, limit) for limit in limits]

    engine._speculation._controller.choose = choose


def random_requests(rng, count):
    """Prompts that share beginnings, some long enough to be split, some that leave room for a token or two."""
    starts = [[rng.randrange(263) for _ in range(40)] for _ in range(3)]
    for number in range(count):
        prompt = starts[rng.randrange(3)][: rng.randint(1, 40)] + [
            rng.randrange(263) for _ in range(rng.choice([0, 3]))
        ]
        if rng.random() < 0.5:
            prompt = rng.choice(REPEATED)
        elif rng.random() < 0.2:
            prompt = prompt * 10
        prompt = prompt[: MAX_MODEL_LEN - rng.choice([1, 2, 5, 30])]
        yield f"{number}", prompt, min(rng.choice([1, 2, 3, 7, 30, 60]), MAX_MODEL_LEN - len(prompt))


def run_randomly(engine, rng, count):
    """Return what became of `count` requests: (prompt, most tokens, output)."""
    waiting, running, results = list(random_requests(rng, count)), {}, []
    for _ in range(5000):
        if waiting and rng.random() < 0.4:
            request_id, prompt, most = waiting.pop()
            running[request_id] = (prompt, most)
            params = SamplingParams(temperature=0.0, max_tokens=most, ignore_eos=True)
            engine.add_request(request_id, prompt, params)
        if running and rng.random() < 0.02:
            engine.abort(rng.choice(list(running)))
        if rng.random() < 0.03:
            engine.reset_prefix_cache(reset_running_requests=True)
        for output in engine.step():
            if output.finished:
                results.append((*running.pop(output.request_id), output.outputs[0]))
        engine.check_integrity()
        if not waiting and not running and not engine.has_unfinished_requests():
            return results
    raise AssertionError("the engine does not come to an end")


def check(engine, results):
    num_finished = 0
    for prompt, most, output in results:
        expected = continuation(prompt, most)
        assert list(output.token_ids) == expected[: len(output.token_ids)]
        if output.finish_reason != "abort":
            assert (len(output.token_ids), output.finish_reason) == (most, "length")
            num_finished += 1
    stats = engine.stats()
    assert num_finished > 0.6 * len(results)
    assert stats["spec_decode_num_draft_tokens"] > 50
    if engine.config.speculation.method != "ngram":  # the fake model does not repeat itself: all n-grams are refused
        assert stats["spec_decode_num_accepted_tokens"] > 50
    assert stats["spec_decode_num_accepted_tokens"] <= stats["spec_decode_num_draft_tokens"]
    assert stats["num_blocks_used"] == 0


@pytest.fixture(scope="module", params=["draft_model", "suffix", "ngram"])
def engine(request):
    """With too few blocks, and host memory for some of them."""
    engine = make_engine(request.param, num_gpu_blocks_override=24, swap_space=0.01)
    yield engine
    assert engine.stats()["num_compilations_after_ready"] == 0
    engine.shutdown()


@pytest.mark.fuzz
@pytest.mark.parametrize("seed", range(1, 20))
def test_random_drafting_requests_and_preemptions_change_no_token(engine, seed):
    rng = random.Random(seed)
    choose_at_random(engine, rng)
    results = run_randomly(engine, rng, 40)
    assert len(results) == 40
    check(engine, results)
    assert engine.stats()["num_preemptions"] > 5


@pytest.fixture(scope="module")
def plain():
    engine = fake_engine()
    yield engine
    engine.shutdown()


@pytest.mark.fuzz
@pytest.mark.parametrize("seed", range(20))
def test_random_drafting_of_requests_of_every_kind_changes_nothing_that_a_client_sees(engine, plain, seed):
    rng, requests = random.Random(seed), requests_of_every_kind(seed, 30)
    expected = run_all(plain, requests)
    choose_at_random(engine, rng)
    outs, waiting = {}, list(requests)
    while waiting or engine.has_unfinished_requests():
        if waiting and rng.random() < 0.5:
            engine.add_request(*waiting.pop(0))
        if rng.random() < 0.03:
            engine.reset_prefix_cache(reset_running_requests=True)
        outs |= {output.request_id: output for output in engine.step() if output.finished}
        engine.check_integrity()
    for request_id, prompt, params in requests:
        assert comparable(outs[request_id]) == comparable(expected[request_id]), (prompt, params)


@pytest.mark.fuzz
@pytest.mark.parametrize("seed", range(5))
def test_deadlines_aborts_and_pinned_prefixes_in_mid_draft_leave_the_others_alone(engine, plain, seed):
    rng, requests = random.Random(seed), requests_of_every_kind(100 + seed, 30)
    expected = run_all(plain, requests)
    choose_at_random(engine, rng)
    outs, waiting, pinned, num_whole = {}, list(requests), [], 0
    while waiting or engine.has_unfinished_requests():
        added = requests[: len(requests) - len(waiting)]
        if waiting and rng.random() < 0.5:
            timeout = rng.choice([None, None, 0.02, 0.2])
            engine.add_request(*waiting.pop(0), timeout=timeout, client=(rng.choice("ab"), ""), cache_salt="salt")
        if added and rng.random() < 0.05:
            engine.abort(rng.choice(added)[0])
        if added and rng.random() < 0.05:
            pinned += pin_if_cached(engine, rng.choice(added)[1])
        if pinned and rng.random() < 0.1:
            engine.unpin_prefix(pinned.pop(), cache_salt="salt")
        outs |= {output.request_id: output for output in engine.step() if output.finished}
        engine.check_integrity()
    while pinned:
        engine.unpin_prefix(pinned.pop(), cache_salt="salt")
    for request_id, prompt, params in requests:
        out, right = outs[request_id], expected[request_id]
        if all(one.finish_reason not in ("abort", "timeout") for one in out.outputs):
            assert comparable(out) == comparable(right), (prompt, params)
            num_whole += 1
        elif not params.use_beam_search:
            for one, other in zip(out.outputs, right.outputs, strict=True):
                assert one.token_ids == other.token_ids[: len(one.token_ids)]
    assert 5 < num_whole < 30
    assert engine.stats()["num_blocks_used"] == 0


def pin_if_cached(engine, prompt):
    """Return the prompts that this has pinned."""
    try:
        engine.pin_prefix(prompt, cache_salt="salt")
    except InvalidRequestError:  # it is too short, not computed yet, or would leave too little room
        return []
    return [prompt]
