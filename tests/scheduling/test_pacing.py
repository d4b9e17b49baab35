"""Prompts that come in beside requests that generate wait, or come in chunks, as the operator asked."""

import math

import pytest

from pagedjax.scheduling.pacing import Pacing
from tests.scheduling.fake_device import Driver, confirm, expected_output, make_request

GENERATING = make_request("g", [1, 2, 3])
GENERATING.num_computed_tokens = 3


def arrived(time):
    request = make_request("w", [1])
    request.arrival_time = time
    return request


BUCKETS = (16, 64, 256, 1024)


def target(seconds):
    return Pacing(target_seconds=seconds, token_buckets=BUCKETS)


def padded(num_tokens):
    return next(bucket for bucket in BUCKETS if bucket >= num_tokens)


def settle(pacing, seconds_of, num_steps=60):
    """Run steps of the largest chunk allowed, beside one request that generates; return their chunks and seconds."""
    steps = []
    for _ in range(num_steps):
        chunk = pacing.max_prompt_tokens([GENERATING])
        steps.append((chunk, seconds_of(chunk)))
        pacing.note_step(num_requests=1, num_tokens=1 + chunk, seconds=steps[-1][1])
    return steps


class TestDelay:
    def test_the_oldest_must_have_waited_for_its_share_of_the_last_prompt(self):
        pacing = Pacing(delay_factor=0.5)
        waiting = [arrived(10.0), arrived(10.9)]
        assert pacing.admits(waiting, 10.1, is_idle=False)  # no prompt was measured yet
        pacing.note_step(num_requests=2, num_tokens=100, seconds=2.0)
        pacing.note_step(num_requests=2, num_tokens=2, seconds=0.01)  # no prompt in it
        assert not pacing.admits(waiting, 10.99, is_idle=False)
        assert pacing.admits(waiting, 11.01, is_idle=False)

    def test_nobody_waits_for_an_idle_device_or_without_a_factor(self):
        for pacing, is_idle in ((Pacing(delay_factor=9.0), True), (Pacing(), False)):
            pacing.note_step(num_requests=1, num_tokens=100, seconds=1.0)
            assert pacing.admits([arrived(5.0)], 5.0, is_idle=is_idle)

    def test_prompts_of_a_burst_are_computed_together(self):
        """Steps take a second; one prompt arrives every 0.3 seconds while another request generates."""

        def prompts_a_step(factor):
            driver = Driver(max_num_seqs=64, pacing=Pacing(delay_factor=factor), num_blocks=600)
            driver.add("first", [9, 9], max_tokens=60)
            now, num_arrived, batches = 0.0, 0, []
            for _ in range(40):
                while num_arrived * 0.3 < min(now, 9.0):
                    request = make_request(str(num_arrived), [num_arrived, 1, 2], max_tokens=2)
                    request.arrival_time = num_arrived * 0.3
                    driver.scheduler.add_request(request)
                    num_arrived += 1
                output = driver.scheduler.schedule(now)
                confirm(driver.scheduler, output, driver.device.execute(output))
                driver.scheduler.pacing.note_step(
                    num_requests=len(output.scheduled), num_tokens=output.num_tokens, seconds=1.0
                )
                batches.append(sum(share.is_new_row for share in output.scheduled))
                now += 1.0
            assert sum(batches) == num_arrived + 1 == 31
            return sum(batches) / sum(map(bool, batches))

        assert prompts_a_step(1.5) > 1.5 * prompts_a_step(0.0)


class TestTarget:
    @pytest.mark.parametrize(("per_token", "bucket"), [(1e-6, 1024), (3e-5, 256), (1e-4, 64), (3e-4, 16)])
    def test_chunks_grow_to_the_largest_bucket_that_keeps_to_the_target(self, per_token, bucket):
        steps = settle(target(0.02), lambda chunk: 0.005 + per_token * padded(chunk + 1))
        assert {chunk for chunk, _ in steps[20:]} == {bucket - 1}

    def test_steps_that_are_too_slow_without_prompts_leave_prompts_the_smallest_bucket(self):
        steps = settle(target(0.02), lambda chunk: 0.03 + 1e-5 * chunk)
        assert {chunk for chunk, _ in steps} == {15}

    def test_one_slow_step_is_forgotten_in_the_end(self):
        pacing = target(0.02)
        before = settle(pacing, lambda chunk: 0.005 + 3e-5 * padded(chunk + 1))[-1][0]
        settle(pacing, lambda _: 0.05, num_steps=1)
        after = settle(pacing, lambda chunk: 0.005 + 3e-5 * padded(chunk + 1), num_steps=300)
        assert after[0][0] < before
        assert after[-1][0] == before

    def test_as_many_generating_requests_as_a_bucket_holds_take_the_next(self):
        assert target(0.02).max_prompt_tokens([GENERATING] * 16) == 64 - 16
        assert target(0.02).max_prompt_tokens([GENERATING] * 2000) == 1

    def test_prompts_have_no_limit_where_nobody_generates_or_no_target_is_set(self):
        assert target(0.02).max_prompt_tokens([make_request("p", [1, 2])]) is None
        assert Pacing().max_prompt_tokens([GENERATING]) is None

    def test_all_prompts_of_an_iteration_share_the_limit_and_all_come_to_an_end(self):
        driver = Driver(num_blocks=400, max_num_batched_tokens=256, pacing=target(0.001))
        first = driver.add("first", [7, 7], max_tokens=40)
        driver.step()
        others = [driver.add(str(i), [i] * 50, max_tokens=3) for i in range(4)]
        outputs = list(driver.steps())
        chunks = [sum(s.num_scheduled_tokens for s in o.scheduled if s.num_scheduled_tokens > 1) for o in outputs]
        assert max(chunks) == 15
        assert sum(bool(chunk) for chunk in chunks) >= math.ceil(4 * 50 / 15)
        assert all("first" in {s.request.request_id for s in out.scheduled} for out in outputs[:30])
        for request in [first, *others]:
            assert request.output_token_ids == expected_output(request)
