"""The engine over a model whose tokens are known by hand: identity however a request is scheduled, and clean ends."""

import gc
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pagedjax import (
    CheckpointError,
    ConfigError,
    EngineConfig,
    EngineDeadError,
    InvalidRequestError,
    LLMEngine,
    RequestOutputKind,
    SamplingParams,
    length_hint,
)
from pagedjax.execution.buckets import IS_FUSED
from pagedjax.request_input import RequestInput
from tests.fakes import EOS, FAKE_CONFIG, VOCAB_SIZE, continuation, fake_engine, next_token, run_all
from tests.kept_executables import few_buckets

GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)


def prompts(count, *, low=3, high=60, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 256, int(rng.integers(low, high))).tolist() for _ in range(count)]


@pytest.fixture(scope="module")
def shared_engine():
    return fake_engine(max_num_seqs=8, max_num_batched_tokens=64)


@pytest.fixture
def engine(shared_engine):
    yield shared_engine
    assert not shared_engine.has_unfinished_requests()
    assert shared_engine.stats()["num_blocks_used"] == 0
    shared_engine.check_integrity()


def test_greedy_tokens_are_those_computed_by_hand(engine):
    prompt = [5, 250, 3, 17, 99]
    out = run_all(engine, [("a", prompt, GREEDY)])["a"]
    assert out.outputs[0].token_ids == continuation(prompt, 20)
    assert (out.outputs[0].finish_reason, out.outputs[0].stop_reason, out.finished) == ("length", None, True)


def test_requests_in_a_batch_get_the_tokens_they_get_alone(engine):
    batch = prompts(20)
    outs = run_all(engine, [(str(i), prompt, GREEDY) for i, prompt in enumerate(batch)])
    assert [outs[str(i)].outputs[0].token_ids for i in range(20)] == [continuation(p, 20) for p in batch]


def test_a_prompt_computed_in_chunks_of_sixteen_gives_the_same_tokens():
    engine = fake_engine(max_num_batched_tokens=16)
    batch = prompts(6, low=40, high=100)
    outs = run_all(engine, [(str(i), prompt, GREEDY) for i, prompt in enumerate(batch)])
    assert [outs[str(i)].outputs[0].token_ids for i in range(6)] == [continuation(p, 20) for p in batch]


@pytest.mark.parametrize("ahead", [True, False])
def test_a_preempted_request_resumes_with_the_same_tokens(ahead):
    engine = fake_engine(num_gpu_blocks_override=18, max_model_len=128, async_scheduling=ahead)
    params = SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True)
    batch = prompts(6, low=10, high=40)
    outs = run_all(engine, [(str(i), prompt, params) for i, prompt in enumerate(batch)])
    assert engine.stats()["num_preemptions"] > 0
    assert [outs[str(i)].outputs[0].token_ids for i in range(6)] == [continuation(p, 50) for p in batch]
    assert engine.stats()["num_blocks_used"] == 0


def test_a_warm_prefix_cache_changes_no_token_and_saves_full_blocks(engine):
    engine.reset_prefix_cache()
    prompt = prompts(1, low=50, high=51, seed=3)[0]
    first = run_all(engine, [("cold", prompt, GREEDY)])["cold"]
    again = run_all(engine, [("warm", prompt, GREEDY)])["warm"]
    assert again.num_cached_tokens == 48
    assert first.num_cached_tokens == 0
    assert again.outputs[0].token_ids == first.outputs[0].token_ids == continuation(prompt, 20)


def test_generated_blocks_are_cached_for_the_next_turn(engine):
    engine.reset_prefix_cache()
    prompt = prompts(1, low=21, high=22, seed=4)[0]
    first = run_all(engine, [("turn1", prompt, GREEDY)])["turn1"]
    history = prompt + first.outputs[0].token_ids + [1, 2, 3]
    second = run_all(engine, [("turn2", history, GREEDY)])["turn2"]
    new_tokens = len(history) - second.num_cached_tokens
    assert new_tokens <= 3 + engine.config.block_size
    assert second.outputs[0].token_ids == continuation(history, 20)


def test_prompts_come_in_smaller_chunks_where_tokens_must_keep_coming():
    """No step can be as short as this target, so prompts get the least that brings them to an end."""
    engine = fake_engine(max_num_batched_tokens=64, target_itl_ms=0.1, scheduler_delay_factor=0.5)
    batch = prompts(4, low=80, high=90, seed=9)
    engine.add_request("first", [1, 2], SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True))
    engine.step()
    for i, prompt in enumerate(batch):
        engine.add_request(str(i), prompt, GREEDY)
    chunks, outs = [], {}
    while engine.has_unfinished_requests():
        output = engine.step()
        chunks += [sum(one.num_scheduled_tokens for one in output.scheduled if one.num_scheduled_tokens > 1)]
        outs |= {out.request_id: out for out in output if out.finished}
    assert max(chunks) <= 15  # with one that generates the smallest bucket
    assert sum(map(bool, chunks)) > 4 * 80 // 15
    assert [outs[str(i)].outputs[0].token_ids for i in range(4)] == [continuation(p, 20) for p in batch]
    assert outs["first"].outputs[0].token_ids == continuation([1, 2], 100)


def test_prefixes_under_different_salts_are_apart(engine):
    engine.reset_prefix_cache()
    prompt, found = prompts(1, low=50, high=51, seed=5)[0], []
    for salt in ("mine", "theirs", None, "mine"):
        engine.add_request("r", prompt, GREEDY, cache_salt=salt)
        outs = [out for _ in range(40) for out in engine.step() if out.finished]
        found.append(outs[0].num_cached_tokens)
        assert outs[0].outputs[0].token_ids == continuation(prompt, 20)
    assert found == [0, 0, 0, 48]


def test_a_reset_in_the_middle_of_requests_changes_no_token(engine, caplog):
    engine.reset_prefix_cache()
    batch = prompts(5, seed=6)
    for i, prompt in enumerate(batch):
        engine.add_request(str(i), prompt, GREEDY)
    for _ in range(6):
        engine.step()
    assert not engine.reset_prefix_cache()
    assert "5 requests run and 0 blocks are pinned; let the requests end or pass reset_running" in caplog.text
    before = engine.stats()["num_preemptions"]
    assert engine.reset_prefix_cache(reset_running_requests=True)
    assert engine.stats()["num_blocks_used"] == engine.stats()["num_blocks_cached"] == 0
    outs = {out.request_id: out for _ in range(60) for out in engine.step() if out.finished}
    assert engine.stats()["num_preemptions"] - before == 5
    assert [outs[str(i)].outputs[0].token_ids for i in range(5)] == [continuation(p, 20) for p in batch]


def test_a_pinned_prefix_is_found_after_the_cache_was_overrun(engine):
    engine.reset_prefix_cache()
    prefix = prompts(1, low=20, high=21, seed=7)[0]
    run_all(engine, [("warm", prefix, GREEDY)])
    assert engine.pin_prefix(prefix) == 16
    evictions = engine.stats()["prefix_cache_evictions"]
    run_all(engine, [(str(i), prompt, GREEDY) for i, prompt in enumerate(prompts(24, low=60, high=100, seed=8))])
    assert engine.stats()["prefix_cache_evictions"] > evictions
    out = run_all(engine, [("hit", [*prefix, 1, 2], GREEDY)])["hit"]
    assert out.num_cached_tokens == 16
    assert out.outputs[0].token_ids == continuation([*prefix, 1, 2], 20)
    assert not engine.reset_prefix_cache()
    assert engine.unpin_prefix(prefix)
    assert not engine.unpin_prefix(prefix)


def test_sampled_tokens_depend_on_the_seed_alone(engine):
    params = [SamplingParams(temperature=1.5, seed=i, max_tokens=20, ignore_eos=True) for i in range(12)]
    batch = prompts(12, seed=1)
    together = run_all(engine, [(str(i), batch[i], params[i]) for i in range(12)])
    alone = {str(i): run_all(engine, [(str(i), batch[i], params[i])])[str(i)] for i in range(12)}
    assert all(together[k].outputs[0].token_ids == alone[k].outputs[0].token_ids for k in alone)
    drawn = {tuple(out.outputs[0].token_ids) for out in alone.values()}
    assert len(drawn) == 12


def test_sampled_tokens_are_the_same_beside_requests_of_every_kind(engine):
    mine = SamplingParams(temperature=1.2, seed=7, max_tokens=20, ignore_eos=True)
    alone = run_all(engine, [("a", [1, 2, 3], mine)])["a"].outputs[0].token_ids
    others = [
        SamplingParams(temperature=0.9, top_k=5, seed=1, max_tokens=15),
        SamplingParams(temperature=0.9, top_p=0.5, seed=2, max_tokens=15),
        SamplingParams(temperature=0.9, min_p=0.2, repetition_penalty=1.3, seed=3, max_tokens=15),
        SamplingParams(temperature=0.0, logprobs=3, max_tokens=15),
    ]
    mixed = run_all(engine, [("a", [1, 2, 3], mine), *((str(i), [9, i], p) for i, p in enumerate(others))])
    assert mixed["a"].outputs[0].token_ids == alone


def test_several_completions_of_one_prompt_are_single_runs_with_consecutive_seeds(engine):
    params = SamplingParams(temperature=1.0, n=3, seed=40, max_tokens=10, ignore_eos=True)
    out = run_all(engine, [("n", [4, 5, 6], params)])["n"]
    singles = [
        run_all(
            engine, [("s", [4, 5, 6], SamplingParams(temperature=1.0, seed=40 + i, max_tokens=10, ignore_eos=True))]
        )["s"]
        for i in range(3)
    ]
    assert [one.token_ids for one in out.outputs] == [one.outputs[0].token_ids for one in singles]
    assert [one.index for one in out.outputs] == [0, 1, 2]


def find_prompt_reaching(token, *, within):
    for start in range(5000):
        prompt = [start % 256, start // 256 % 256, 7]
        tokens = continuation(prompt, within)
        if token in tokens and tokens.index(token) >= 2:
            return prompt, tokens[: tokens.index(token) + 1]
    raise AssertionError("no prompt leads there")


def test_eos_ends_a_request_and_the_surplus_token_is_dropped(engine):
    prompt, expected = find_prompt_reaching(EOS, within=10)
    out = run_all(engine, [("e", prompt, SamplingParams(temperature=0.0, max_tokens=40))])["e"].outputs[0]
    assert out.token_ids == expected
    assert (out.finish_reason, out.stop_reason) == ("stop", None)


def test_a_stop_token_ends_a_request_and_is_the_stop_reason(engine):
    prompt, expected = find_prompt_reaching(65, within=10)
    params = SamplingParams(temperature=0.0, max_tokens=40, stop_token_ids=[65], ignore_eos=True)
    out = run_all(engine, [("s", prompt, params)])["s"].outputs[0]
    assert out.token_ids == expected
    assert (out.finish_reason, out.stop_reason) == ("stop", 65)


def test_min_tokens_holds_the_end_back(engine):
    prompt, expected = find_prompt_reaching(EOS, within=8)
    params = SamplingParams(temperature=0.0, max_tokens=30, min_tokens=len(expected) + 3)
    out = run_all(engine, [("m", prompt, params)])["m"].outputs[0]
    assert EOS not in out.token_ids[: len(expected) + 2]
    assert len(out.token_ids) >= len(expected) + 3


def test_logprobs_are_those_of_the_raw_logits(engine):
    params = SamplingParams(temperature=0.7, seed=1, logprobs=4, max_tokens=6, ignore_eos=True)
    prompt = [3, 1, 4]
    out = run_all(engine, [("l", prompt, params)])["l"].outputs[0]
    tokens = list(prompt)
    for token, entry in zip(out.token_ids, out.logprobs, strict=True):
        target = next_token(tokens)
        distance = np.abs(np.arange(VOCAB_SIZE) - target)
        logits = -np.minimum(distance, VOCAB_SIZE - distance).astype(np.float64)
        expected = logits - np.log(np.exp(logits).sum())
        assert entry[token].logprob == pytest.approx(expected[token], abs=1e-5)
        assert entry[token].rank == 1 + int((logits > logits[token]).sum())
        assert entry[target].logprob == pytest.approx(expected[target], abs=1e-5)
        assert len(entry) in (4, 5)
        tokens.append(token)
    assert out.cumulative_logprob == pytest.approx(
        sum(e[t].logprob for t, e in zip(out.token_ids, out.logprobs, strict=True))
    )


def test_logprobs_hold_the_bytes_of_tokens_that_are_part_of_a_character(engine):
    """Their text is U+FFFD for all of them."""
    params = SamplingParams(temperature=0.0, logprobs=3, max_tokens=1)
    (entries,) = run_all(engine, [("b", [120], params)])["b"].outputs[0].logprobs
    shown = {token_id: (one.decoded_token, one.token_bytes) for token_id, one in entries.items()}
    # token 7 + 120 and its neighbours: the vocabulary begins with the bytes that are characters in GPT-2's spelling
    assert shown == {126: ("\ufffd", b"\xc2"), 127: ("\ufffd", b"\xc3"), 128: ("\ufffd", b"\xc4")}
    (entries,) = run_all(engine, [("c", [30], params)])["c"].outputs[0].logprobs
    assert {one.token_bytes for one in entries.values()} == {None}  # their texts say them


@pytest.mark.parametrize("budget", [16, 64])
def test_prompt_logprobs_cover_every_prompt_token_once_however_it_is_chunked(budget):
    engine = fake_engine(max_num_batched_tokens=budget)
    prompt = prompts(1, low=90, high=91)[0]
    params = SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=2, ignore_eos=True)
    for name in ("cold", "warm"):
        out = run_all(engine, [(name, prompt, params)])[name]
        assert out.prompt_logprobs[0] is None
        assert len(out.prompt_logprobs) == len(prompt)
        for position in range(1, len(prompt)):
            target = next_token(prompt[:position])
            entry = out.prompt_logprobs[position]
            assert min(one.rank for one in entry.values()) == 1
            assert entry[target].rank == 1
            assert prompt[position] in entry


def test_penalties_and_bias_and_bans_reach_the_sampler(engine):
    prompt = [8, 9]
    target = next_token(prompt)
    banned = SamplingParams(temperature=0.0, max_tokens=1, logit_bias={target: -100.0}, ignore_eos=True)
    allowed = SamplingParams(
        temperature=0.0, max_tokens=1, allowed_token_ids=[(target + 9) % VOCAB_SIZE, 200], ignore_eos=True
    )
    plain = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    outs = run_all(engine, [("b", prompt, banned), ("a", prompt, allowed), ("p", prompt, plain)])
    assert outs["p"].outputs[0].token_ids == [target]
    assert outs["b"].outputs[0].token_ids[0] in {(target + 1) % VOCAB_SIZE, (target - 1) % VOCAB_SIZE}
    assert outs["a"].outputs[0].token_ids[0] in {(target + 9) % VOCAB_SIZE, 200}


def test_a_row_that_had_biases_is_clean_for_the_next_request(engine):
    prompt = [8, 9]
    banned = SamplingParams(temperature=0.0, max_tokens=3, logit_bias={next_token(prompt): -100.0}, ignore_eos=True)
    top_k = SamplingParams(
        temperature=0.01, top_k=1, seed=0, max_tokens=3, ignore_eos=True
    )  # full sampler, neutral row
    run_all(engine, [(str(i), prompt, banned) for i in range(8)])
    outs = run_all(engine, [(str(i), prompt, top_k) for i in range(8)])
    assert all(out.outputs[0].token_ids == continuation(prompt, 3) for out in outs.values())


def test_an_aborted_request_reports_once_and_its_blocks_come_back(engine):
    engine.add_request("x", [1, 2, 3], GREEDY)
    engine.add_request("y", [4, 5, 6], GREEDY)
    for _ in range(5):
        engine.step()
    engine.abort("x")
    reports = []
    while engine.has_unfinished_requests():
        reports += list(engine.step())
    ends = {out.request_id: out.outputs[0].finish_reason for out in reports if out.finished}
    assert ends == {"x": "abort", "y": "length"}
    assert next(out for out in reports if out.request_id == "y" and out.finished).outputs[0].token_ids == continuation(
        [4, 5, 6], 20
    )


def test_delta_outputs_add_up_to_the_cumulative_text(engine):
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    delta = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
    whole = run_all(engine, [("w", "hello", params)])["w"].outputs[0]
    engine.add_request("d", "hello", delta)
    text, tokens = "", []
    while engine.has_unfinished_requests():
        for out in engine.step():
            text += out.outputs[0].text
            tokens += out.outputs[0].token_ids
    assert (text, tokens) == (whole.text, whole.token_ids)


def test_watchers_see_block_tables_and_chunks(engine):
    engine.add_request("w", list(range(70)), SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True))
    seen = []
    while engine.has_unfinished_requests():
        seen += [(one.num_scheduled_tokens, one.context_len, len(one.block_table)) for one in engine.step().scheduled]
    assert seen[:3] == [(64, 0, 8), (6, 64, 9), (1, 70, 9)]


def test_a_warm_up_changes_nothing_that_a_request_sees(engine):
    """It runs every executable on padding, over whatever earlier requests left in rows and blocks."""
    plain = {"temperature": 1.0, "seed": 3, "max_tokens": 12, "ignore_eos": True}
    kinds = [plain, {**plain, "repetition_penalty": 1.5, "logprobs": 2}, {**plain, "top_p": 0.5, "min_tokens": 4}]
    requests = [(str(i), [5, i, 9], SamplingParams(**kind)) for i, kind in enumerate(kinds)]
    before = run_all(engine, requests)
    engine._runner.warm_up()
    after = run_all(engine, requests)
    assert all(after[k].outputs[0].token_ids == before[k].outputs[0].token_ids for k in before)
    assert engine.stats()["num_compilations_after_ready"] == 0


def test_an_engine_on_a_gpu_is_warm_when_it_is_ready(monkeypatch, caplog):
    """With the executables that a GPU has, of which some sample in the same call."""
    monkeypatch.setattr("pagedjax.engine.check_devices", lambda: "gpu")
    monkeypatch.setitem(IS_FUSED, "cpu", True)
    with caplog.at_level("INFO", logger="pagedjax"), few_buckets():
        engine = fake_engine(max_num_seqs=2, max_num_batched_tokens=16, num_gpu_blocks_override=33, is_ahead=True)
    found = "loading executables"  # those that another test's engine has left, if any
    assert [name for name in engine.start_up_seconds if name != found] == [
        "starting the device", "loading weights", "loading the tokenizer", "lowering", "compiling", "pool allocation",
        "warm-up",
    ]  # fmt: skip
    assert caplog.messages[-1].startswith(f"Ready in {sum(engine.start_up_seconds.values()):.1f} s: starting the dev")
    assert any(message.startswith("CPU KV cache size: 256 tokens") for message in caplog.messages)
    out = run_all(engine, [("a", [5, 250, 3], GREEDY)])["a"]
    assert out.outputs[0].token_ids == continuation([5, 250, 3], 20)


def test_logits_that_are_not_finite_end_that_request_alone():
    engine = fake_engine(poison=77)
    outs = run_all(engine, [("bad", [1, 77], GREEDY), ("good", [1, 2, 3], GREEDY)])
    assert outs["bad"].outputs[0].finish_reason == "error"
    assert "not finite" in outs["bad"].error
    assert outs["good"].outputs[0].token_ids == continuation([1, 2, 3], 20)
    assert engine.stats()["num_blocks_used"] == 0


def test_nothing_compiles_after_ready_whatever_the_parameters_and_lengths(engine):
    kinds = [
        {}, {"temperature": 0.0}, {"top_k": 3}, {"top_p": 0.4}, {"min_p": 0.1}, {"seed": -5}, {"presence_penalty": 1.0},
        {"frequency_penalty": -1.0}, {"repetition_penalty": 1.2}, {"logit_bias": {3: 5.0}},
        {"allowed_token_ids": [1, 2]},
        {"bad_words": ["ab", "c"]}, {"min_tokens": 3}, {"logprobs": 5}, {"logprobs": 0}, {"prompt_logprobs": 3},
        {"n": 2},
        {"stop": ["zz"]}, {"stop_token_ids": [9]}, {"max_tokens": None}, {"skip_special_tokens": False},
    ]  # fmt: skip
    before = engine.stats()["num_compilations_after_ready"]
    requests = [
        (f"{i}-{length}", list(range(length)), SamplingParams(**{"max_tokens": 4, **kind}))
        for i, kind in enumerate(kinds)
        for length in (1, 17, 100)
    ]
    outs = run_all(engine, requests)
    assert len(outs) == len(requests)
    assert engine.stats()["num_compilations_after_ready"] == before == 0


def test_a_prompt_that_computes_alone_is_never_more_than_two_steps_ahead_of_the_device():
    """Nothing was read of a chunk that samples nothing, so all chunks were handed over at once: aborts, deadlines and
    new requests then waited for the whole prompt."""
    engine, under_way, most = fake_engine(max_num_batched_tokens=16), [], 0
    executables, name = engine._runner._executables, "forward 16 tokens"
    forward = executables[name]
    wait = jax.jit(lambda x: jax.pure_callback(lambda y: (time.sleep(0.05), y)[1], x, x))
    jax.block_until_ready(wait(jnp.zeros((4, VOCAB_SIZE))))

    def slow_forward(*arguments):
        *others, last_hidden = forward(*arguments)
        under_way.append(wait(last_hidden))
        return *others, under_way[-1]

    executables[name] = slow_forward
    engine.add_request("long", prompts(1, low=120, high=121)[0], SamplingParams(max_tokens=1))
    while engine.has_unfinished_requests():
        engine.step()
        most = max(most, sum(not one.is_ready() for one in under_way))
    assert (len(under_way), most) == (8, 1)
    engine.shutdown()


def test_a_compilation_of_another_thread_is_not_the_engines(engine, monkeypatch):
    """It was counted if it ended while a step was dispatched."""
    fork_blocks, before = engine._runner._fork_blocks, engine.stats()["num_compilations_after_ready"]

    def compile_beside(copies):
        thread = threading.Thread(target=lambda: jax.jit(lambda x: x * 5 + 2)(jnp.arange(7)))
        thread.start()
        thread.join()
        fork_blocks(copies)

    monkeypatch.setattr(engine._runner, "_fork_blocks", compile_beside)
    run_all(engine, [("x", "hello", GREEDY)])
    assert engine.stats()["num_compilations_after_ready"] == before


def test_an_engine_leaves_no_listener_behind(monkeypatch):
    """Each that was ever made was told of every compilation, and held by JAX for ever."""
    listeners = []
    monkeypatch.setattr(jax.monitoring, "register_event_duration_secs_listener", listeners.append)
    monkeypatch.setattr(jax.monitoring, "unregister_event_duration_listener", listeners.remove)
    engine = fake_engine()
    assert listeners
    engine.shutdown()
    del engine
    gc.collect()
    assert not listeners


def test_a_refused_request_leaves_the_tokens_of_later_ones_alone():
    """A request without a seed of its own drew one before all of it was checked."""
    params, drawn = SamplingParams(temperature=1.5, max_tokens=12, ignore_eos=True), []
    for refused in ([], [{"bad_words": ["x" * 500]}, {"min_tokens": 1, "stop_token_ids": range(200)}]):
        engine = fake_engine(seed=5)
        for options in refused:
            with pytest.raises(InvalidRequestError):
                engine.add_request("refused", "hello", SamplingParams(**options))
        drawn.append(run_all(engine, [("x", "hello", params)])["x"].outputs[0].token_ids)
        engine.shutdown()
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize(
    ("prompt", "field", "message"),
    [
        ([], "prompt", "empty"),
        ("", "prompt", "empty"),
        ([1] * 128, "prompt", "128 tokens, max_model_len is 128"),
        ([1, 263], "prompt", "263, the vocabulary is 0..262"),
        ([1, -1], "prompt", "-1"),
        ("x" * 1_000_000, "prompt", "1000000 characters"),
        (None, "prompt", "prompt is None"),
        (5, "prompt", "prompt is 5"),
        (b"abc", "prompt", "prompt is b'abc'"),
        ({"prompt": "a"}, "prompt", "prompt is {'prompt': 'a'}"),
        ([1.5], "prompt", "token id 1.5"),
    ],
)
def test_a_bad_prompt_is_refused_with_value_limit_and_remedy(engine, prompt, field, message):
    with pytest.raises(InvalidRequestError, match=message) as error:
        engine.add_request("bad", prompt, GREEDY)
    assert error.value.param == field
    assert not engine.has_unfinished_requests()


def test_a_prompt_in_chunks_does_not_seem_slower_by_their_number(engine, monkeypatch):
    """The time of all chunks was held against the tokens of the last one: computing again seemed dear, and swapping
    cheap.
    """
    assert engine.reset_prefix_cache()
    seconds, noted, note_step = iter([0.06, 0.04]), [], engine._scheduler.note_step
    monkeypatch.setattr(engine._iterations, "note_result", lambda dispatched_time, num_tokens: next(seconds))
    monkeypatch.setattr(engine._scheduler, "note_step", lambda **step: (noted.append(step), note_step(**step)))
    run_all(engine, [("a", list(range(100)), SamplingParams(max_tokens=1))])
    assert [(step["num_tokens"], step["seconds"]) for step in noted] == [(64, 0.06), (36, 0.04)]


def test_a_limit_far_above_what_requests_use_is_a_hint_in_the_log(engine, monkeypatch, caplog):
    monkeypatch.setattr(length_hint, "NUM_REQUESTS", 4)
    monkeypatch.setattr(engine, "_length_hint", length_hint.LengthHint(engine.config.max_model_len))
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    with caplog.at_level("INFO", logger="pagedjax.engine"):
        run_all(engine, [(str(i), [i, i], params) for i in range(9)])
    (hint,) = [message for message in caplog.messages if message.startswith("Hint")]
    assert "max_model_len is 128, 99 % of the last 4 requests had 5 tokens or less; --max-model-len 6" in hint


def test_a_request_id_in_use_is_refused(engine):
    engine.add_request("same", [1], GREEDY)
    with pytest.raises(InvalidRequestError, match="in use"):
        engine.add_request("same", [2], GREEDY)
    engine.abort("same")
    while engine.has_unfinished_requests():
        engine.step()


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"cache_salt": 5}, "cache_salt"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"priority": "high"}, "priority"),
        ({"priority": float("nan")}, "priority"),
        ({"priority": 3}, "priority"),  # under fcfs it would be ignored
        ({"arrival_time": float("nan")}, "arrival_time"),
        ({"arrival_time": "now"}, "arrival_time"),
        ({"sampling_params": {"n": 1}}, "sampling_params"),
        ({"timeout": 0}, "timeout"),
        ({"timeout": float("inf")}, "timeout"),
        ({"timeout": "soon"}, "timeout"),
    ],
)
def test_a_bad_option_of_one_request_costs_the_others_nothing(engine, options, field):
    """A salt that was no string ended the engine at the next step; a priority that does not compare, its queues."""
    engine.add_request("good", "hello" * 4, GREEDY)
    with pytest.raises(InvalidRequestError, match=f"^{field} is") as error:
        engine.add_request("bad", "hello" * 4, **({"sampling_params": GREEDY} | options))
    assert error.value.param == field
    assert list(run_all(engine, [])) == ["good"]


def test_the_ids_of_several_completions_are_checked_before_any_is_queued(engine):
    """The second child's id was in use: the first one stayed behind and its first token ended the engine."""
    engine.add_request("a-1", "hello", GREEDY)
    with pytest.raises(InvalidRequestError, match="'a-1' is in use"):
        engine.add_request("a", "hello", SamplingParams(n=2, max_tokens=4))
    assert list(run_all(engine, [])) == ["a-1"]


def test_stop_strings_without_a_tokenizer_are_refused():
    """They were taken, and never found in a text that there is not."""
    request_input = RequestInput(EngineConfig(max_model_len=64), FAKE_CONFIG, None, frozenset({EOS}))
    with pytest.raises(InvalidRequestError, match="stop needs a tokenizer, this engine has none; use stop_token_ids"):
        request_input.build("a", [1, 2], SamplingParams(stop=["x"]), arrival_time=0.0)


def test_no_weights_are_no_new_weights(engine):
    """An engine with random weights took None for others of the kind, in place of what it had been given since."""
    with pytest.raises(CheckpointError, match="params is None; pass the weights"):
        engine.update_weights(None)


@pytest.mark.parametrize(
    "options", [{"allowed_token_ids": [EOS], "min_tokens": 2}, {"allowed_token_ids": [EOS, 3], "stop_token_ids": [3]}]
)
def test_bans_that_leave_no_token_are_refused(engine, options):
    params = SamplingParams(**{"max_tokens": 4, "min_tokens": 1, **options})
    with pytest.raises(InvalidRequestError, match=r"ban each of the \d allowed_token_ids"):
        engine.add_request("none", "hello", params)


def test_bans_that_leave_no_token_later_are_said_to_be_the_reason(engine):
    """The message blamed the weights."""
    words = [f"{first}{second}" for first in "ab" for second in "ab"]
    letters = engine.tokenizer.encode("ab")
    params = SamplingParams(allowed_token_ids=letters, bad_words=words, max_tokens=4)
    out = run_all(engine, [("none", "hello", params)])["none"]
    assert (out.outputs[0].finish_reason, len(out.outputs[0].token_ids)) == ("error", 1)
    assert "allowed_token_ids and bad_words left no token" in out.error


def test_an_engine_that_was_shut_down_says_so():
    """It raised JAX's "Array has been deleted"."""
    engine = fake_engine()
    engine.add_request("x", "hello", GREEDY)
    engine.step()
    engine.shutdown()
    engine.shutdown()
    assert not engine.has_unfinished_requests()
    with pytest.raises(EngineDeadError, match="was shut down"):
        engine.add_request("y", "hello", GREEDY)
    with pytest.raises(EngineDeadError, match="was shut down"):
        engine.step()


@pytest.mark.parametrize("options", [{"chat_template": "/no/such.jinja"}, {"generation_config": "/no/such"}])
def test_a_wrong_path_is_found_before_the_weights_are_loaded(monkeypatch, options):
    """It was found when they were there, after minutes for a large model."""
    monkeypatch.setattr("pagedjax.engine.load_model", lambda *_, **__: pytest.fail("loaded"))
    with pytest.raises(ConfigError, match="/no/such"):
        LLMEngine(EngineConfig(model="demo", **options))


def test_a_stop_string_across_the_border_of_min_tokens_ends_the_request(engine):
    prompt = [76, 2]
    tokens = continuation(prompt, 30)
    texts = [engine.tokenizer.decode([token]) for token in tokens]
    i = next(i for i in range(2, 28) if all(text.isascii() and text for text in texts[i : i + 2]))
    stop = texts[i] + texts[i + 1]
    for min_tokens in (i, i + 1, i + 2):  # the string is complete with token i + 2
        params = SamplingParams(temperature=0, max_tokens=30, min_tokens=min_tokens, stop=stop, ignore_eos=True)
        out = run_all(engine, [("s", prompt, params)])["s"].outputs[0]
        assert (out.token_ids, out.stop_reason) == (tokens[: i + 2], stop)
    late = SamplingParams(temperature=0, max_tokens=30, min_tokens=30, stop=stop, ignore_eos=True)
    assert run_all(engine, [("s", prompt, late)])["s"].outputs[0].finish_reason == "length"
