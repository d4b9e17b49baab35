"""Equal prefixes are found, everything else is not."""

import hashlib

from pagedjax.scheduling.prefix_cache import PrefixCache
from tests.scheduling.fake_device import Driver, make_request


def computed(prompt_token_ids, block_ids, **options):
    request = make_request("a", prompt_token_ids, **options)
    request.block_ids = block_ids
    request.num_computed_tokens = request.num_tokens
    return request


def cache_with(*requests, block_size=4):
    cache = PrefixCache(block_size)
    for request in requests:
        cache.register(request)
    return cache


def test_the_longest_common_chain_of_full_blocks_is_found():
    cache = cache_with(computed(range(12), [7, 8, 9]))
    assert cache.match(make_request("b", [*range(8), 99, 99, 99, 99, 99])) == [7, 8]
    assert cache.match(make_request("b", range(13))) == [7, 8, 9]


def test_at_least_one_token_is_left_to_compute():
    cache = cache_with(computed(range(8), [7, 8]))
    assert cache.match(make_request("b", range(8))) == [7]
    assert cache.match(make_request("b", range(9))) == [7, 8]


def test_a_partial_block_is_never_found():
    cache = cache_with(computed(range(7), [7, 8]))
    assert cache.match(make_request("b", range(9))) == [7]


def test_equal_tokens_after_a_different_prefix_are_not_found():
    cache = cache_with(computed([1, 1, 1, 1, 5, 5, 5, 5], [7, 8]))
    assert cache.match(make_request("b", [2, 2, 2, 2, 5, 5, 5, 5, 0])) == []
    assert cache.match(make_request("b", [5, 5, 5, 5, 0])) == []


def test_a_salt_separates_the_whole_chain():
    cache = cache_with(computed(range(8), [7, 8], cache_salt="x"))
    assert cache.match(make_request("b", range(9), cache_salt="x")) == [7, 8]
    assert cache.match(make_request("b", range(9), cache_salt="y")) == []
    assert cache.match(make_request("b", range(9))) == []


def test_any_text_can_be_a_salt():
    """A lone surrogate, which JSON allows, has no UTF-8 encoding: hashing it must not raise."""
    cache = cache_with(computed(range(4), [7], cache_salt="\ud800"))
    assert cache.match(make_request("b", range(5), cache_salt="\ud800")) == [7]


def test_the_digest_is_sha256_over_parent_and_tokens():
    request = computed([1, 2, 300, 70000], [7], cache_salt="salt")
    cache_with(request)
    tokens = b"".join(token_id.to_bytes(4, "little") for token_id in (1, 2, 300, 70000))
    assert request.block_hashes == [hashlib.sha256(hashlib.sha256(b"salt").digest() + tokens).digest()]


def test_of_equal_blocks_the_first_registered_stays():
    cache = cache_with(computed(range(4), [7]), computed(range(4), [8]))
    assert cache.match(make_request("b", range(5))) == [7]
    assert 7 in cache
    assert 8 not in cache
    cache.check_integrity()


def test_forgetting_the_first_does_not_bring_back_a_duplicate():
    cache = cache_with(computed(range(4), [7]), computed(range(4), [8]))
    cache.forget([8])
    assert cache.match(make_request("b", range(5))) == [7]
    cache.forget([7])
    assert cache.match(make_request("b", range(5))) == []
    cache.check_integrity()


def test_a_chain_with_a_forgotten_block_ends_before_it():
    cache = cache_with(computed(range(12), [7, 8, 9]))
    cache.forget([8])
    assert cache.match(make_request("b", range(13))) == [7]


def test_only_known_tokens_are_registered():
    request = computed(range(7), [7, 8])
    request.num_computed_tokens = 8  # the eighth token is computed in flight, but was not read yet
    cache = cache_with(request)
    assert len(cache) == 1
    request.append(3)
    cache.register(request)
    assert cache.match(make_request("b", [*range(7), 3, 0])) == [7, 8]


def test_only_computed_tokens_are_registered():
    request = computed(range(8), [7, 8])
    request.num_computed_tokens = 6
    assert len(cache_with(request)) == 1


def test_each_block_is_hashed_once(monkeypatch):
    hashed = []
    sha256 = hashlib.sha256

    def counting(data):
        hashed.append(data)
        return sha256(data)

    monkeypatch.setattr(hashlib, "sha256", counting)
    cache = PrefixCache(4)
    request = computed(range(41), list(range(1, 12)))
    for _ in range(3):
        cache.match(request)
        cache.register(request)
    assert sum(len(data) > 32 for data in hashed) == 10  # the others are roots


def test_a_request_may_refuse_to_read_but_is_registered():
    cache = cache_with(computed(range(4), [7], skip=True))
    assert cache.match(make_request("b", range(5), skip=True)) == []
    assert cache.match(make_request("b", range(5))) == [7]


def test_a_disabled_cache_finds_and_hashes_nothing():
    cache = PrefixCache(4, enabled=False)
    request = computed(range(8), [7, 8])
    cache.register(request)
    assert cache.match(request) == []
    assert request.block_hashes == []
    assert len(cache) == 0


def test_clearing_forgets_everything():
    cache = cache_with(computed(range(8), [7, 8]))
    cache.clear()
    assert cache.match(make_request("b", range(9))) == []
    cache.check_integrity()


def test_fifty_requests_with_a_long_common_prefix_use_its_blocks_once():
    """At most 1.1 times what the prefix takes once beside each request's own last blocks."""
    driver, prefix = Driver(num_blocks=400, block_size=16, max_num_seqs=50, max_num_batched_tokens=1024), [0] * 500
    group = [driver.add(str(i), [*prefix, 1, i % 3, i % 2], 8) for i in range(50)]
    most = 0
    for _ in driver.steps():
        most = max(most, driver.scheduler.pool.num_used)
    num_full = len(prefix) // 16
    num_own = sum(-(-request.num_tokens // 16) - num_full for request in group)
    assert all(len(request.output_token_ids) == 8 for request in group)
    assert most <= 1.1 * (num_full + num_own)
