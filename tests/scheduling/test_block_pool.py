"""Blocks are counted, reused in the right order and revived with their content."""

import pytest

from pagedjax.scheduling.block_pool import BlockPool
from pagedjax.scheduling.prefix_cache import PrefixCache
from tests.scheduling.fake_device import make_request


def make_pool(num_blocks):
    return BlockPool(num_blocks, PrefixCache(block_size=2))


def cache_blocks(pool, block_ids, first_token=0):
    """Register the blocks as those of a computed prompt."""
    request = make_request("a", [first_token] * (2 * len(block_ids)))
    request.block_ids = block_ids
    request.num_computed_tokens = request.num_tokens
    pool.prefix_cache.register(request)


def test_every_block_but_the_null_block_is_handed_out_once():
    pool = make_pool(5)
    block_ids = pool.allocate(4)
    assert sorted(block_ids) == [1, 2, 3, 4]
    assert (pool.num_free, pool.num_used, pool.capacity) == (0, 4, 4)
    pool.check_integrity([block_ids])


def test_a_block_is_free_only_after_its_last_holder_released_it():
    pool = make_pool(3)
    block_ids = pool.allocate(1)
    pool.retain(block_ids)
    pool.release(block_ids)
    assert pool.num_used == 1
    pool.check_integrity([block_ids])
    pool.release(block_ids)
    assert pool.num_used == 0
    pool.check_integrity([])


def test_blocks_without_content_are_reused_before_cached_ones():
    pool = make_pool(6)
    cached, plain = pool.allocate(3), pool.allocate(2)
    cache_blocks(pool, cached)
    pool.release(cached)
    pool.release(plain)
    assert sorted(pool.allocate(2)) == sorted(plain)
    assert len(pool.prefix_cache) == 3


def test_the_least_recently_released_prefix_is_evicted_first_from_its_tail():
    pool = make_pool(5)
    old, young = pool.allocate(2), pool.allocate(2)
    cache_blocks(pool, old, first_token=1)
    cache_blocks(pool, young, first_token=2)
    pool.release(old)
    pool.release(young)
    assert pool.allocate(3) == [old[1], old[0], young[1]]
    assert young[0] in pool.prefix_cache
    assert len(pool.prefix_cache) == 1


def test_a_revived_block_keeps_its_content_and_cannot_be_allocated():
    pool = make_pool(4)
    block_ids = pool.allocate(2)
    cache_blocks(pool, block_ids)
    pool.release(block_ids)
    assert pool.num_idle(block_ids) == 2
    pool.retain(block_ids)
    assert pool.num_idle(block_ids) == 0
    assert pool.allocate(1) == [3]
    assert all(block_id in pool.prefix_cache for block_id in block_ids)
    pool.check_integrity([block_ids, [3]])


def test_being_used_again_makes_a_prefix_young():
    pool = make_pool(3)
    first, second = pool.allocate(1), pool.allocate(1)
    cache_blocks(pool, first, first_token=1)
    cache_blocks(pool, second, first_token=2)
    pool.release(first)
    pool.release(second)
    pool.retain(first)
    pool.release(first)
    assert pool.allocate(1) == second


def test_releasing_frees_what_nobody_else_holds():
    pool = make_pool(6)
    shared, mine, theirs = pool.allocate(1), pool.allocate(2), pool.allocate(1)
    pool.retain(shared)
    assert pool.freed_by([[*shared, *mine]]) == set(mine)
    assert pool.freed_by([[*shared, *mine], [*shared, *theirs]]) == {*shared, *mine, *theirs}
    assert pool.freed_by([]) == set()


def test_allocating_more_than_is_free_is_refused_whole():
    pool = make_pool(3)
    with pytest.raises(AssertionError, match="3 blocks wanted, 2 free"):
        pool.allocate(3)
    assert pool.num_free == 2


def test_releasing_twice_is_refused():
    pool = make_pool(3)
    block_ids = pool.allocate(1)
    pool.release(block_ids)
    with pytest.raises(AssertionError, match="released more often"):
        pool.release(block_ids)


@pytest.mark.parametrize("holders", [[], [[1], [1]], [[2]]])
def test_the_integrity_check_notices_a_wrong_holder(holders):
    pool = make_pool(3)
    assert pool.allocate(1) == [1]
    with pytest.raises(AssertionError, match="reference counts"):
        pool.check_integrity(holders)
