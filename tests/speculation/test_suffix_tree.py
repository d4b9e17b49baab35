"""Drafts from repeated text are right, from one's own and from others' of the same key alone, in bounded memory."""

import numpy as np
import pytest

from pagedjax.speculation import suffix_tree
from pagedjax.speculation.suffix_tree import SuffixTreeProposer


def proposer(**options) -> SuffixTreeProposer:
    defaults = {"max_tree_depth": 24, "max_cached_requests": 100, "max_spec_factor": 1.0, "min_token_prob": 0.1}
    return SuffixTreeProposer(**(defaults | options))


def start(proposer: SuffixTreeProposer, name: str, prompt: list[int], *, key="k") -> None:
    proposer.start(name, len(prompt), key)
    proposer.read(name, prompt)


def replay(proposer: SuffixTreeProposer, name: str, prompt: list[int], output: list[int], *, key="k", most=8):
    """Decode `output` as an engine would, drafts accepted as far as they are right; return drafts, accepted, steps."""
    start(proposer, name, prompt, key=key)
    num_drafts = num_accepted = num_steps = done = 0
    while done < len(output):
        drafts = proposer.propose(name, most)
        assert len(drafts) <= most
        right = 0
        while right < min(len(drafts), len(output) - done) and drafts[right] == output[done + right]:
            right += 1
        num_drafts += min(len(drafts), len(output) - done)
        num_accepted += right
        num_steps += 1
        proposer.extend(name, output[done : done + right + 1])
        done += right + 1
    proposer.finish(name)
    proposer.keep(len(output))
    return num_drafts, num_accepted, num_steps


def text(seed: int, length: int, vocab_size: int = 500) -> list[int]:
    return np.random.default_rng(seed).integers(0, vocab_size, length).tolist()


def test_an_output_that_repeats_another_is_proposed_nearly_whole():
    tree, output = proposer(), text(0, 400)
    assert replay(tree, "a", [1, 2, 3, 4], output) == (0, 0, 400)
    num_drafts, num_accepted, num_steps = replay(tree, "b", [1, 2, 3, 4], output)
    assert num_accepted > 0.8 * num_drafts
    assert num_accepted > 0.8 * 400
    assert num_steps < 80


def test_edited_repetitions_are_accepted_above_four_fifths():
    """An answer with one token in 25 changed each time, as agents repeat themselves."""
    tree, rng, template = proposer(), np.random.default_rng(1), text(1, 300)
    drafts = accepted = 0
    for number in range(10):
        output = [token if rng.random() > 0.04 else int(rng.integers(500)) for token in template]
        num_drafts, num_accepted, _ = replay(tree, str(number), [7, 8, 9], output)
        if number:
            drafts, accepted = drafts + num_drafts, accepted + num_accepted
    assert accepted > 0.8 * drafts
    assert accepted > 0.6 * 9 * 300


def test_the_prompt_is_repeated_from():
    document = text(2, 200)
    num_drafts, num_accepted, num_steps = replay(proposer(), "a", [*document, 1, 2, 3], document[50:150])
    assert num_accepted > 0.8 * num_drafts
    assert num_steps < 30


def test_a_loop_in_the_output_is_followed_past_its_own_end():
    tree = proposer()
    start(tree, "a", [5, 6, 7] * 4)
    assert tree.propose("a", 8) == [5, 6, 7, 5, 6, 7, 5, 6]
    start(tree, "b", [9] * 8)
    assert tree.propose("b", 5) == [9] * 5


def test_text_without_repetition_gets_no_drafts():
    assert replay(proposer(), "a", list(range(100)), list(range(100, 300)))[0] == 0


def test_the_most_frequent_continuation_is_proposed():
    tree = proposer()
    for number, follower in enumerate([30, 31, 30, 31, 30]):
        replay(tree, str(number), [1], [20, 21, 22, follower, follower + 10, follower + 20])
    start(tree, "x", [1, 20, 21, 22])
    assert tree.propose("x", 3) == [30, 40, 50]


def test_the_longest_context_decides_before_the_most_frequent():
    tree = proposer()
    for number in range(5):
        replay(tree, str(number), [1], [20, 21, 22, 23, 90])
    replay(tree, "longer", [1], [19, 20, 21, 22, 23, 80])
    start(tree, "x", [19, 20, 21, 22, 23])
    assert tree.propose("x", 1) == [80]
    start(tree, "y", [18, 20, 21, 22, 23])
    assert tree.propose("y", 1) == [90]


def test_unlikely_continuations_are_left_out():
    def drafts(min_token_prob: float) -> list[int]:
        tree = proposer(min_token_prob=min_token_prob)
        for number in range(4):  # 30 in two of four, then 40 in one of these
            replay(tree, str(number), [1], [20, 21, 22, *([30, 40 + number] if number < 2 else [60 + number, 70])])
        start(tree, "x", [1, 20, 21, 22])
        return tree.propose("x", 3)

    assert drafts(0.6) == []
    assert drafts(0.4) == [30]
    assert drafts(0.2) == [30, 41]


def test_a_short_context_gives_few_drafts():
    output = text(3, 50)
    for factor, expected in ((1.0, 3), (2.0, 6), (0.5, 1)):
        tree = proposer(max_spec_factor=factor)
        replay(tree, "a", [1], output)
        start(tree, "b", [1, *output[10:13]])
        assert tree.propose("b", 20) == output[13 : 13 + expected]
    deep = proposer(max_tree_depth=5)
    replay(deep, "a", [1], output)
    start(deep, "b", [1, *output[10:20]])
    assert deep.propose("b", 20) == output[20:25]


@pytest.mark.parametrize("other", [("salt", "b"), ("other salt", "a"), (None, "a")])
def test_outputs_of_one_key_never_propose_for_another(other):
    tree, output = proposer(), text(4, 100)
    replay(tree, "a", [1, 2, 3], output, key=("salt", "a"))
    assert replay(tree, "b", [1, 2, 3], output, key=other)[0] == 0
    assert replay(tree, "c", [1, 2, 3], output, key=("salt", "a"))[1] > 80


def test_prompts_of_others_are_not_proposed():
    tree, document = proposer(), text(5, 100)
    replay(tree, "a", document, text(6, 20))
    assert replay(tree, "b", [1, 2, 3], document)[0] == 0


def test_an_output_is_kept_in_parts_each_of_which_serves_others_at_once():
    """All of it was copied before the next step, which took a quarter of a second for 100,000 tokens."""
    tree, output = proposer(), text(11, 100)
    start(tree, "a", [1, 2, 3])
    tree.extend("a", output)
    tree.finish("a")
    start(tree, "b", output[:3])  # reads the same text, always as far as it is kept
    for end in range(10, 100, 10):
        tree.keep(10)
        tree.extend("b", output[end - 7 : end - 2])
        assert tree.propose("b", 8) == output[end - 2 : end]
        tree.extend("b", output[end - 2 : end])
        assert tree.propose("b", 8) == []
        tree.extend("b", output[end : end + 3])
    tree.keep(1000)
    tree.extend("b", output[93:])
    assert tree.propose("b", 8) == []
    tree.finish("b")
    tree.keep(1000)
    assert replay(tree, "c", [1, 2, 3], output)[1] > 80


def test_no_more_outputs_wait_than_are_ever_kept(monkeypatch):
    monkeypatch.setattr(suffix_tree, "MAX_TOKENS", 100)
    tree = proposer()
    for number in range(20):
        start(tree, str(number), [1, 2, 3])
        tree.extend(str(number), text(number, 30))
        tree.finish(str(number))
    assert sum(output.texts.end - output.place for output in tree._waiting) == 90
    tree.keep(1000)
    assert (len(tree._waiting), tree._num_waiting) == (0, 0)
    assert replay(tree, "again", [1, 2, 3], text(2, 30))[1] > 20


def test_what_outputs_that_gave_way_took_is_freed_as_others_come():
    tree = proposer(max_cached_requests=1)
    for number in range(20):
        replay(tree, str(number), [1, 2, 3], text(number, 300))
        assert len(tree._outputs.token_ids) <= 1000
        assert len(tree._outputs._latest) <= 700


def test_the_oldest_outputs_give_way():
    tree, outputs = proposer(max_cached_requests=3), [text(10 + number, 60) for number in range(5)]
    for number, output in enumerate(outputs):
        replay(tree, str(number), [1, 2, 3], output)
    proposals = []
    for output in outputs:
        start(tree, "x", output[:10])
        proposals.append(tree.propose("x", 4))
    assert proposals == [[], [], *(output[10:14] for output in outputs[2:])]


def test_no_outputs_are_kept_if_none_may_be():
    tree, output = proposer(max_cached_requests=0), text(7, 100)
    replay(tree, "a", [1, 2, 3], output)
    assert replay(tree, "b", [1, 2, 3], output)[0] == 0


def test_memory_is_bounded_and_what_is_left_is_found(monkeypatch):
    monkeypatch.setattr(suffix_tree, "MAX_TOKENS", 1000)
    tree = proposer(max_cached_requests=10_000)
    for number in range(100):
        replay(tree, str(number), [1, 2, 3], text(number, 37))
        texts = tree._outputs
        assert len(texts.token_ids) == len(texts._earlier) == len(texts._contexts) <= 2001
        assert len(texts._latest) <= 1000
    assert replay(tree, "again", [1, 2, 3], text(99, 37))[1] > 25
    assert replay(tree, "too old", [1, 2, 3], text(0, 37))[1] == 0
    assert not tree._readers


def test_outputs_that_gave_way_leave_nothing_behind(monkeypatch):
    """Their beginnings were kept for as many requests as may be cached, and that may be any number."""
    monkeypatch.setattr(suffix_tree, "MAX_TOKENS", 100)
    tree = proposer(max_cached_requests=10**9)
    for number in range(200):
        replay(tree, str(number), [1, 2, 3], text(number, 9))
    assert 5 <= len(tree._begins) <= 10
    assert replay(tree, "again", [1, 2, 3], text(199, 9))[1] > 0


def test_an_output_longer_than_everything_kept_keeps_its_end(monkeypatch):
    monkeypatch.setattr(suffix_tree, "MAX_TOKENS", 100)
    tree, output = proposer(), text(8, 250)
    replay(tree, "a", [1, 2, 3], output)
    start(tree, "b", output[200:210])
    assert tree.propose("b", 4) == output[210:214]


def test_texts_that_vanish_under_a_reader_are_not_proposed(monkeypatch):
    monkeypatch.setattr(suffix_tree, "MAX_TOKENS", 100)
    tree, output = proposer(), text(9, 60)
    replay(tree, "a", [1, 2, 3], output)
    start(tree, "b", output[:10])
    assert tree.propose("b", 4) == output[10:14]
    replay(tree, "c", [4, 5, 6], text(10, 90))
    assert tree.propose("b", 4) == []
    tree.extend("b", output[10:14])
    assert tree.propose("b", 4) == []


def test_proposals_are_what_a_search_through_all_text_finds():
    """Over a small alphabet, against the plainest definition: the longest context, its followers counted."""
    rng = np.random.default_rng(3)
    tree = proposer(max_cached_requests=0, min_token_prob=0.5)
    own = rng.integers(0, 3, 10).tolist()
    start(tree, "a", own)
    num_proposed = 0
    for _ in range(300):
        drafts = tree.propose("a", 1)
        if drafts:
            num_proposed += 1
            assert drafts[0] in longest_followers(own)
        own.append(int(rng.integers(3)))
        tree.extend("a", own[-1:])
    assert num_proposed > 100


def longest_followers(own: list[int]) -> set[int]:
    """Every token that follows some context of at least three tokens that `own` ends with."""
    return {own[i] for i in range(3, len(own)) if own[i - 3 : i] == own[-3:]}
