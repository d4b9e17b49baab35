"""One client's flood delays its own requests, not those of others."""

from collections import Counter

import pytest

from pagedjax.scheduling.fair_share import FairShare
from tests.scheduling.fake_device import Driver, expected_output

A, B = ("a", ""), ("b", "")


def flood(driver, client, count, *, name, **options):
    return [driver.add(f"{name}{i}", [i, len(name), 3], client=client, **options) for i in range(count)]


def served(driver, num_steps):
    """Tokens that each key and user got in so many steps."""
    counts = Counter()
    for _ in range(num_steps):
        for share in driver.step().scheduled:
            counts[share.request.client] += share.num_scheduled_tokens
    return counts


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_newcomer_does_not_wait_behind_a_flood(policy):
    driver = Driver(max_num_seqs=2, policy=policy)
    flood(driver, A, 40, name="flood")
    driver.step()
    newcomer = driver.add("newcomer", [1, 2], client=B)
    for _ in range(20):
        driver.step()
    assert newcomer.is_finished
    assert newcomer.output_token_ids == expected_output(newcomer)
    driver.run()


def test_two_keys_that_both_flood_get_the_same_however_much_each_sends():
    driver = Driver(max_num_seqs=4, num_blocks=200)
    flood(driver, A, 120, name="a")
    flood(driver, B, 40, name="bb")
    counts = served(driver, 100)
    assert counts[A] == pytest.approx(counts[B], rel=0.2)


def test_users_of_one_key_share_what_the_key_has():
    driver = Driver(max_num_seqs=4, num_blocks=200)
    for i in range(80):
        for client in (("a", "u"), ("a", "v"), B):
            driver.add(f"{client}{i}", [i, 2, 3], client=client)
    counts = served(driver, 160)
    assert counts["a", "u"] == pytest.approx(counts["a", "v"], rel=0.25)
    assert counts["a", "u"] + counts["a", "v"] == pytest.approx(counts[B], rel=0.35)


def test_a_newcomer_does_not_wait_behind_a_flood_of_its_own_key():
    driver = Driver(max_num_seqs=2)
    flood(driver, ("a", "u"), 40, name="flood")
    driver.step()
    newcomer = driver.add("newcomer", [1, 2], client=("a", "v"))
    for _ in range(20):
        driver.step()
    assert newcomer.is_finished
    driver.run()


def test_tokens_that_were_not_generated_are_not_held_against_a_client():
    share = FairShare()
    share.stamp(A, 1000)
    share.give_back(A, 990)
    assert share.stamp(A, 10) == 10


def test_one_client_alone_is_served_in_the_order_of_arrival():
    driver = Driver(max_num_seqs=1)
    requests = flood(driver, A, 12, name="a", max_tokens=2)
    order = [share.request for output in driver.steps() for share in output.scheduled if share.is_new_row]
    assert order == requests


def test_idle_time_earns_no_credit():
    share = FairShare()
    for _ in range(100):
        share.note_started(share.stamp(A, 10))
    assert share.stamp(B, 10) == 990


def test_clients_that_are_no_longer_ahead_are_forgotten():
    share = FairShare()
    for i in range(10_000):
        share.note_started(share.stamp((str(i), ""), 1) + 1)
    assert len(share._ends) < 200
