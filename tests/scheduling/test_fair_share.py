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


def test_a_key_gets_no_more_by_naming_another_user_with_each_request():
    """Each new user started at once: a key that made one up for each request got everything."""
    driver = Driver(max_num_seqs=2, num_blocks=200)
    for i in range(60):
        driver.add(f"a{i}", [i, 2, 3], client=("a", f"user {i}"))
    for i in range(60):
        driver.add(f"b{i}", [i, 9, 3], client=B)
    counts = served(driver, 100)
    total = Counter()
    for (key, _), count in counts.items():
        total[key] += count
    assert total["a"] == pytest.approx(total["b"], rel=0.2)


@pytest.mark.parametrize("users", [("",), ("u", "v", "w", "x", "y", "z")])
def test_who_comes_after_requests_that_ended_early_waits_behind_those_who_wait(users):
    """What came back to a client put its next request before those that it had sent long ago."""
    driver = Driver(max_num_seqs=1, num_blocks=200)
    stops = {"max_tokens": 100, "stop_token_ids": range(5)}  # at the first token
    requests = [driver.add(str(i), [i, 1], client=("a", users[i % len(users)]), **stops) for i in range(12)]
    order = []
    for output in driver.steps():
        order += [share.request for share in output.scheduled if share.is_new_row]
        if len(requests) < 24 and len(order) > 5:
            i = len(requests)
            requests.append(driver.add(str(i), [i, 1], client=("a", users[i % len(users)]), **stops))
    assert len(requests) == 24
    for user in users:
        served = [requests.index(request) for request in order if request.client[1] == user]
        assert served == sorted(served)
    assert all(abs(order.index(request) - i) <= 2 * (len(users) - 1) for i, request in enumerate(requests))


def test_tokens_that_were_not_generated_are_not_held_against_a_client():
    share = FairShare()
    share.give_back(A, share.stamp(A, 1000), 990)
    assert share.stamp(A, 10).start == 10


def test_what_comes_back_is_what_was_charged_whoever_has_come_meanwhile():
    share = FairShare()
    first = share.stamp(A, 100)
    assert share.stamp(A, 1000).start == 100
    for i in range(9):
        share.stamp(("a", str(i)), 100)
    share.give_back(A, first, 90)
    assert share.stamp(A, 1).start == 1010


def test_one_client_alone_is_served_in_the_order_of_arrival():
    driver = Driver(max_num_seqs=1)
    requests = flood(driver, A, 12, name="a", max_tokens=2)
    order = [share.request for output in driver.steps() for share in output.scheduled if share.is_new_row]
    assert order == requests


def test_idle_time_earns_no_credit():
    share = FairShare()
    for _ in range(100):
        share.note_started(share.stamp(A, 10).start)
    assert share.stamp(B, 10).start == 990


def test_clients_that_are_no_longer_ahead_are_forgotten():
    share = FairShare()
    for i in range(10_000):
        share.note_started(share.stamp((str(i), ""), 1).start + 1)
    assert len(share._clients) + len(share._newcomers) < 400
