"""The window in which every request decodes, on steps whose times are made up."""

from types import SimpleNamespace

import pytest

from pagedjax.bench.decode_window import DecodeWindow


class ScriptedEngine:
    """Two requests; each step costs the host 1 ms of dispatch and 4 ms of waiting."""

    def __init__(self):
        self.host_times = SimpleNamespace(dispatch=0.0, wait=0.0)
        self.num_generated = 0

    def stats(self):
        return {"generation_tokens": self.num_generated}

    def step(self, *, scheduled, num_tokens, num_read, finished=False, num_draft_tokens=0):
        """Plan `num_tokens`, drafts included, of `scheduled` requests and read `num_read` of the step before."""
        self.host_times.dispatch += 0.001
        self.host_times.wait += 0.004
        self.num_generated += num_read
        plan = SimpleNamespace(
            scheduled=[None] * scheduled, num_tokens=num_tokens, num_draft_tokens=num_draft_tokens
        )  # fmt: skip
        return _Output(plan, finished)


class _Output(list):
    def __init__(self, plan, finished):
        super().__init__([SimpleNamespace(finished=True)] if finished else [])
        self.plan = plan


def observe(steps):
    """Run scripted steps, of which each begins when the one before ended, and return the measurement."""
    engine = ScriptedEngine()
    window, now = DecodeWindow(engine, 2), 100.0
    for seconds, step in steps:
        window.observe(engine.step(**step), began=now, ended=now + seconds)
        now += seconds
    return window.decoding()


PROMPTS = (0.050, {"scheduled": 2, "num_tokens": 64, "num_read": 0})
OPENS = (0.300, {"scheduled": 2, "num_tokens": 2, "num_read": 2})  # reads the prompts' step: holds its time
DECODES = (0.010, {"scheduled": 2, "num_tokens": 2, "num_read": 2})
SLOW = (0.016, {"scheduled": 2, "num_tokens": 2, "num_read": 2})
ENDS = (0.010, {"scheduled": 0, "num_tokens": 0, "num_read": 2, "finished": True})
AFTER = (5.0, {"scheduled": 0, "num_tokens": 0, "num_read": 0})


def test_tpot_is_the_mean_step_between_the_last_first_token_and_the_first_finish():
    decoding = observe([PROMPTS, OPENS, DECODES, SLOW, ENDS, AFTER])
    assert decoding.steps == pytest.approx([0.010, 0.016, 0.010])
    assert decoding.tpot == pytest.approx(0.012)
    assert decoding.opened == pytest.approx(100.350)


def test_host_time_is_what_dispatch_and_waiting_leave():
    decoding = observe([PROMPTS, OPENS, DECODES, SLOW, ENDS, AFTER])
    assert (decoding.dispatch, decoding.wait) == pytest.approx((0.001, 0.004))
    assert decoding.host == pytest.approx(0.012 - 0.005)


def test_a_batch_that_never_decodes_together_has_no_window():
    assert observe([PROMPTS, (0.01, {"scheduled": 1, "num_tokens": 1, "num_read": 2, "finished": True})]) is None


def test_steps_in_which_a_request_got_no_token_are_no_measurement():
    """A preempted request computes its tokens again while the others decode."""
    preempted = (0.010, {"scheduled": 1, "num_tokens": 1, "num_read": 1})
    assert observe([PROMPTS, OPENS, DECODES, preempted, ENDS]) is None


def test_with_drafts_tpot_is_the_time_by_the_tokens_of_a_request():
    verifies = (0.012, {"scheduled": 2, "num_tokens": 8, "num_draft_tokens": 6, "num_read": 5})
    opens = (0.300, verifies[1] | {"num_read": 2})
    decoding = observe([PROMPTS, opens, verifies, verifies, ENDS])
    assert decoding.tokens_per_step == pytest.approx(12 / (3 * 2))
    assert decoding.tpot == pytest.approx((0.012 + 0.012 + 0.010) / 3 / decoding.tokens_per_step)


def test_a_finish_in_the_step_that_opens_leaves_nothing_to_measure():
    assert observe([(0.010, {"scheduled": 2, "num_tokens": 2, "num_read": 2, "finished": True}), DECODES]) is None
