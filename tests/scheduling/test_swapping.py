"""Preempted requests go to host memory and come back, evicted prefixes too, and nothing is lost on the way."""

import logging

import pytest

from pagedjax.scheduling.preemption import CopySpeed, PreemptionCosts
from pagedjax.scheduling.request import RequestStatus
from tests.scheduling.fake_device import Driver, expected_output

SWAPPING_OUT, SWAPPED, SWAPPING_IN = RequestStatus.SWAPPING_OUT, RequestStatus.SWAPPED, RequestStatus.SWAPPING_IN


def make_driver(mode="swap", **options):
    """A pool of ten blocks, which two requests of 40 tokens outgrow; host memory for twenty."""
    defaults = {"num_blocks": 11, "block_size": 4, "num_host_chunks": 10, "chunk_size": 2, "max_model_len": 40}
    return Driver(**(defaults | options), preemption_costs=PreemptionCosts(mode))


def two_requests(driver, **options):
    """The second one is preempted when it has some twenty tokens."""
    return [
        driver.add(name, range(first, first + 10), max_tokens=25, **options) for name, first in (("a", 0), ("b", 50))
    ]


def run_until(driver, request, status):
    for _ in range(200):
        driver.step()
        if request.status is status:
            return
    raise AssertionError(f"{request.request_id} never was {status.name}")


def assert_all_back(driver):
    swapping, pool = driver.scheduler.swapping, driver.scheduler.pool
    assert (swapping.host_pool.num_held, pool.num_used) == (0, 0)
    assert not swapping.leaving_blocks


@pytest.mark.parametrize("options", [{}, {"enable_prefix_caching": False}, {"max_copies": 1}, {"copy_iterations": 3}])
def test_a_swapped_request_goes_on_where_it_was(options):
    driver = make_driver(**options)
    requests = two_requests(driver)
    victim = requests[1]
    run_until(driver, victim, SWAPPED)
    num_known = victim.num_tokens
    run_until(driver, victim, RequestStatus.RUNNING)
    assert num_known - victim.num_computed_tokens < 4 + 1, "more than the last block was computed again"
    driver.run()
    assert [request.output_token_ids for request in requests] == [expected_output(request) for request in requests]
    stats = driver.scheduler.stats()
    assert stats["num_preemptions_swapped"] == stats["num_preemptions"] > 0
    assert stats["swap_out_blocks"] >= 4
    assert stats["swap_in_blocks"] > 0
    assert_all_back(driver)


def test_blocks_leave_a_few_copies_an_iteration_and_are_free_as_soon_as_their_copy_has_started():
    driver = make_driver(max_copies=1, chunk_size=1, num_host_chunks=20, copy_iterations=2)
    victim = two_requests(driver)[1]
    num_held = []
    run_until(driver, victim, SWAPPING_OUT)
    while victim.status is SWAPPING_OUT:
        num_held.append(len(victim.block_ids))
        assert len(driver.scheduler.swapping._copies.out) <= 1
        driver.step()
    assert len(num_held) > 3
    assert num_held == sorted(num_held, reverse=True)
    driver.run()
    assert victim.output_token_ids == expected_output(victim)


def test_where_room_is_needed_at_once_the_last_blocks_are_computed_again():
    driver = make_driver(max_copies=1, copy_iterations=4, num_blocks=21, num_host_chunks=40, max_num_seqs=4)
    requests = [driver.add(str(i), [i] * 9, max_tokens=28) for i in range(4)]
    num_cut, cut_short = 0, driver.scheduler.swapping.cut_short

    def counted():
        nonlocal num_cut
        is_cut = cut_short()
        num_cut += is_cut
        return is_cut

    driver.scheduler.swapping.cut_short = counted
    driver.run()
    assert num_cut > 0
    assert [request.output_token_ids for request in requests] == [expected_output(request) for request in requests]
    assert_all_back(driver)


def test_a_shared_prefix_stays_on_the_device():
    driver = make_driver(num_blocks=13)
    prefix = list(range(16))
    requests = [driver.add(name, [*prefix, i], max_tokens=20) for i, name in enumerate("ab")]
    victim = requests[1]
    run_until(driver, victim, SWAPPED)
    assert victim.host_slots[:4] == [-1] * 4
    assert all(slot >= 0 for slot in victim.host_slots[4:])
    driver.run()
    assert [request.output_token_ids for request in requests] == [expected_output(request) for request in requests]


def test_a_prefix_that_is_evicted_comes_back_from_the_host():
    driver = make_driver(num_host_chunks=20)
    prompt = list(range(30))
    first = driver.add("first", prompt, max_tokens=2)
    driver.run()
    driver.add("other", range(100, 135), max_tokens=3)  # needs nearly all blocks
    driver.run()
    again = driver.add("again", prompt, max_tokens=2)
    run_until(driver, again, SWAPPING_IN)
    assert again.num_cached_tokens == 28
    driver.run()
    assert again.output_token_ids == first.output_token_ids == expected_output(first)
    stats = driver.scheduler.stats()
    assert stats["external_prefix_cache_hits"] >= 20
    assert stats["num_blocks_cached_on_host"] > 0
    assert stats["num_preemptions"] == 0
    assert_all_back(driver)


def test_what_comes_back_from_the_host_is_no_partial_miss():
    """A block on the device that begins alike was counted as one, though the host had the whole of the right block."""
    driver = make_driver(num_host_chunks=20)
    driver.add("first", range(30), max_tokens=2)
    driver.run()
    driver.add("other", [0, 1, *range(100, 133)], max_tokens=3)
    driver.run()
    before = driver.scheduler.stats()["prefix_cache_partial_block_misses"]
    driver.add("again", range(30), max_tokens=2)
    driver.run()
    stats = driver.scheduler.stats()
    assert stats["external_prefix_cache_hits"] >= 28
    assert stats["prefix_cache_partial_block_misses"] == before


def test_a_prefix_that_several_requests_wait_for_comes_back_once():
    driver = make_driver(num_host_chunks=20, copy_iterations=3, num_blocks=16, max_model_len=60, max_copies=16)
    prompt = list(range(29))
    driver.add("first", prompt, max_tokens=2)
    driver.run()
    driver.add("other", range(100, 158), max_tokens=2)
    driver.run()
    requests = [driver.add(str(i), [*prompt, i], max_tokens=4) for i in range(4)]
    driver.run()
    assert [request.output_token_ids for request in requests] == [expected_output(request) for request in requests]
    assert 0 < driver.scheduler.stats()["swap_in_blocks"] <= 7
    assert driver.scheduler.stats()["prefix_cache_hits"] >= 3 * 28


def test_a_swapped_request_takes_the_room_of_prefixes_on_the_host_but_not_of_other_requests():
    driver = make_driver(num_host_chunks=3)
    driver.add("first", range(30), max_tokens=2)
    driver.run()
    requests = two_requests(driver)
    run_until(driver, requests[1], SWAPPED)
    assert driver.scheduler.stats()["cpu_cache_usage_perc"] == 1
    driver.run()
    assert [request.output_token_ids for request in requests] == [expected_output(request) for request in requests]


def test_a_host_without_room_means_computing_again():
    driver = make_driver(num_host_chunks=1)
    requests = two_requests(driver)
    driver.run()
    assert [request.output_token_ids for request in requests] == [expected_output(request) for request in requests]
    stats = driver.scheduler.stats()
    assert stats["num_preemptions"] > 0
    assert stats["num_preemptions_swapped"] == 0


@pytest.mark.parametrize("num_failing", [1, 2, 3, 1000])
def test_what_a_failed_copy_should_have_brought_is_computed_again(num_failing):
    driver = make_driver(enable_prefix_caching=False)
    requests = two_requests(driver)
    run_until(driver, requests[1], SWAPPED)
    driver.fail_copies = num_failing
    driver.run()
    assert [request.output_token_ids for request in requests] == [expected_output(request) for request in requests]
    assert driver.scheduler.stats()["swap_failures"] >= min(num_failing, 2)
    assert_all_back(driver)


ENDS = {
    "WAITING": lambda driver, request: None,
    "RUNNING": lambda driver, request: driver.step(),  # in the middle of its prompt
    "RUNNING, with output": lambda driver, request: [driver.step() for _ in range(6)],
    "PREEMPTED": lambda driver, request: run_until(driver, request, RequestStatus.PREEMPTED),
    "SWAPPING_OUT": lambda driver, request: run_until(driver, request, SWAPPING_OUT),
    "SWAPPED": lambda driver, request: run_until(driver, request, SWAPPED),
    "SWAPPING_IN": lambda driver, request: run_until(driver, request, SWAPPING_IN),
}


@pytest.mark.parametrize("state", ENDS)
@pytest.mark.parametrize("end", [RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_TIMEOUT])
def test_a_request_may_end_in_every_state_of_its_life(state, end):
    is_slow = state.startswith("SWAPPING")
    mode = "recompute" if state == "PREEMPTED" else "swap"
    driver = make_driver(
        mode, max_copies=1 if is_slow else 4, chunk_size=1, num_host_chunks=20, max_num_batched_tokens=16
    )
    other, victim = two_requests(driver)
    ENDS[state](driver, victim)
    assert victim.status.name == state.split(",")[0]
    assert bool(victim.output_token_ids) == (state not in ("WAITING", "RUNNING"))
    num_output = len(victim.output_token_ids)
    if end is RequestStatus.FINISHED_ABORTED:
        driver.scheduler.abort("b")
    else:
        victim.deadline = 0.0
        driver.scheduler._deadlines.add(victim)
    output = driver.step()
    assert victim.status is end
    assert (victim in output.timed_out) == end.name.endswith("TIMEOUT")
    driver.run()
    assert victim.output_token_ids == expected_output(victim)[:num_output]
    assert other.output_token_ids == expected_output(other)
    assert_all_back(driver)


def test_a_reset_of_the_prefix_cache_reaches_the_host():
    driver = make_driver()
    requests = two_requests(driver)
    run_until(driver, requests[1], SWAPPED)
    assert driver.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert requests[1].status is RequestStatus.PREEMPTED
    assert driver.scheduler.stats()["num_blocks_cached_on_host"] == 0
    driver.run()
    assert [request.output_token_ids for request in requests] == [expected_output(request) for request in requests]


def test_a_request_that_fails_leaves_nothing_to_find_on_either_side():
    """Its last step ran while its blocks were on their way out: they may hold what made it fail. On the device they
    could be found even then.
    """
    driver = make_driver()
    victim = two_requests(driver)[1]
    driver.step_until_preemption()
    assert victim.is_swapped
    assert driver.scheduler.swapping.host_pool.num_cached_blocks > 0
    driver.read(failed=["b"])
    while driver.in_flight:
        driver.read()
    driver.step()
    assert victim.status is RequestStatus.FINISHED_ERROR
    host_pool = driver.scheduler.swapping.host_pool
    assert all(host_pool.find(digest) is None for digest in victim.block_hashes)
    assert driver.scheduler.prefix_cache.blocks_of(victim) == []


@pytest.mark.parametrize(
    ("speed", "seconds_per_token", "is_swapped"),
    [
        (CopySpeed(0.001, 0.001), 0.01, True),
        (CopySpeed(0.1, 0.1), 0.001, False),
        (CopySpeed(0.1, 0.1), None, True),  # no prompt was measured yet
    ],
)
def test_the_cheaper_way_is_chosen_and_logged(speed, seconds_per_token, is_swapped, caplog):
    driver = make_driver()
    driver.scheduler.swapping.costs = PreemptionCosts("auto", speed)
    if seconds_per_token is not None:
        driver.scheduler.note_step(num_requests=1, num_tokens=100, seconds=100 * seconds_per_token)
    victim = two_requests(driver)[1]
    with caplog.at_level(logging.INFO, logger="pagedjax.scheduling.preemption"):
        driver.step_until_preemption()
    assert victim.is_swapped == is_swapped
    (line,) = caplog.messages
    assert line.startswith(f"preempting b: {'swap' if is_swapped else 'recompute'} {victim.num_tokens} tokens")
    driver.run()
    assert victim.output_token_ids == expected_output(victim)


def test_every_victim_is_logged_with_what_becomes_of_it(caplog):
    """Those on their way back from the host were not, nor those of a reset."""
    driver = make_driver(max_copies=1, chunk_size=1, num_host_chunks=20)
    requests = two_requests(driver)
    run_until(driver, requests[1], SWAPPING_IN)
    num_tokens = 4 * len(requests[1].host_slots)
    with caplog.at_level(logging.INFO, logger="pagedjax.scheduling.preemption"):
        driver.scheduler._preempt(requests[1])
        driver.step()
        (runner,) = driver.scheduler.running
        num_computed = runner.num_computed_tokens
        assert driver.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert caplog.messages == [
        f"preempting b: swap {num_tokens} tokens (the host still has them, it was on its way back)",
        f"preempting {runner.request_id}: recompute {num_computed} tokens (the prefix cache is reset)",
    ]
    driver.run()
    assert [request.output_token_ids for request in requests] == [expected_output(request) for request in requests]


def test_who_may_not_read_prefixes_does_not_look_them_up_on_the_host():
    driver = make_driver()
    driver.add("a", range(20), max_tokens=2, skip=True)
    driver.run()
    assert driver.scheduler.stats()["external_prefix_cache_queries"] == 0
    driver.add("b", range(20), max_tokens=2)
    driver.run()
    assert driver.scheduler.stats()["external_prefix_cache_queries"] > 0


def test_what_takes_longer_to_copy_than_to_compute_is_computed():
    driver = make_driver(num_host_chunks=20)
    driver.scheduler.swapping.costs = PreemptionCosts("auto", CopySpeed(0.001, 1.0))
    prompt = list(range(30))
    driver.add("first", prompt, max_tokens=2)
    driver.run()
    driver.add("other", range(100, 135), max_tokens=3)
    driver.run()
    driver.scheduler.note_step(num_requests=1, num_tokens=100, seconds=0.1)
    again = driver.add("again", prompt, max_tokens=2)
    driver.run()
    stats = driver.scheduler.stats()
    assert stats["swap_out_blocks"] > 0
    assert (stats["swap_in_blocks"], stats["external_prefix_cache_hits"]) == (0, 0)
    assert again.output_token_ids == expected_output(again)


def test_better_requests_wait_until_the_blocks_of_worse_ones_have_left():
    driver = make_driver(policy="priority", max_copies=1, chunk_size=1, num_host_chunks=20, copy_iterations=2)
    worse = driver.add("worse", range(20), max_tokens=18, priority=1)
    for _ in range(4):
        driver.step()
    better = driver.add("better", range(50, 80), max_tokens=4, priority=0)
    driver.step()
    assert worse.status is SWAPPING_OUT
    assert better.status is RequestStatus.WAITING
    driver.run()
    assert worse.num_preemptions == 1
    for request in (worse, better):
        assert request.output_token_ids == expected_output(request)
    assert_all_back(driver)
