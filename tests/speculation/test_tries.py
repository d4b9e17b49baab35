"""Tries keep out of the way of prompts, and cost little where runs are short, batches fill and load is steady."""

import numpy as np
import pytest

from pagedjax.speculation.controller import Controller, StepKind
from tests.speculation.serving import Costs, Server


def padded(num_tokens: int) -> int:
    return next(size for size in (1, 4, 16, 64, 256) if num_tokens <= size)


# Milliseconds, shaped like measured ones: a GPU reads weights until it computes, a CPU computes and has few buckets.
GPU = Costs(lambda n: max(4.0, 0.018 * n) + 0.01 * n, lambda _: 0.5, lambda n: max(0.5, 0.003 * n))
CPU = Costs(lambda n: 12 + 1.6 * padded(n), lambda n: 4 + 0.5 * padded(n), lambda n: 4 + 0.5 * padded(n))
GOOD, USELESS = 0.8, 0.0


def compare(costs, rate, arrivals, *, num_runs=1, **options):
    """Return runs with speculation, and throughput and time to the first token of each as shares of a plain run's."""
    plain, server = Server(costs, None).serve(arrivals, **options), Server(costs, rate)
    runs = [server.serve(arrivals, **options) for _ in range(num_runs)]
    throughput = [run.tokens_per_second / plain.tokens_per_second for run in runs]
    return runs, np.array(throughput), np.array([np.mean(run.delays) / np.mean(plain.delays) for run in runs])


def drafts_with_prompts(run) -> int:
    """Steps in which drafts, or what a draft model reads for them, come in the way of prompts."""
    is_drafting = (np.array(run.num_drafts) > 0) | (np.array(run.num_reads) > 0)
    return int(np.sum(is_drafting & run.has_prompts))


def steady(seed: int, *, num: int, every: float) -> list[float]:
    return np.cumsum(np.random.default_rng(seed).exponential(every, num)).tolist()


@pytest.mark.parametrize(("costs", "least_at_first"), [(GPU, 0.98), (CPU, 0.96)], ids=["gpu", "cpu"])
@pytest.mark.parametrize("batch_size", [1, 8, 64])
def test_a_useless_draft_costs_runs_of_200_tokens_two_percent_at_most(costs, least_at_first, batch_size):
    """A new engine's first run is the dearest: a try at each size of batch took 7 percent of it, and more of others.

    On a CPU a draft model a third of the target's size has to read prompts, and to be measured once, which is more.
    """
    runs, throughput, delays = compare(costs, USELESS, [0.0] * batch_size, num_runs=3)
    assert throughput[0] >= least_at_first
    assert throughput.mean() >= 0.98
    assert delays.max() <= 1.01
    assert sum(sum(run.num_drafts) for run in runs) > 0, "it was tried"


def test_while_a_batch_fills_nothing_is_drafted_for():
    """Each size of batch began a try, in steps that computed prompts too."""
    run = compare(CPU, USELESS, [0.0] * 64)[0][0]
    filled = max(np.flatnonzero(run.has_prompts))
    assert filled >= 8
    assert sum(run.num_drafts[: filled + 1]) == sum(run.num_reads[: filled + 1]) == 0


def test_a_large_batch_is_tried_later_than_a_small_one():
    """It loses more by a try, and has less to gain; what fills and empties again is not tried at all."""
    first = [np.flatnonzero(compare(GPU, GOOD, [0.0] * n, output_len=300)[0][0].num_drafts)[0] for n in (1, 8, 64)]
    assert [low <= one <= low + 20 for one, low in zip(first, (4, 32, 256), strict=True)] == [True] * 3


def test_a_try_that_failed_at_one_size_of_batch_defers_it_at_others():
    controller = Controller(3, is_sequential=False)

    def num_tried(ids, num_steps):
        chosen = [0]
        for _ in range(num_steps):
            drafts = controller.choose(ids)
            chosen.append(max(drafts))
            controller.note_step(
                ids, drafts, [0] * len(ids), num_proposed=sum(drafts), seconds=0.008 if any(drafts) else 0.004
            )
        return np.count_nonzero(chosen)

    assert num_tried(["a", "b"], 20) > 0
    assert controller.reason.startswith("speculation off at batch 2: ")
    assert num_tried(["a"], 64) == num_tried(["a", "b", "c"], 64) == 0
    assert num_tried(["a"], 1000) > 0


def test_a_batch_that_fills_slowly_does_not_try_at_each_size():
    arrivals = [150.0 * number for number in range(64)]
    (run,), throughput, delays = compare(GPU, USELESS, arrivals, output_len=2000)
    assert 0 < np.count_nonzero(run.num_drafts) < 0.02 * len(run.num_drafts)
    assert throughput[0] >= 0.98
    assert delays[0] <= 1.05


@pytest.mark.parametrize("every", [80, 20], ids=["few prompts", "many prompts"])
def test_under_steady_load_a_useless_draft_is_tried_between_prompts_and_left_alone(every):
    (run,), throughput, delays = compare(GPU, USELESS, steady(1, num=150, every=every), output_len=100)
    assert 0 < np.count_nonzero(run.num_drafts) < 0.03 * len(run.num_drafts)
    assert drafts_with_prompts(run) <= 2, "of a prompt that came in unforeseen"
    assert throughput[0] >= 0.98
    assert delays[0] <= 1.05


@pytest.mark.parametrize("every", [80, 20], ids=["few prompts", "many prompts"])
def test_under_steady_load_a_good_draft_is_found_and_kept(every):
    (run,), _, _ = compare(GPU, GOOD, steady(1, num=150, every=every), output_len=100)
    plain = Server(GPU, None).serve(steady(1, num=150, every=every), output_len=100)
    half = len(run.num_drafts) // 2
    assert np.mean(np.array(run.num_drafts[half:-20]) > 0) > 0.8
    assert len(run.num_drafts) < 0.8 * len(plain.num_drafts)


def test_where_nearly_every_step_computes_prompts_it_is_tried_in_these():
    controller = Controller(3, is_sequential=False)
    kind, chosen = StepKind(has_prompts=True), []
    for _ in range(400):
        drafts = controller.choose(["a"], has_prompts=True)
        chosen.append(drafts[0])
        controller.note_step(["a"], drafts, drafts, num_proposed=drafts[0], seconds=0.02, kind=kind)
    assert not any(chosen[:160])
    assert all(chosen[300:])


def test_a_few_steps_with_prompts_interrupt_a_try_and_tell_nothing():
    controller = Controller(3, is_sequential=False)

    def step(kind, seconds):
        drafts = controller.choose(["a"], has_prompts=kind.has_prompts)
        controller.note_step(["a"], drafts, drafts, num_proposed=drafts[0], seconds=seconds, kind=kind)
        return drafts[0]

    mixed = StepKind(has_prompts=True)
    assert [step(mixed, 1.0) for _ in range(20)] == [0] * 20
    assert [step(StepKind(), 0.004) for _ in range(4)] == [0] * 4
    assert [step(kind, 0.005) > 0 for kind in (StepKind(), mixed, mixed, StepKind())] == [True, False, False, True]
    while controller.is_trying:
        step(StepKind(), 0.005)
    assert "a plain step takes 4.00 ms, 5.00 ms with" in controller.reason


def test_a_sample_comes_first_and_is_all_that_a_useless_draft_gets():
    (run,), _, _ = compare(GPU, USELESS, [0.0] * 64, output_len=400)
    assert 0 < max(run.num_drafts) <= 4 * 2
    assert sum(run.num_reads) < 6 * 400


def test_requests_that_are_tried_are_read_before_any_is_drafted_for():
    """A draft model read long prompts in one go, which held up everybody's next token."""
    (run,), _, _ = compare(GPU, GOOD, [0.0] * 4, prompt_len=700, output_len=300)
    reads, drafts = np.array(run.num_reads), np.array(run.num_drafts)
    assert reads.max() == 256
    first = np.flatnonzero(drafts)[0]
    assert reads[:first].sum() > 4 * 700
    assert reads[first:].max() < 64
    assert np.count_nonzero(reads[:first]) == 12
