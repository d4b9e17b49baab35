"""Drafts in the plan: how many a request gets, and bounds that are lowered when they are refused."""

import pytest

from pagedjax.scheduling.request import RequestStatus
from tests.scheduling.fake_device import Driver, expected_output


def decoding(driver, *args, **kwargs):
    """A request whose prompt has been computed and whose first token has been read."""
    request = driver.add(*args, **kwargs)
    num_drafts, driver.num_draft_tokens = driver.num_draft_tokens, 0
    driver.dispatch()
    driver.read()
    driver.num_draft_tokens = num_drafts
    return request


def test_a_verifying_request_computes_its_newest_token_and_its_drafts():
    driver = Driver(num_draft_tokens=3)
    request = decoding(driver, "a", range(5), max_tokens=20)
    (item,) = driver.dispatch().scheduled
    assert (item.num_scheduled_tokens, item.num_draft_tokens, item.context_len, item.samples) == (4, 3, 5, True)
    assert (request.num_tokens, request.num_tokens_bound, request.num_computed_tokens) == (6, 10, 9)


def test_refused_drafts_lower_the_bounds_to_the_truth():
    driver = Driver(num_draft_tokens=7)
    request = decoding(driver, "a", range(5), max_tokens=20)
    driver.dispatch()
    new = driver.read()["a"]
    assert 1 < len(new) < 8
    assert (request.num_tokens_bound, request.num_computed_tokens) == (request.num_tokens, request.num_tokens - 1)
    assert request.output_token_ids == expected_output(request)[: 1 + len(new)]


@pytest.mark.parametrize("num_ahead", [0, 1, 2])
@pytest.mark.parametrize("num_drafts", [1, 3, 7])
def test_outputs_are_those_without_drafts_in_fewer_steps(num_ahead, num_drafts):
    driver = Driver(num_draft_tokens=num_drafts, num_blocks=200)
    requests = [driver.add(str(i), [i % 3] * (1 + 3 * i), max_tokens=24, ignore_eos=i % 2 == 0) for i in range(8)]
    num_steps = sum(1 for _ in driver.steps(lookahead=num_ahead))
    assert [request.output_token_ids for request in requests] == [expected_output(request) for request in requests]
    assert driver.num_accepted > 20
    assert num_steps < 24 + 2 * num_ahead


def test_drafts_leave_room_for_the_last_token():
    driver = Driver(num_draft_tokens=5)
    decoding(driver, "a", range(5), max_tokens=4)  # one is known, three are to come: two drafts and the token after
    assert driver.dispatch().scheduled[0].num_draft_tokens == 2
    assert not driver.dispatch().scheduled  # what is in flight may be all


def test_drafts_do_not_preempt_and_take_no_block_that_is_missed():
    driver = Driver(num_draft_tokens=6, num_blocks=5, block_size=4, max_model_len=16)
    decoding(driver, "a", range(7), max_tokens=9).num_draft_tokens = 6
    taken = driver.scheduler.pool.allocate(2)
    (item,) = driver.scheduler.schedule().scheduled
    driver.scheduler.pool.release(taken)
    assert item.num_draft_tokens == 0
    assert driver.scheduler.num_preemptions == 0


def test_drafts_leave_each_request_behind_the_block_that_its_token_needs():
    """The first request's drafts took the last free block, and the second was preempted for want of it."""
    driver = Driver(num_draft_tokens=6, num_blocks=6, block_size=4, max_model_len=16)
    decoding(driver, "a", range(5), max_tokens=8)
    decoding(driver, "b", range(20, 28), max_tokens=2)
    output = driver.dispatch()
    assert not output.preempted
    assert [(item.request.request_id, item.num_draft_tokens) for item in output.scheduled] == [("a", 1), ("b", 0)]


def test_drafts_leave_a_prompt_behind_the_blocks_that_it_was_promised():
    driver = Driver(num_draft_tokens=6, num_blocks=8, block_size=4, max_model_len=24, max_num_batched_tokens=16)
    decoding(driver, "a", range(5), max_tokens=12)
    decoding(driver, "b", range(30, 48), max_tokens=2)  # of 18 tokens 15 are computed by now
    output = driver.dispatch()
    assert not output.preempted
    assert [(item.num_draft_tokens, item.num_scheduled_tokens) for item in output.scheduled] == [(1, 2), (0, 3)]


def test_blocks_of_refused_drafts_go_to_who_needs_them():
    """They stayed with the request that had drafted, and another was preempted while nobody used them."""
    driver = Driver(num_draft_tokens=7, num_blocks=6, block_size=4, max_model_len=16)
    drafter = decoding(driver, "a", [1], max_tokens=9)
    driver.dispatch()
    driver.read()
    assert (drafter.num_computed_tokens, len(drafter.block_ids)) == (2, 3)
    driver.num_draft_tokens = 0
    other = driver.add("b", range(20, 27), max_tokens=3)
    assert not any(output.preempted for output in driver.steps(lookahead=0))
    for request in (drafter, other):
        assert request.output_token_ids == expected_output(request)


def test_drafts_leave_each_request_behind_a_token_of_the_budget():
    driver = Driver(num_draft_tokens=6, max_num_seqs=3, max_num_batched_tokens=8)
    requests = [decoding(driver, str(i), [i], max_tokens=30) for i in range(3)]
    plan = driver.dispatch()
    assert plan.num_tokens == 8
    assert [item.num_draft_tokens for item in plan.scheduled] == [5, 0, 0]
    assert len(plan.scheduled) == len(requests)


def test_drafts_leave_half_of_the_budget_to_prompts():
    """They took all of it for as long as the others generated, and a prompt waited beside free rows and blocks."""
    driver = Driver(num_draft_tokens=7, max_num_batched_tokens=20, num_blocks=100)
    for i in range(3):
        decoding(driver, str(i), [i], max_tokens=100)
    assert driver.dispatch().num_draft_tokens == 17
    driver.read()
    prompt = driver.add("prompt", range(40), max_tokens=2)
    for _ in range(4):
        assert driver.dispatch().num_draft_tokens >= 6
        driver.read()
    assert prompt.num_computed_tokens >= 40


def test_a_request_that_was_preempted_with_drafts_in_flight_computes_everything_again():
    driver = Driver(num_draft_tokens=3)
    request = decoding(driver, "a", range(6), max_tokens=20)
    driver.dispatch()
    assert driver.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert (request.status, request.num_computed_tokens) == (RequestStatus.PREEMPTED, 0)
    driver.read()
    assert (request.num_computed_tokens, request.num_in_flight) == (0, 0)
    driver.run()
    assert request.output_token_ids == expected_output(request)


def test_only_confirmed_tokens_are_found_by_the_prefix_cache():
    driver = Driver(num_draft_tokens=7, block_size=2)
    first = driver.add("a", [1], max_tokens=25)
    driver.run()
    assert driver.num_accepted
    again = driver.add("b", first.all_token_ids, max_tokens=5)
    driver.run()  # the device checks that each slot holds the token it should
    assert again.num_cached_tokens >= first.num_tokens - 3
    assert again.output_token_ids == expected_output(again)


def test_the_caller_may_end_a_request_between_two_of_its_tokens():
    driver = Driver(num_draft_tokens=5)
    request = decoding(driver, "a", [1, 1], max_tokens=20)
    output = driver.dispatch()
    _, sampled = driver.in_flight.popleft()
    assert len(sampled["a"]) > 1
    for one, token_ids in driver.scheduler.confirm(output, sampled):
        assert token_ids == request.output_token_ids[-1:]
        driver.scheduler.finish(one, RequestStatus.FINISHED_STOPPED, stop_reason="word")
    assert request.output_token_ids == expected_output(request)[:2]
    driver.run()


def test_a_request_that_fails_keeps_the_tokens_before():
    driver = Driver(num_draft_tokens=3)
    request = decoding(driver, "a", range(5), max_tokens=20)
    driver.dispatch()
    right = driver.read(failed=["a"])["a"]
    assert right == expected_output(request)[1 : 1 + len(right)]
    assert right
    assert (request.status, request.output_token_ids[1:]) == (RequestStatus.FINISHED_ERROR, right)


def test_drafts_from_the_output_wait_until_it_is_known():
    driver = Driver(num_draft_tokens=2)
    request = decoding(driver, "a", range(5), max_tokens=20)
    request.is_drafted_from_output = True
    assert driver.dispatch().scheduled
    assert not driver.dispatch().scheduled
    driver.read()
    assert driver.dispatch().scheduled


def test_prompts_are_expected_of_who_runs_and_of_who_waits_and_may_come_in():
    driver = Driver(max_num_seqs=2, max_num_batched_tokens=8)
    expected, computed = [], []
    arrivals = {0: ("a", 12, 20), 4: ("b", 5, 6), 6: ("c", 6, 6)}  # the third needs the second's row
    for iteration in range(24):
        if iteration in arrivals:
            name, length, max_tokens = arrivals[iteration]
            driver.add(name, range(100 * iteration, 100 * iteration + length), max_tokens=max_tokens)
        expected.append(driver.scheduler.expects_prompts)
        output = driver.step()
        computed.append(any(item.num_scheduled_tokens > 1 for item in output.scheduled))
    assert expected == computed
    assert sum(computed) == 4


def test_no_prompt_is_expected_of_one_for_whom_there_are_no_blocks():
    driver = Driver(num_blocks=12, block_size=4)
    driver.add("a", range(24), max_tokens=16)
    driver.step()
    driver.add("b", range(100, 130), max_tokens=4)
    assert driver.scheduler.expects_prompts
    driver.step()
    assert not driver.scheduler.expects_prompts
    while driver.scheduler.running[0].request_id == "a":
        may_come_in = driver.scheduler.expects_prompts
        driver.step()
    assert may_come_in
    driver.run()
