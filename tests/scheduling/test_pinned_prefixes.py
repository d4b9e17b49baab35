"""A pinned prefix outlives whatever else needs room, and never takes the room that a request was promised."""

import pytest

from pagedjax.errors import InvalidRequestError
from tests.scheduling.fake_device import Driver, expected_output, make_request

SYSTEM = [7] * 9  # two full blocks of four tokens


def pin(driver, token_ids=SYSTEM, **options):
    return driver.scheduler.pinned.pin(make_request("pin", token_ids, **options))


def unpin(driver, token_ids=SYSTEM):
    return driver.scheduler.pinned.unpin(make_request("unpin", token_ids))


def warm_driver(token_ids=SYSTEM, *, num_blocks=11, max_model_len=20):
    driver = Driver(num_blocks=num_blocks, block_size=4, max_model_len=max_model_len)
    driver.add("warm", token_ids, max_tokens=1)
    driver.run()
    return driver


def fill(driver, num_requests=3):
    """Compute prompts until every free block has other content."""
    for i in range(num_requests):
        driver.add(f"fill{i}", range(100 * i + 100, 100 * i + 119), max_tokens=1)
    driver.run()


def hits(driver, token_ids):
    request = driver.add("probe", token_ids, max_tokens=1)
    driver.run()
    assert request.output_token_ids == expected_output(request)
    return request.num_cached_tokens


@pytest.mark.parametrize(("is_pinned", "num_hit"), [(True, 8), (False, 0)])
def test_a_pinned_prefix_survives_a_full_pool(is_pinned, num_hit):
    driver = warm_driver()
    if is_pinned:
        assert pin(driver) == 8
    fill(driver)
    assert hits(driver, [*SYSTEM, 1, 2]) == num_hit


def test_an_unpinned_prefix_stays_until_its_blocks_are_needed():
    driver = warm_driver()
    pin(driver)
    fill(driver)
    assert unpin(driver)
    assert not unpin(driver)
    assert driver.scheduler.stats()["num_blocks_used"] == 0
    assert hits(driver, [*SYSTEM, 1, 2]) == 8
    fill(driver)
    assert hits(driver, [*SYSTEM, 1, 2]) == 0


def test_pinning_twice_is_pinning_once():
    driver = warm_driver()
    assert pin(driver) == pin(driver) == 8
    assert driver.scheduler.stats()["num_blocks_pinned"] == 2
    assert unpin(driver)
    assert driver.scheduler.pool.num_used == 0


def test_prefixes_that_begin_alike_share_their_pinned_blocks():
    driver = warm_driver([*SYSTEM, 7, 7, 7])
    pin(driver, [*SYSTEM, 7, 7, 7])
    pin(driver)
    assert driver.scheduler.stats()["num_blocks_pinned"] == 3
    driver.scheduler.check_integrity()
    assert unpin(driver, [*SYSTEM, 7, 7, 7])
    assert driver.scheduler.stats()["num_blocks_pinned"] == 2


def test_pins_leave_room_for_a_request_of_max_model_len():
    """A request that was accepted would wait for ever otherwise."""
    driver = warm_driver([7] * 16, num_blocks=8, max_model_len=17)
    with pytest.raises(InvalidRequestError, match=r"3 of 7 KV cache blocks would be pinned.*max_model_len needs 5"):
        pin(driver, [7] * 12)
    assert pin(driver, [7] * 11) == 8
    request = driver.add("long", range(100, 116), max_tokens=1)
    driver.run()
    assert request.output_token_ids == expected_output(request)


def test_what_is_not_cached_cannot_be_pinned():
    driver = warm_driver()
    with pytest.raises(InvalidRequestError, match="0 of the prefix's 2 full blocks are cached"):
        pin(driver, [8] * 9)
    with pytest.raises(InvalidRequestError, match="2 of the prefix's 3 full blocks are cached"):
        pin(driver, [7] * 12)
    with pytest.raises(InvalidRequestError, match="0 of the prefix's 2"):
        pin(driver, cache_salt="theirs")
    assert driver.scheduler.pool.num_used == 0


def test_less_than_a_block_cannot_be_pinned():
    driver = warm_driver()
    with pytest.raises(InvalidRequestError, match="prefix has 3 tokens, a block holds 4"):
        pin(driver, [7] * 3)
    assert not unpin(driver, [7] * 3)


def test_a_failed_request_that_shares_a_pinned_prefix_does_not_cost_it():
    driver = warm_driver()
    pin(driver)
    driver.add("bad", [*SYSTEM, 1, 2, 3, 4], max_tokens=4)
    driver.dispatch()
    driver.read(failed=["bad"])
    driver.run()
    assert hits(driver, [*SYSTEM, 1, 2]) == 8


def test_the_cache_is_not_reset_while_something_is_pinned():
    driver = warm_driver()
    pin(driver)
    assert not driver.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert unpin(driver)
    assert driver.scheduler.reset_prefix_cache()


def test_the_integrity_check_notices_a_pinned_block_that_was_released():
    driver = warm_driver()
    pin(driver)
    driver.scheduler.pool.release(driver.scheduler.pinned.block_tables()[0])
    with pytest.raises(AssertionError, match="reference counts"):
        driver.scheduler.check_integrity()
