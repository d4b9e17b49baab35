"""Reasoning is taken apart from the answer, wherever the text is cut."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servers.reasoning import ReasoningParser, reasoning_tokens, state_after


def joined(state, pieces):
    parser = ReasoningParser(state)
    parts = [*map(parser.push, pieces), parser.finish()]
    return "".join(part.reasoning for part in parts), "".join(part.content for part in parts)


@pytest.mark.parametrize(
    ("state", "answer", "expected"),
    [
        ("open", "\nthoughts\n</think>\n\nanswer\n", ("thoughts", "answer\n")),
        ("open", "<think>\nthoughts</think>answer", ("thoughts", "answer")),
        ("open", "thoughts without an end  ", ("thoughts without an end", "")),
        ("open", "a </thi b </think", ("a </thi b </think", "")),
        ("open", "</think>answer", ("", "answer")),
        ("open", " <thi", ("<thi", "")),
        ("undecided", "\n<think>\n\n</think>\n\nanswer", ("", "answer")),
        ("undecided", "<think>thoughts</think> a </think> b", ("thoughts", "a </think> b")),
        ("undecided", " answer <think>no</think>", ("", " answer <think>no</think>")),
        ("undecided", "<thi", ("", "<thi")),
        ("undecided", "", ("", "")),
        ("closed", " answer </think>", ("", " answer </think>")),
    ],
)
def test_parts_of_answers(state, answer, expected):
    assert joined(state, [answer]) == expected
    assert joined(state, list(answer)) == expected


@given(
    fragments=st.lists(
        st.sampled_from(["<think>", "</think>", "<th", "</thi", "nk>", " ", "\n", "a", "é"]), max_size=12
    ),
    state=st.sampled_from(["open", "undecided", "closed"]),
    seed=st.integers(0, 2**32),
)
def test_no_cut_changes_the_parts(fragments, state, seed):
    answer, pieces, draw = "".join(fragments), [], random.Random(seed)
    rest = answer
    while rest:
        size = draw.randint(1, 5)
        pieces, rest = [*pieces, rest[:size]], rest[size:]
    assert joined(state, pieces) == joined(state, [answer])


@pytest.mark.parametrize(
    ("prompt", "parser", "state"),
    [
        ("<|im_start|>assistant\n", "qwen3", "undecided"),
        ("<|im_start|>assistant\n<think>\n", "qwen3", "open"),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", "qwen3", "closed"),
        ("<|Assistant|>", "deepseek_r1", "open"),
        ("<|Assistant|><think>\n", "deepseek_r1", "open"),
        ("<|Assistant|></think>", "deepseek_r1", "closed"),
    ],
)
def test_the_end_of_the_prompt_tells_how_an_answer_begins(prompt, parser, state):
    assert state_after(prompt, parser) == state


def test_structured_output_waits_for_the_end_of_reasoning():
    assert reasoning_tokens("closed") is None
    assert reasoning_tokens("open").is_open
    assert not reasoning_tokens("undecided").is_open
