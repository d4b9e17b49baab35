"""The one scheduling rule: budget, chunks, overlap, preemption, admission and the end of requests."""

import tracemalloc

import pytest

from pagedjax.errors import InvalidRequestError
from pagedjax.scheduling.request import RequestStatus
from pagedjax.scheduling.scheduler import Scheduler
from tests.scheduling.fake_device import EOS, Driver, confirm, expected_output, make_request


def shares(output):
    return {share.request.request_id: share.num_scheduled_tokens for share in output.scheduled}


def test_a_prompt_is_computed_in_chunks_that_end_anywhere_in_a_block():
    driver = Driver(max_num_batched_tokens=7, block_size=4)
    request = driver.add("a", range(17))
    outputs = [driver.step() for _ in range(4)]
    assert [shares(output)["a"] for output in outputs] == [7, 7, 3, 1]
    assert [output.scheduled[0].context_len for output in outputs] == [0, 7, 14, 17]
    assert [output.scheduled[0].samples for output in outputs] == [False, False, True, True]
    assert [len(output.scheduled[0].new_block_ids) for output in outputs] == [2, 2, 1, 0]
    driver.run()
    assert request.output_token_ids == expected_output(request)


def test_one_step_serves_prompts_and_single_tokens_together():
    driver = Driver(max_num_batched_tokens=10)
    driver.add("a", range(4))
    driver.step()
    driver.add("b", range(20, 32))
    assert shares(driver.step()) == {"a": 1, "b": 9}
    assert shares(driver.step()) == {"a": 1, "b": 3}


def test_a_long_chunk_leaves_a_token_to_every_request_behind_it():
    """A better request in the middle of a long prompt must not stall those that already generate."""
    driver = Driver(max_num_batched_tokens=8, policy="priority")
    driver.add("worse", range(4), max_tokens=20, priority=1)
    driver.step()
    driver.add("better", range(100, 130), priority=0)
    assert shares(driver.step()) == {"worse": 1, "better": 7}
    assert shares(driver.step()) == {"better": 7, "worse": 1}


def test_the_next_step_is_scheduled_before_the_last_one_is_read():
    driver = Driver()
    request = driver.add("a", range(4))
    driver.dispatch()
    driver.dispatch()
    assert (request.num_tokens, request.num_in_flight, request.num_computed_tokens) == (4, 2, 5)
    assert driver.read() == {"a": expected_output(request)[:1]}
    assert driver.read() == {"a": expected_output(request)[1:2]}


@pytest.mark.parametrize("num_ahead", [0, 1, 3])
def test_nothing_is_scheduled_past_max_tokens(num_ahead):
    driver = Driver()
    request = driver.add("a", range(5), max_tokens=4)
    num_scheduled = sum(output.num_tokens for output in driver.steps(lookahead=num_ahead))
    assert num_scheduled == 5 + 4 - 1  # the last token is never computed
    assert (request.status, request.stop_reason) == (RequestStatus.FINISHED_LENGTH, None)
    assert request.output_token_ids == expected_output(request)


def test_nothing_is_scheduled_past_max_model_len():
    driver = Driver(max_model_len=8)
    request = driver.add("a", range(5), max_tokens=100)
    assert sum(output.num_tokens for output in driver.steps()) == 7
    assert (request.num_tokens, request.status) == (8, RequestStatus.FINISHED_LENGTH)


def test_the_token_sampled_beyond_a_stop_is_dropped():
    driver = Driver()
    request = driver.add("a", range(4), stop_token_ids=expected_output(make_request("x", range(4)))[:1])
    driver.dispatch()
    driver.dispatch()
    assert driver.read() == {"a": request.output_token_ids}
    assert request.status == RequestStatus.FINISHED_STOPPED
    assert request.stop_reason == request.output_token_ids[0]
    assert driver.read() == {}
    assert len(request.output_token_ids) == 1
    driver.run()


def test_tokens_after_the_stop_in_one_step_are_dropped():
    """A step of speculative decoding returns several tokens; the request may end among them."""
    driver = Driver()
    request = driver.add("a", [1], max_tokens=10, stop_token_ids=[2], min_tokens=2)
    output = driver.scheduler.schedule()
    assert confirm(driver.scheduler, output, {"a": [2, 3, 2, 2]}) == [(request, [2, 3, 2])]
    assert request.output_token_ids == [2, 3, 2]


def test_eos_finishes_without_a_stop_reason():
    driver = Driver()
    requests = [driver.add(str(i), [i, i], max_tokens=50, ignore_eos=False) for i in range(8)]
    driver.run()
    assert [request.output_token_ids for request in requests] == [expected_output(request) for request in requests]
    stopped = [request for request in requests if request.status == RequestStatus.FINISHED_STOPPED]
    assert stopped
    assert all(request.output_token_ids[-1] == EOS and request.stop_reason is None for request in stopped)


def test_an_aborted_request_gives_its_blocks_back_at_the_next_schedule_only():
    driver = Driver()
    request = driver.add("a", range(10))
    driver.dispatch()
    assert driver.scheduler.abort("a") is request
    assert driver.scheduler.pool.num_used == 3
    assert driver.scheduler.has_work()
    driver.dispatch()
    assert driver.scheduler.pool.num_used == 0
    assert not driver.scheduler.has_work()
    assert driver.read() == {}
    assert (request.status, request.output_token_ids) == (RequestStatus.FINISHED_ABORTED, [])


def test_a_waiting_request_can_be_aborted():
    driver = Driver(max_num_seqs=1)
    driver.add("a", range(4))
    waiting = driver.add("b", range(4))
    driver.step()
    driver.scheduler.abort("b")
    driver.step()
    assert waiting.status is RequestStatus.FINISHED_ABORTED
    assert driver.scheduler.num_waiting == 0
    driver.run()


def test_the_first_end_of_a_request_stays():
    driver = Driver()
    request = driver.add("a", range(4))
    driver.step()
    driver.scheduler.finish(request, RequestStatus.FINISHED_STOPPED, "END")
    driver.scheduler.finish(request, RequestStatus.FINISHED_ERROR)
    assert driver.scheduler.abort("a") is None
    assert (request.status, request.stop_reason) == (RequestStatus.FINISHED_STOPPED, "END")
    driver.run()


def test_unknown_requests_cannot_be_aborted():
    assert Driver().scheduler.abort("a") is None


def test_blocks_of_a_finished_request_serve_another_while_its_last_step_is_in_flight():
    driver = Driver(num_blocks=4, block_size=4)
    driver.add("a", range(8), max_tokens=4)
    driver.dispatch()
    driver.dispatch()
    driver.scheduler.abort("a")
    other = driver.add("b", range(50, 59), max_tokens=3)
    assert shares(driver.dispatch()) == {"b": 9}  # the device checks what b reads
    driver.run()
    assert other.output_token_ids == expected_output(other)


def test_rows_are_reused_smallest_first():
    driver = Driver(max_num_seqs=4)
    for name in "abcd":
        driver.add(name, range(3), max_tokens=20)
    assert [share.row for share in driver.step().scheduled] == [0, 1, 2, 3]
    for name in "db":
        driver.scheduler.abort(name)
    driver.add("e", range(3))
    driver.add("f", range(3))
    assert {share.request.request_id: share.row for share in driver.step().scheduled} == {
        "a": 0,
        "c": 2,
        "e": 1,
        "f": 3,
    }


class TestPreemption:
    def test_the_last_to_arrive_is_preempted_and_resumes_where_it_was(self):
        driver = Driver(num_blocks=9, block_size=4, enable_prefix_caching=False)
        first = driver.add("first", range(10), max_tokens=12)
        second = driver.add("second", range(20, 30), max_tokens=12)
        driver.run()
        assert (first.num_preemptions, second.num_preemptions) == (0, 1)
        assert driver.scheduler.stats()["num_preemptions"] == 1
        assert [first.output_token_ids, second.output_token_ids] == [expected_output(first), expected_output(second)]

    def test_the_worst_priority_is_preempted_although_it_came_first(self):
        driver = Driver(num_blocks=9, block_size=4, policy="priority")
        worse = driver.add("worse", range(10), max_tokens=12, priority=5)
        better = driver.add("better", range(20, 30), max_tokens=12, priority=-1)
        driver.run()
        assert (worse.num_preemptions, better.num_preemptions) == (1, 0)

    def test_a_victim_is_in_no_plan_and_holds_nothing(self):
        driver = Driver(num_blocks=7, block_size=4)
        driver.add("a", range(11), max_tokens=10)
        victim = driver.add("b", range(20, 31), max_tokens=10)
        output = driver.step_until_preemption()
        assert output.preempted == [victim]
        assert shares(output) == {"a": 1}
        assert (victim.status, victim.row, victim.block_ids) == (RequestStatus.PREEMPTED, None, [])
        assert victim.num_computed_tokens == 0

    def test_the_last_request_preempts_itself_rather_than_a_better_one(self):
        driver = Driver(num_blocks=7, block_size=4)
        driver.add("better", range(9), max_tokens=8)
        victim = driver.add("victim", range(20, 30), max_tokens=8)
        output = driver.step_until_preemption()
        assert output.preempted == [victim]
        assert shares(output) == {"better": 1}
        assert not output.scheduled[0].new_block_ids, "it was the victim that needed a block"
        driver.run()
        assert victim.output_token_ids == expected_output(victim)

    def test_a_victim_is_not_admitted_again_in_the_step_that_ran_short(self):
        driver = Driver(num_blocks=8, block_size=4)
        driver.add("a", range(11), max_tokens=10)
        driver.add("b", range(20, 33), max_tokens=10)
        driver.add("c", [1], max_tokens=10)
        outputs = list(driver.steps(lookahead=0))
        assert any(output.preempted for output in outputs)
        assert not any({r.request_id for r in output.preempted} & shares(output).keys() for output in outputs)

    def test_a_victim_with_an_unread_token_waits_until_it_is_read(self):
        driver = Driver(num_blocks=7, block_size=4)
        driver.add("a", range(11), max_tokens=4)
        victim = driver.add("b", range(20, 31), max_tokens=10)
        driver.step_until_preemption()
        assert victim.num_in_flight > 0
        driver.scheduler.abort("a")
        assert not driver.dispatch().scheduled  # room enough, but the next token is unknown
        while driver.in_flight:
            driver.read()
        assert shares(driver.dispatch()).keys() == {"b"}
        driver.run()
        assert victim.output_token_ids == expected_output(victim)

    def test_a_victim_whose_unread_token_ends_it_is_never_resumed(self):
        driver = Driver(num_blocks=7, block_size=4)
        driver.add("a", range(11), max_tokens=10)
        victim = driver.add("b", range(20, 31), max_tokens=2)
        assert driver.step_until_preemption().preempted == [victim]
        assert victim.num_tokens_bound == victim.max_num_tokens
        driver.run()
        assert victim.status == RequestStatus.FINISHED_LENGTH
        assert victim.output_token_ids == expected_output(victim)

    def test_a_resumed_request_goes_before_new_ones(self):
        driver = Driver(num_blocks=9, block_size=4)
        driver.add("a", range(10), max_tokens=12)
        victim = driver.add("b", range(20, 30), max_tokens=12)
        assert driver.step_until_preemption().preempted == [victim]
        driver.add("c", range(40, 44), max_tokens=2)
        new_rows = [share for output in driver.steps() for share in output.scheduled if share.is_new_row]
        assert [share.request.request_id for share in new_rows] == ["b", "c"]

    def test_what_the_cache_still_has_is_not_computed_again(self):
        driver = Driver(num_blocks=9, block_size=4)
        driver.add("a", range(10), max_tokens=12)
        victim = driver.add("b", range(20, 30), max_tokens=12)
        driver.run()
        stats = driver.scheduler.stats()
        assert victim.num_preemptions == 1
        assert victim.num_cached_tokens == 0  # of the first admission
        assert stats["prefix_cache_resumed_hits"] >= 4
        assert (stats["prefix_cache_queries"], stats["prefix_cache_hits"]) == (20, 0)

    def test_what_a_resumed_request_computes_again_is_found_again(self):
        driver = Driver(num_blocks=9, block_size=4)
        driver.add("a", range(10), max_tokens=12)
        victim = driver.add("b", range(20, 30), max_tokens=12)
        driver.run()
        assert victim.num_preemptions == 1
        again = driver.add("c", victim.all_token_ids, max_tokens=1)
        driver.run()
        assert again.num_cached_tokens == 20


class TestPriority:
    """A waiting request takes rows and blocks from running ones of lower priority, if that is enough."""

    def test_a_better_request_takes_the_row_of_the_worst(self):
        driver = Driver(max_num_seqs=2, policy="priority")
        worst, worse = (driver.add(name, [i] * 3, priority=i) for i, name in ((9, "worst"), (5, "worse")))
        driver.step()
        driver.add("better", range(3), priority=1)
        output = driver.step()
        assert output.preempted == [worst]
        assert shares(output) == {"worse": 1, "better": 3}
        driver.run()
        assert worse.num_preemptions == 0
        assert worst.output_token_ids == expected_output(worst)

    def test_it_takes_the_blocks_of_as_many_as_it_needs(self):
        driver = Driver(num_blocks=9, block_size=4, policy="priority")
        for i in range(4):
            driver.add(str(i), [i] * 5, max_tokens=3, priority=i)
        driver.step()
        driver.add("better", range(50, 59), max_tokens=2, priority=0)
        output = driver.step()
        assert [request.request_id for request in output.preempted] == ["3", "2"]
        assert shares(output) == {"0": 1, "1": 1, "better": 9}
        driver.run()

    def test_nobody_is_preempted_for_a_request_that_would_not_fit_all_the_same(self):
        driver = Driver(num_blocks=9, block_size=4, policy="priority")
        driver.add("best", range(15), max_tokens=4, priority=0)
        driver.add("worse", range(20, 25), max_tokens=2, priority=5)
        driver.step()
        driver.add("long", range(50, 69), max_tokens=4, priority=1)
        assert driver.step().preempted == []
        driver.run()

    def test_blocks_that_a_better_one_shares_are_not_counted_on(self):
        """Preempting the worse one frees two of its five blocks, and three are needed."""
        driver = Driver(num_blocks=7, block_size=4, policy="priority")
        driver.add("best", range(13), max_tokens=3, priority=0)
        driver.step()
        driver.add("worse", [*range(12), 77], max_tokens=3, priority=5)
        driver.step()
        driver.add("new", range(50, 58), max_tokens=3, priority=1)
        assert driver.step().preempted == []
        driver.run()

    def test_a_block_that_a_better_one_takes_in_the_same_plan_is_not_counted_on(self):
        """The worse one was preempted, the best one took a block, and the new one was not admitted after all."""
        driver = Driver(num_blocks=9, block_size=4, policy="priority")
        driver.add("best", range(8), max_tokens=3, priority=0)
        driver.add("worse", range(20, 25), max_tokens=2, priority=5)
        driver.step()
        driver.add("new", range(50, 73), max_tokens=2, priority=1)
        assert driver.step().preempted == []
        driver.run()

    def test_equal_priority_is_no_reason(self):
        driver = Driver(max_num_seqs=1, policy="priority")
        driver.add("first", range(3), priority=1)
        driver.step()
        driver.add("second", range(3), priority=1)
        assert not any(output.preempted for output in driver.steps())

    def test_first_come_first_served_knows_no_priority(self):
        driver = Driver(max_num_seqs=1)
        driver.add("first", range(3), priority=9)
        driver.step()
        driver.add("second", range(3), priority=0)
        assert not any(output.preempted for output in driver.steps())


class TestOverload:
    """A pool that is too small ends in a queue, not in requests that throw each other out for ever."""

    @pytest.mark.parametrize("max_preemptions", [1, 2, 3])
    def test_nobody_is_preempted_more_often_than_the_limit(self, max_preemptions):
        driver = Driver(max_num_seqs=1, policy="priority", max_preemptions=max_preemptions)
        worst = driver.add("worst", [1, 2, 3], max_tokens=60, priority=9)
        for i in range(8):
            for _ in range(6):
                driver.step()
            driver.add(str(i), [i, 5, 6], max_tokens=2)
        driver.run()
        assert worst.num_preemptions == driver.scheduler.num_preemptions == max_preemptions
        assert worst.output_token_ids == expected_output(worst)

    def test_who_reached_the_limit_is_admitted_with_all_blocks_it_can_need(self):
        driver = Driver(num_blocks=9, block_size=4, max_preemptions=1)
        driver.add("first", range(10), max_tokens=12)
        victim = driver.add("victim", range(20, 30), max_tokens=12)
        driver.step_until_preemption()
        while victim.row is None:
            driver.step()
        assert len(victim.block_ids) == 6  # 22 tokens
        driver.run()
        assert victim.output_token_ids == expected_output(victim)

    def test_the_watermark_is_kept_free_for_those_that_run(self):
        driver = Driver(num_blocks=11, block_size=4, watermark=0.2)
        driver.add("a", range(5), max_tokens=16)
        driver.add("b", range(20, 33), max_tokens=2)
        driver.add("c", range(40, 49), max_tokens=2)
        assert shares(driver.step()).keys() == {"a", "b"}  # 6 of 10 blocks, c needs 3 and 2 stay free
        driver.run()

    def test_the_watermark_holds_nobody_back_in_a_pool_that_has_room_for_all(self):
        """The longest prompts in every row, as a benchmark of prefill sends them, all come in at once."""
        driver = Driver(num_blocks=41, block_size=4, max_num_seqs=8, max_num_batched_tokens=200, max_model_len=20,
                        watermark=0.2)  # fmt: skip
        for i in range(8):
            driver.add(str(i), [i] * 19, max_tokens=1)
        assert len(driver.step().scheduled) == 8
        driver.run()

    def test_the_watermark_holds_nobody_back_where_nobody_runs(self):
        driver = Driver(num_blocks=11, block_size=4, watermark=0.5)
        request = driver.add("a", range(36), max_tokens=4)
        assert shares(driver.step()) == {"a": 36}
        driver.run()
        assert request.output_token_ids == expected_output(request)


class TestPrefixHits:
    def test_a_second_equal_prompt_computes_only_what_follows_its_full_blocks(self):
        driver = Driver(block_size=4)
        driver.add("a", range(10))
        driver.run()
        request = driver.add("b", range(10))
        output = driver.step()
        assert (shares(output), output.scheduled[0].context_len) == ({"b": 2}, 8)
        assert output.scheduled[0].is_new_row
        assert output.scheduled[0].new_block_ids == request.block_ids
        assert request.num_cached_tokens == 8
        driver.run()
        assert request.output_token_ids == expected_output(request)

    def test_a_fully_cached_prompt_still_computes_its_last_block(self):
        driver = Driver(block_size=4)
        driver.add("a", range(8))
        driver.run()
        driver.add("b", range(8))
        assert shares(driver.step()) == {"b": 4}

    def test_equal_prompts_of_one_step_share_their_blocks(self):
        driver = Driver(block_size=4)
        requests = [driver.add(str(i), [*range(8), i], max_tokens=3) for i in range(4)]
        assert shares(driver.step()) == {"0": 9, "1": 1, "2": 1, "3": 1}
        assert len({tuple(request.block_ids[:2]) for request in requests}) == 1
        assert driver.scheduler.pool.num_used == 2 + 4
        driver.run()
        assert [r.output_token_ids for r in requests] == [expected_output(r) for r in requests]

    def test_a_chat_recomputes_new_tokens_and_less_than_a_block(self):
        driver = Driver(block_size=4, num_blocks=200, max_num_batched_tokens=200)
        history = list(range(9))
        for turn in range(6):
            request = driver.add(str(turn), history, max_tokens=7)
            num_known = 0 if turn == 0 else len(history) - 5 - 1  # the last sampled token was never computed
            num_computed = driver.step().num_tokens
            assert num_computed < len(history) - num_known + 4
            driver.run()
            history = [*request.all_token_ids, *range(100 * turn, 100 * turn + 5)]

    def test_free_cached_blocks_are_not_evicted_by_the_admission_that_hits_them(self):
        """The pool is just large enough: the new block must come from elsewhere than the revived ones."""
        driver = Driver(num_blocks=5, block_size=4)
        driver.add("a", range(13), max_tokens=1)
        driver.run()
        request = driver.add("b", [*range(12), 77], max_tokens=3)
        output = driver.step()
        assert (output.scheduled[0].context_len, shares(output)) == (12, {"b": 1})
        driver.run()
        assert request.output_token_ids == expected_output(request)

    def test_revived_blocks_count_as_taken_when_room_is_checked(self):
        """Three free blocks, two of which are the hit itself, have no room for two more."""
        driver = Driver(num_blocks=8, block_size=4)
        driver.add("a", range(8), max_tokens=1)
        driver.run()
        driver.add("holder", range(50, 62), max_tokens=4)
        driver.step()
        assert driver.scheduler.pool.num_free == 4
        driver.add("b", [*range(8), *range(80, 88)], max_tokens=4)
        assert "b" not in shares(driver.step())
        driver.run()

    def test_blocks_in_use_by_others_need_no_room(self):
        driver = Driver(num_blocks=8, block_size=4)
        driver.add("a", range(16), max_tokens=4)
        driver.step()
        driver.add("b", [*range(16), 7, 7], max_tokens=4)
        assert shares(driver.step()) == {"a": 1, "b": 2}
        driver.run()

    def test_prompt_logprobs_need_every_position_so_the_cache_is_not_read(self):
        driver = Driver(block_size=4)
        driver.add("a", range(10))
        driver.run()
        driver.add("b", range(10), skip=True)
        assert shares(driver.step()) == {"b": 10}
        assert driver.scheduler.stats()["prefix_cache_queries"] == 10

    def test_generated_blocks_are_found_too(self):
        driver = Driver(block_size=4)
        first = driver.add("a", range(6), max_tokens=7)
        driver.run()
        driver.add("b", [*first.all_token_ids, 1])
        driver.step()
        assert driver.scheduler.stats()["prefix_cache_hits"] == 12

    def test_generated_blocks_of_a_running_request_are_found(self):
        driver = Driver(block_size=4)
        first = driver.add("a", range(6), max_tokens=20)
        while first.num_tokens < 14:
            driver.step()
        driver.add("b", first.all_token_ids[:13])
        assert shares(driver.step()) == {"a": 1, "b": 1}

    @pytest.mark.parametrize(
        ("prompt", "num_lost"),
        [
            ([*range(6), 90, 91], 2),  # one full block, then the first half of the next
            (range(8), 3),  # all of it is cached, save that the last token must be computed
            (range(9), 0),
            ([0, 1, 2, 90, 91], 3),
            ([0, 1, 50, 89, 91], 3),  # another cached block is closer
            ([80, 81, 82, 83, 84], 0),
            ([0], 0),
        ],
    )
    def test_cached_tokens_lost_to_whole_blocks_are_counted(self, prompt, num_lost):
        driver = Driver(block_size=4)
        for i, cached in enumerate([range(12), [0, 1, 50, 90, 92], [0, 1, 70, 90, 92]]):
            driver.add(str(i), cached, max_tokens=1)
            driver.run()
        before = driver.scheduler.stats()["prefix_cache_partial_block_misses"]
        driver.add("b", prompt, max_tokens=1)
        driver.step()
        assert driver.scheduler.stats()["prefix_cache_partial_block_misses"] - before == num_lost

    def test_only_cached_blocks_that_are_reused_count_as_evicted(self):
        driver = Driver(num_blocks=7, block_size=4)
        driver.add("a", range(17), max_tokens=1)  # four cached blocks and a partial one, one block is never used
        driver.run()
        assert driver.scheduler.stats()["prefix_cache_evictions"] == 0
        driver.add("b", range(50, 65), max_tokens=1)
        driver.run()
        assert driver.scheduler.stats()["prefix_cache_evictions"] == 2
        assert driver.scheduler.reset_prefix_cache()
        assert driver.scheduler.stats()["prefix_cache_evictions"] == 2

    def test_switched_off_nothing_is_shared(self):
        driver = Driver(enable_prefix_caching=False)
        driver.add("a", range(10))
        driver.run()
        driver.add("b", range(10))
        assert shares(driver.step()) == {"b": 10}
        assert driver.scheduler.stats()["num_blocks_cached"] == 0

    def test_blocks_of_a_failed_request_are_not_found_again(self):
        driver = Driver()
        request = driver.add("a", range(10))
        driver.dispatch()
        assert driver.read(failed=["a"]) == {"a": []}
        assert request.status == RequestStatus.FINISHED_ERROR
        driver.add("b", range(10))
        assert shares(driver.dispatch()) == {"b": 10}

    def test_a_block_that_a_failing_step_filled_is_not_registered_when_it_is_released(self):
        driver = Driver(block_size=4)
        request = driver.add("a", range(7))
        driver.dispatch()
        driver.dispatch()
        driver.read()
        driver.read(failed=["a"])
        assert (request.num_computed_tokens, request.num_tokens) == (8, 8)
        driver.run()
        assert driver.scheduler.stats()["num_blocks_cached"] == 0

    def test_a_failure_in_the_middle_of_a_prompt_ends_the_request(self):
        driver = Driver(max_num_batched_tokens=4)
        request = driver.add("a", range(10))
        driver.dispatch()
        assert driver.read(failed=["a"]) == {"a": []}
        driver.run()
        assert request.status == RequestStatus.FINISHED_ERROR

    def test_the_cache_is_reset_only_while_nothing_runs(self):
        driver = Driver()
        driver.add("a", range(10), max_tokens=3)
        driver.step()
        assert not driver.scheduler.reset_prefix_cache()
        driver.run()
        assert driver.scheduler.reset_prefix_cache()
        driver.add("b", range(10))
        assert shares(driver.step()) == {"b": 10}

    @pytest.mark.parametrize("num_ahead", [0, 1, 2])
    def test_a_reset_may_take_running_requests_along(self, num_ahead):
        driver = Driver(block_size=4)
        requests = [driver.add(str(i), range(10 + i), max_tokens=12) for i in range(3)]
        for _ in range(4):
            driver.step(num_ahead)
        assert driver.scheduler.reset_prefix_cache(reset_running_requests=True)
        assert driver.scheduler.stats()["num_blocks_cached"] == driver.scheduler.pool.num_used == 0
        driver.run(lookahead=num_ahead)
        assert [r.num_preemptions for r in requests] == [1, 1, 1]
        assert driver.scheduler.stats()["prefix_cache_resumed_hits"] == 2 * 8  # of each other's new blocks
        assert [r.output_token_ids for r in requests] == [expected_output(r) for r in requests]

    def test_a_request_that_finished_before_a_reset_brings_nothing_back(self):
        driver = Driver(block_size=4)
        request = driver.add("a", range(7), max_tokens=2)
        driver.dispatch()
        driver.dispatch()
        driver.read()
        driver.read()
        assert request.is_finished
        assert driver.scheduler.stats()["num_blocks_cached"] == 2
        assert driver.scheduler.reset_prefix_cache()
        driver.run()
        assert driver.scheduler.stats()["num_blocks_cached"] == 0


class TestAdmission:
    def test_a_prompt_of_max_model_len_is_refused(self):
        driver = Driver(max_model_len=8)
        with pytest.raises(InvalidRequestError, match="prompt has 8 tokens, max_model_len is 8") as error:
            driver.add("a", range(8))
        assert error.value.param == "prompt"
        driver.add("b", range(7))

    def test_an_empty_prompt_is_refused(self):
        with pytest.raises(InvalidRequestError, match="prompt has 0 tokens"):
            Driver().add("a", [])

    def test_what_can_never_fit_the_pool_is_refused(self):
        driver = Driver(num_blocks=4, block_size=4)
        with pytest.raises(InvalidRequestError, match="may reach 13 tokens, the KV cache holds 12"):
            driver.add("a", range(5), max_tokens=8)
        driver.add("b", range(5), max_tokens=7)
        driver.run()

    def test_max_model_len_bounds_what_must_fit(self):
        driver = Driver(num_blocks=4, block_size=4, max_model_len=12)
        driver.add("a", range(5), max_tokens=1000)
        driver.run()

    def test_an_id_is_taken_until_its_request_finishes(self):
        driver = Driver()
        driver.add("a", range(5))
        with pytest.raises(InvalidRequestError, match="belongs to an unfinished request"):
            driver.add("a", range(5))
        driver.dispatch()
        driver.scheduler.abort("a")
        again = driver.add("a", range(20, 25))  # the old one is not even reaped
        driver.run()
        assert again.output_token_ids == expected_output(again)

    def test_a_refused_request_leaves_no_trace(self):
        driver = Driver(max_model_len=8)
        with pytest.raises(InvalidRequestError):
            driver.add("a", range(8))
        assert not driver.scheduler.has_work()

    def test_nobody_overtakes_the_head_of_the_queue(self):
        driver = Driver(num_blocks=9, block_size=4)
        driver.add("running", range(16), max_tokens=4)
        driver.step()
        driver.add("large", range(20, 40), max_tokens=4)
        driver.add("small", range(50, 52), max_tokens=4)
        assert shares(driver.step()) == {"running": 1}
        driver.run()

    def test_a_prompt_that_leaves_no_room_for_a_token_waits(self):
        """Admitted, it would be preempted by its first token."""
        driver = Driver(num_blocks=5, block_size=4)
        driver.add("a", range(5), max_tokens=3)
        driver.step()
        assert driver.scheduler.pool.num_free == 2
        driver.add("b", range(20, 28), max_tokens=4)
        assert shares(driver.step()) == {"a": 1}
        assert not any(output.preempted for output in driver.steps())

    def test_priority_decides_who_is_admitted(self):
        driver = Driver(max_num_seqs=1, policy="priority")
        for name, priority in [("c", 3), ("a", 1), ("b", 2)]:
            driver.add(name, range(3), max_tokens=1, priority=priority)
        assert [name for output in driver.steps() for name in shares(output)] == ["a", "b", "c"]

    def test_blocks_promised_to_one_long_prompt_are_not_given_to_another(self):
        driver = Driver(num_blocks=11, block_size=4, max_num_batched_tokens=8)
        driver.add("a", range(24), max_tokens=4)
        driver.add("b", range(40, 64), max_tokens=4)
        assert not any(output.preempted for output in driver.steps())

    def test_no_more_requests_run_than_there_are_rows(self):
        driver = Driver(max_num_seqs=2)
        for i in range(5):
            driver.add(str(i), [i, i, i], max_tokens=3)
        assert shares(driver.step()).keys() == {"0", "1"}
        assert (driver.scheduler.num_running, driver.scheduler.num_waiting) == (2, 3)
        driver.run()


def test_stats_count_what_happened():
    driver = Driver(num_blocks=11, block_size=4, max_num_seqs=2)
    for i in range(3):
        driver.add(str(i), range(10), max_tokens=5)
    driver.step()
    assert driver.scheduler.stats() == {
        "num_requests_running": 2,
        "num_requests_waiting": 1,
        "kv_cache_usage_perc": 0.4,
        "num_blocks_used": 4,
        "num_blocks_cached": 2,
        "num_blocks_pinned": 0,
        "num_preemptions": 0,
        "num_block_copies": 0,
        "prefix_cache_queries": 20,
        "prefix_cache_hits": 8,
        "prefix_cache_partial_block_misses": 0,
        "prefix_cache_resumed_queries": 0,
        "prefix_cache_resumed_hits": 0,
        "prefix_cache_evictions": 0,
        "num_requests_swapped": 0,
        **dict.fromkeys(driver.scheduler.swapping.stats(), 0),
    }


def test_less_than_half_a_block_a_sequence_is_wasted():
    driver = Driver(num_blocks=200, block_size=16, max_num_seqs=16, max_num_batched_tokens=4096)
    for i in range(16):
        driver.add(str(i), range(1000 * i, 1000 * i + 37 + 5 * i), max_tokens=48)
    requests = (share.request for output in driver.steps() for share in output.scheduled)
    num_wasted = [len(request.block_ids) * 16 - request.num_computed_tokens for request in requests]
    assert len(num_wasted) >= 16 * 48
    assert sum(num_wasted) / len(num_wasted) <= 8


def test_a_decode_step_costs_the_same_after_a_long_prompt():
    """Peak memory of one iteration for 256 requests: a single copy of their prompts would take 4 MB."""
    scheduler = Scheduler(
        num_blocks=40_000, block_size=16, max_num_seqs=256, max_num_batched_tokens=256 * 2048, max_model_len=4096
    )
    for i in range(256):
        scheduler.add_request(make_request(str(i), [i] * 2048, max_tokens=100))
    sampled = {request_id: [1] for request_id in scheduler.requests}
    confirm(scheduler, scheduler.schedule(), sampled)  # lists of tokens grow in large steps: they have room now
    tracemalloc.start()
    output = scheduler.schedule()
    confirm(scheduler, output, sampled)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert output.num_tokens == 256
    assert peak < 1 << 20


def test_the_integrity_check_notices_a_lost_request():
    driver = Driver()
    driver.add("a", range(4))
    driver.scheduler.waiting.clear()
    with pytest.raises(AssertionError, match="unfinished requests and the queues differ"):
        driver.scheduler.check_integrity()
