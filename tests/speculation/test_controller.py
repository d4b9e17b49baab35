"""Speculation that cannot pay ends at no drafts and costs next to nothing; speculation that pays is found and kept."""

import logging
import re

import numpy as np
import pytest

from pagedjax.speculation.controller import Controller
from tests.speculation.simulation import Costs, best_gain, simulate

MAX_DRAFTS = 8
BATCHES = (1, 8, 64)

# Milliseconds, shaped like measured ones: a decode step reads all weights, until so many tokens make it compute.
LARGE_TARGET = Costs(lambda tokens, requests: max(4.0, 0.018 * tokens) + 0.02 * requests, lambda _: 0.5)
LOOK_UP = Costs(lambda tokens, requests: max(4.0, 0.018 * tokens) + 0.3 * (tokens > requests))
QUANTISED_TARGET = Costs(lambda tokens, requests: max(1.6, 0.12 * tokens) + 0.02 * requests, lambda _: 1.0)
SMALL_TARGET = Costs(lambda tokens, requests: max(1.2, 0.02 * tokens) + 0.02 * requests, lambda _: 1.0)
DEAR_DRAFTS = Costs(lambda tokens, requests: 4.0 + 0.1 * (tokens - requests))
SATURATED = Costs(lambda tokens, _: 0.05 * tokens, lambda requests: 0.01 * requests)

CAUTIONS = [
    pytest.param(LARGE_TARGET, 0.02, BATCHES, id="a useless draft"),
    pytest.param(LOOK_UP, 0.02, BATCHES, id="useless look-ups"),
    pytest.param(QUANTISED_TARGET, 0.6, BATCHES, id="a quantised target"),
    pytest.param(SMALL_TARGET, 0.6, BATCHES, id="a small target with a draft hardly smaller"),
    pytest.param(QUANTISED_TARGET, 0.7, (33, 64, 256), id="batches over 32"),
    pytest.param(SATURATED, 0.7, BATCHES, id="a saturated device"),
]


def controller_for(costs: Costs, **options) -> Controller:
    return Controller(MAX_DRAFTS, is_sequential=costs.draft(1) > 0, **options)


def run(costs: Costs, rate: float, num_requests: int, *, num_steps: int = 1500, controller: Controller | None = None):
    controller = controller or controller_for(costs)
    return simulate(controller, costs, lambda *_: rate, num_requests=num_requests, num_steps=num_steps)


def plain_tokens_per_second(costs: Costs, num_requests: int) -> float:
    return 1000 * num_requests / costs.plain(num_requests)


@pytest.mark.parametrize(("costs", "rate", "batches"), CAUTIONS)
def test_speculation_that_does_not_pay_ends_at_no_drafts_and_costs_under_two_percent(costs, rate, batches):
    for num_requests in batches:
        assert best_gain(costs, rate, num_requests, MAX_DRAFTS) < 1
        result = run(costs, rate, num_requests)
        assert result.tokens_per_second >= 0.98 * plain_tokens_per_second(costs, num_requests)
        assert result.share_of_steps_with_drafts(first=500) < 0.02


@pytest.mark.parametrize("costs", [LARGE_TARGET, LOOK_UP], ids=["draft model", "look-ups"])
@pytest.mark.parametrize("rate", [0.6, 0.8])
def test_speculation_that_pays_comes_within_a_tenth_of_the_best_fixed_number_of_drafts(costs, rate):
    for num_requests in BATCHES:
        best, controller = best_gain(costs, rate, num_requests, MAX_DRAFTS), controller_for(costs)
        run(costs, rate, num_requests, num_steps=min(4 * num_requests, 256), controller=controller)  # then it tries
        result = run(costs, rate, num_requests, num_steps=600, controller=controller)
        assert best > 1.2
        assert result.tokens_per_second > 0.9 * best * plain_tokens_per_second(costs, num_requests)


def test_a_gain_too_small_to_be_sure_of_costs_nothing_either():
    costs = Costs(lambda tokens, requests: 4.0 + 1.8 * (tokens > requests), lambda _: 0.5)
    assert 1 < best_gain(costs, 0.5, 1, MAX_DRAFTS) < 1.05
    assert run(costs, 0.5, 1).tokens_per_second > 0.98 * plain_tokens_per_second(costs, 1)


def test_tries_come_later_and_later_while_nothing_changes():
    drafts = np.array(run(LOOK_UP, 0.0, 1, num_steps=6000).drafts)
    starts = np.flatnonzero((drafts[1:] > 0) & (drafts[:-1] == 0))
    waits = np.diff(starts)
    assert len(waits) >= 3
    assert (np.diff(waits) > 0).all()


def test_speculation_is_given_up_when_drafts_become_useless_and_taken_up_when_they_become_good():
    controller = controller_for(LARGE_TARGET)
    plain = plain_tokens_per_second(LARGE_TARGET, 1)
    assert run(LARGE_TARGET, 0.8, 1, controller=controller).tokens_per_second > 1.8 * plain
    useless = run(LARGE_TARGET, 0.02, 1, controller=controller)
    assert useless.tokens_per_second > 0.97 * plain
    assert useless.share_of_steps_with_drafts(first=200) < 0.02
    good_again = run(LARGE_TARGET, 0.8, 1, controller=controller, num_steps=2500)
    assert good_again.share_of_steps_with_drafts(first=2000) > 0.95


def test_each_size_of_batch_remembers_whether_speculation_pays():
    def step(tokens, requests):
        return 4.0 if tokens <= 32 else 0.2 * tokens

    costs = Costs(step, lambda _: 0.3)
    controller = controller_for(costs)
    assert run(costs, 0.7, 1, controller=controller, num_steps=500).share_of_steps_with_drafts(first=100) > 0.95
    assert run(costs, 0.7, 64, controller=controller).share_of_steps_with_drafts(first=500) < 0.02
    again = run(costs, 0.7, 1, controller=controller, num_steps=200)
    assert again.share_of_steps_with_drafts() > 0.9, "it had to learn again"


def test_a_request_whose_drafts_are_refused_gets_none_while_others_get_theirs():
    controller = controller_for(DEAR_DRAFTS)
    simulate(controller, DEAR_DRAFTS, first_half_refused, num_requests=8, num_steps=300, lifetime=10_000)
    drafts = mean_drafts(controller, 8)
    assert drafts[:4].max() <= 0.5
    assert drafts[4:].min() >= 2


def test_a_request_that_was_given_up_is_tried_again():
    controller = controller_for(DEAR_DRAFTS)
    simulate(controller, DEAR_DRAFTS, first_half_refused, num_requests=8, num_steps=300, lifetime=10_000)
    simulate(controller, DEAR_DRAFTS, lambda *_: 0.8, num_requests=8, num_steps=300, lifetime=10_000)
    assert mean_drafts(controller, 8).min() >= 1


def first_half_refused(number: int, _: int) -> float:
    return 0.0 if number < 4 else 0.8


def mean_drafts(controller: Controller, num_requests: int) -> np.ndarray:
    ids = [str(number) for number in range(num_requests)]
    return np.mean([controller.choose(ids) for _ in range(8)], axis=0)


def test_a_pause_of_the_host_does_not_end_speculation():
    """A pause during a step with drafts once counted as lost to speculation, which stayed off for 50,000 steps."""
    controller = controller_for(LOOK_UP)
    run(LOOK_UP, 0.8, 1, controller=controller, num_steps=300)
    drafts = controller.choose(["a"])
    assert drafts[0] > 0
    controller.note_step(["a"], drafts, drafts, num_proposed=drafts[0], seconds=1.0)
    assert run(LOOK_UP, 0.8, 1, controller=controller, num_steps=300).share_of_steps_with_drafts() > 0.9


def test_limits_are_kept_and_a_request_without_a_match_has_nothing_to_verify():
    controller = controller_for(LOOK_UP)
    simulate(controller, LOOK_UP, lambda *_: 0.8, num_requests=8, num_steps=200, lifetime=10_000)
    ids, rng = [str(number) for number in range(8)], np.random.default_rng(0)
    num_drafts = 0
    for _ in range(200):
        limits = rng.integers(0, 5, 8).tolist()
        drafts = controller.choose(ids, limits=limits)
        assert all(0 <= k <= limit for k, limit in zip(drafts, limits, strict=True))
        num_drafts += sum(drafts)
        seconds = LOOK_UP.speculating(drafts, 1) / 1000
        controller.note_step(ids, drafts, drafts, num_proposed=sum(drafts), seconds=seconds)
    assert num_drafts > 1000
    assert controller.choose(ids, limits=[0] * 8) == [0] * 8


def test_a_larger_batch_than_allowed_gets_no_drafts():
    controller = controller_for(LOOK_UP, disable_by_batch_size=4)
    assert run(LOOK_UP, 0.8, 4, controller=controller, num_steps=300).share_of_steps_with_drafts(first=100) > 0.9
    assert run(LOOK_UP, 0.8, 5, controller=controller, num_steps=300).share_of_steps_with_drafts() == 0


def test_without_adapting_every_request_gets_as_many_as_it_may_have():
    controller = controller_for(LOOK_UP, is_adaptive=False)
    assert controller.choose(["a", "b"]) == [MAX_DRAFTS, MAX_DRAFTS]
    controller.note_step(["a", "b"], [8, 8], [0, 0], num_proposed=16, seconds=100.0)
    assert controller.choose(["a", "b"], limits=[3, 100]) == [3, MAX_DRAFTS]
    assert controller.choose([]) == []


def test_other_weights_are_learnt_from_the_beginning():
    controller = controller_for(LOOK_UP)
    run(LOOK_UP, 0.8, 1, controller=controller, num_steps=300)
    controller.reset()
    assert controller.choose(["a"]) == [0]
    assert controller.reason == "speculation off: nothing is measured yet"
    result = run(LOOK_UP, 0.0, 1, controller=controller, num_steps=500)
    assert result.tokens_per_second > 0.98 * plain_tokens_per_second(LOOK_UP, 1)


def test_drafts_that_wait_for_the_step_in_flight_are_found_to_pay_within_one_try():
    """Where the host makes the drafts, every second decision is for a request that cannot be drafted for yet."""
    controller = controller_for(LOOK_UP)
    for _ in range(4):
        assert controller.choose(["a"]) == [0]
        controller.note_step(["a"], [0], [0], num_proposed=0, seconds=LOOK_UP.plain(1) / 1000)
    drafts = [0]
    for _ in range(10):
        assert controller.choose(["a"])[0] > 0  # and waits until the step before is read
        if drafts[0]:
            seconds = LOOK_UP.speculating(drafts, 0) / 1000
            controller.note_step(["a"], drafts, drafts, num_proposed=drafts[0], seconds=seconds)
        drafts = controller.choose(["a"])
        assert drafts[0] > 0
    assert controller.reason.startswith("speculation on at batch 1")


def test_a_try_that_failed_is_a_reason_too():
    controller = controller_for(LARGE_TARGET)
    run(LARGE_TARGET, 0.02, 8, num_steps=200, controller=controller)
    said = r"speculation off at batch 8: [01]\.\d+ times .* of drafts accepted, .*, \d\.\d plain steps lost"
    assert re.fullmatch(said, controller.reason)


def test_each_change_is_one_line_with_its_reason(caplog):
    with caplog.at_level(logging.INFO, logger="pagedjax.speculation.controller"):
        controller = controller_for(LARGE_TARGET)
        run(LARGE_TARGET, 0.8, 8, controller=controller, num_steps=500)
        run(LARGE_TARGET, 0.0, 8, controller=controller, num_steps=500)
    on, off = caplog.messages
    assert on.startswith("speculation on at batch 8: ")
    assert "of drafts accepted, a plain step takes 4." in on
    assert off.startswith("speculation off at batch 8: ")
    assert off == controller.reason


def test_requests_that_ended_leave_nothing_behind():
    controller = controller_for(LOOK_UP)
    simulate(controller, LOOK_UP, lambda *_: 0.8, num_requests=200, num_steps=100, lifetime=20)
    assert len(controller._acceptance._columns) <= 256
    assert controller._acceptance._own.shape[2] <= 512
