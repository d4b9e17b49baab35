"""Stop strings are found wherever the text is cut, and nothing but a possible stop string is held back."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedjax.text.stop import StopStrings

FUZZ = settings(max_examples=200, deadline=None, derandomize=True)
ALPHABET = st.text(alphabet="ab\n", max_size=14)  # few letters, so that matches and near misses are common
STOPS = st.lists(st.text(alphabet="ab\n", min_size=1, max_size=5), max_size=4)


def whole_text_result(text, stops, include):
    """The definition: the match that ends first, the longest of those that end there."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def stream(pieces, stops, include):
    watcher = StopStrings(stops, include_stop_str_in_output=include)
    emitted = []
    for piece in pieces:
        result = watcher.push(piece)
        emitted.append(result.text_to_emit)
        if result.matched:
            return "".join(emitted), result.matched
    return "".join(emitted) + watcher.flush(), None


@FUZZ
@given(ALPHABET, STOPS, st.booleans(), st.data())
def test_any_split_of_a_text_gives_the_whole_texts_result(text, stops, include, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=len(text))))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert stream(pieces, stops, include) == whole_text_result(text, stops, include)


@FUZZ
@given(ALPHABET, STOPS)
def test_what_is_held_back_starts_a_stop_string_and_all_else_is_out(text, stops):
    watcher = StopStrings(stops, include_stop_str_in_output=False)
    emitted = ""
    for i, character in enumerate(text, 1):
        result = watcher.push(character)
        emitted += result.text_to_emit
        if result.matched:
            return
        held = text[len(emitted) : i]
        assert not held or any(stop.startswith(held) for stop in stops)


@FUZZ
@given(ALPHABET, STOPS)
def test_nothing_is_held_back_when_the_stop_string_is_part_of_the_output(text, stops):
    watcher = StopStrings(stops, include_stop_str_in_output=True)
    for character in text:
        result = watcher.push(character)
        assert result.text_to_emit == character
        if result.matched:
            return
    assert watcher.flush() == ""


@pytest.mark.parametrize(
    ("stops", "include", "emitted", "matched"),
    [
        (["abcd", "bc"], False, "xa", "bc"),  # bc ends first, though abcd starts first
        (["bc", "abc"], False, "x", "abc"),  # both end together: the longer
        (["bc", "abc"], True, "xabc", "abc"),
        (["d"], False, "xabc", "d"),
    ],
)
def test_the_first_end_wins_and_then_the_longer(stops, include, emitted, matched):
    assert stream(["xabcd"], stops, include) == (emitted, matched)
    assert stream("xabcd", stops, include) == (emitted, matched)


def test_a_near_miss_comes_out_as_soon_as_it_fails():
    watcher = StopStrings(["</answer>"], include_stop_str_in_output=False)
    assert watcher.push("1 </ans") == ("1 ", None)
    assert watcher.push("<") == ("</ans", None)
    assert watcher.flush() == "<"


def test_text_after_a_match_is_dropped():
    watcher = StopStrings(["."], include_stop_str_in_output=False)
    assert watcher.push("One. Two") == ("One", ".")
    assert watcher.push(" three") == ("", ".")
    assert watcher.flush() == ""


def test_a_stop_string_that_begins_before_it_may_match_ends_the_text_after():
    """Its first half was not watched, so that it never matched."""
    watch = StopStrings(["END"], include_stop_str_in_output=False)
    assert watch.push("xENDyE", may_match=False) == ("xENDy", None)
    assert watch.push("N", may_match=False) == ("", None)
    assert watch.push("D!") == ("", "END")
