"""A max_model_len that nobody uses is noticed once, with numbers and the flag to set."""

import pytest

from pagedjax.length_hint import NUM_REQUESTS, LengthHint


def hints(max_model_len, lengths):
    hint = LengthHint(max_model_len)
    return [text for length in lengths if (text := hint.note(length)) is not None]


def test_requests_far_below_the_limit_are_a_hint_once():
    lengths = [*range(801, 1001)] * 3
    (text,) = hints(131072, lengths)
    assert "max_model_len is 131,072" in text
    assert f"99 % of the last {NUM_REQUESTS} requests had 998 tokens or less" in text
    assert "--max-model-len 1198 " in text


def test_one_long_request_in_a_hundred_does_not_hide_it():
    assert len(hints(131072, [100] * (NUM_REQUESTS - 2) + [100_000] * 2)) == 1
    assert hints(131072, [100] * (NUM_REQUESTS - 3) + [100_000] * 3) == []


@pytest.mark.parametrize("lengths", [[1000] * (NUM_REQUESTS - 1), [1000] * 1000])
def test_few_requests_or_long_ones_are_none(lengths):
    assert hints(4096, lengths) == []


def test_a_later_change_is_noticed():
    assert len(hints(4096, [4000] * NUM_REQUESTS + [10] * NUM_REQUESTS)) == 1
