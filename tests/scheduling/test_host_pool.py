"""Host memory is handed out in chunks, kept while somebody needs it, and reused when only prefixes are in it."""

import pytest

from pagedjax.scheduling.host_pool import HostPool

A, B, C = b"a", b"b", b"c"


def test_a_chunk_serves_one_allocation_of_any_size_up_to_its_own():
    pool = HostPool(2, 4)
    first, second = pool.allocate(3), pool.allocate(4)
    assert len(first) == 3
    assert len({slot // 4 for slot in first}) == len({slot // 4 for slot in second}) == 1
    assert (pool.num_held, pool.num_available) == (2, 0)
    pool.check_integrity([first, second])
    pool.release(first)
    assert (pool.num_held, pool.num_available) == (1, 1)
    with pytest.raises(AssertionError, match="differ from what requests hold"):
        pool.check_integrity([first, second])


def test_a_prefix_is_found_until_its_chunk_is_needed_the_least_recently_used_first():
    pool = HostPool(2, 1)
    for digest in (A, B):
        slots = pool.allocate(1)
        pool.register(slots[0], digest)
        pool.release(slots)
    slot = pool.find(A)
    pool.retain([slot])
    pool.release([slot])  # used again, so that B is the older one
    assert pool.num_held == 0
    pool.allocate(1)
    assert pool.find(B) is None
    assert pool.find(A) == slot


def test_a_held_prefix_is_never_evicted():
    pool = HostPool(2, 1)
    slots = pool.allocate(1)
    pool.register(slots[0], A)
    other = pool.allocate(1)
    assert pool.num_available == 0
    pool.release(other)
    pool.allocate(1)
    assert pool.find(A) == slots[0]


def test_of_equal_blocks_the_first_one_is_found():
    pool = HostPool(2, 1)
    first, second = pool.allocate(1), pool.allocate(1)
    pool.register(first[0], A)
    pool.register(second[0], A)
    assert pool.find(A) == first[0]
    pool.release(second)
    pool.release(first)
    pool.check_integrity([])
    assert (pool.num_available, pool.num_cached_blocks) == (2, 1)


def test_what_a_failed_copy_should_have_brought_is_lost_for_those_who_hold_it():
    pool = HostPool(2, 2)
    slots = pool.allocate(2)
    pool.register(slots[0], A)
    pool.lose(pool.chunk_of(slots[0]))
    assert pool.find(A) is None
    assert [pool.is_lost(slot) for slot in slots] == [True, True]
    pool.release(slots)
    pool.check_integrity([])
    again = pool.allocate(1)
    assert not pool.is_lost(again[0])


def test_forgotten_digests_free_their_chunk_when_the_last_one_goes():
    pool = HostPool(1, 3)
    slots = pool.allocate(3)
    for slot, digest in zip(slots, (A, B, C), strict=True):
        pool.register(slot, digest)
    pool.release(slots)
    pool.forget([A, B, b"unknown"])
    assert pool.find(C) == slots[2]
    pool.forget([C])
    pool.check_integrity([])
    assert pool.num_cached_blocks == 0
    assert pool.num_available == 1


def test_clearing_leaves_what_is_held_and_nothing_to_find():
    pool = HostPool(2, 1)
    held, cached = pool.allocate(1), pool.allocate(1)
    for slots, digest in ((held, A), (cached, B)):
        pool.register(slots[0], digest)
    pool.release(cached)
    pool.clear()
    pool.check_integrity([held])
    assert pool.find(A) is pool.find(B) is None
