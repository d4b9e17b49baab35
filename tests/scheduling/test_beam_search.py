"""The rules of beam search, on candidates written by hand; that they are transformers' is shown with whole models."""

import math
from itertools import product

import pytest

from pagedjax.scheduling.beam_search import BeamSearch, Candidates

EOS, VOCABULARY = 0, 6


def logprobs_after(tokens):
    """A distribution over the vocabulary that depends on the whole sequence."""
    weights = [
        1 + (7 * sum((i + 1) * (t + 3) for i, t in enumerate(tokens)) + 5 * v * v) % 11 for v in range(VOCABULARY)
    ]
    return [math.log(weight / sum(weights)) for weight in weights]


def candidates_after(tokens):
    ranked = sorted(range(VOCABULARY), key=lambda v: -logprobs_after(tokens)[v])
    return Candidates(ranked, [logprobs_after(tokens)[v] for v in ranked])


def run(width, **options):
    search = BeamSearch(width, **{"max_tokens": 4, "ending_token_ids": {EOS}} | options)
    while not search.is_over:
        before = [tokens_of(one) for one in search.running]
        numbers = search.advance([candidates_after(tokens) for tokens in before])
        assert [before[n] for n in numbers] == [tokens_of(one)[:-1] for one in search.running]
    return search


def tokens_of(hypothesis):
    return [one.token_id for one in hypothesis.tokens()]


def all_hypotheses(max_tokens):
    """Everything that a search without a limit on its width would find."""
    for length in range(1, max_tokens + 1):
        for tokens in product(range(VOCABULARY), repeat=length):
            is_end = tokens[-1] == EOS or length == max_tokens
            if is_end and EOS not in tokens[:-1]:
                yield list(tokens), sum(logprobs_after(tokens[:i])[t] for i, t in enumerate(tokens))


@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.0])
def test_a_search_as_wide_as_all_there_is_finds_the_best(length_penalty):
    search = run(5, max_tokens=2, length_penalty=length_penalty, early_stopping="never")
    best = max((total / len(tokens) ** length_penalty, tokens) for tokens, total in all_hypotheses(2))
    assert (search.finished[0].score, tokens_of(search.finished[0].hypothesis)) == (pytest.approx(best[0]), best[1])


def test_the_best_of_one_beam_is_what_greedy_decoding_gives():
    tokens = []
    while len(tokens) < 4 and EOS not in tokens:
        tokens.append(candidates_after(tokens).token_ids[0])
    assert tokens_of(run(1).finished[0].hypothesis) == tokens


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize("width", [1, 2, 3, 5])
def test_as_many_as_the_search_is_wide_are_returned_best_first(width, early_stopping):
    finished = run(width, early_stopping=early_stopping).finished
    assert len(finished) == width
    assert finished == sorted(finished, key=lambda one: -one.score)
    for hypothesis, score in finished:
        tokens = tokens_of(hypothesis)
        assert tokens[-1] == EOS or len(tokens) == 4
        assert EOS not in tokens[:-1]
        total = sum(logprobs_after(tokens[:i])[token] for i, token in enumerate(tokens))
        assert (hypothesis.total, score) == (pytest.approx(total), pytest.approx(total / len(tokens)))


def test_early_stopping_ends_at_the_width_and_never_goes_on_while_longer_ones_may_be_better():
    lengths = {}
    for early_stopping in (True, False, "never"):
        search = BeamSearch(2, max_tokens=50, ending_token_ids={EOS}, length_penalty=1.0, early_stopping=early_stopping)
        steps = 0
        while not search.is_over:
            steps += 1
            sure = Candidates([1, EOS, 2, 3], [-0.6, -1.0, -1.2, -3.0])
            search.advance([sure] * len(search.running))
        lengths[early_stopping] = steps
    assert lengths[True] < lengths["never"] == 50


def test_min_tokens_ban_what_would_end_a_hypothesis():
    ends_at_once = Candidates([EOS, 1, 2], [-0.1, -3.0, -4.0])
    search = BeamSearch(2, max_tokens=5, ending_token_ids={EOS}, min_tokens=2)
    for _ in range(2):
        search.advance([ends_at_once] * len(search.running))
        assert not search.finished
    search.advance([ends_at_once] * 2)
    assert [tokens_of(one.hypothesis) for one in search.finished] == [[1, 1, EOS], [1, 2, EOS]]


def test_each_token_remembers_its_probability_and_rank():
    search = run(3)
    for hypothesis, _ in search.finished:
        tokens = tokens_of(hypothesis)
        for i, one in enumerate(hypothesis.tokens()):
            assert one.logprob == pytest.approx(logprobs_after(tokens[:i])[tokens[i]])
            assert candidates_after(tokens[:i]).token_ids[one.rank - 1] == tokens[i]
