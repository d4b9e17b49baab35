"""Datasets: how many prompts of which lengths, from nothing or from a file."""

import json
from collections import Counter

import pytest

from pagedjax.bench.datasets import DatasetFlags, load_samples
from pagedjax.bench.lengths import Lengths
from pagedjax.errors import ConfigError
from tests.fakes import byte_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


def load(tokenizer=None, *, seed=0, vocab_size=100, **options):
    return load_samples(DatasetFlags(**options), seed=seed, vocab_size=vocab_size, tokenizer=tokenizer)


def test_random_lengths_are_fixed_unless_a_range_is_asked_for():
    samples = load(num_prompts=5, random_input_len=30, random_output_len=7)
    assert {(len(sample.token_ids), sample.output_len) for sample in samples} == {(30, 7)}


def test_a_range_is_uniform_with_both_ends():
    samples = load(num_prompts=4000, input_len="5:9", output_len="1:2")
    inputs = Counter(len(sample.token_ids) for sample in samples)
    assert set(inputs) == {5, 6, 7, 8, 9}
    assert all(700 < count < 900 for count in inputs.values())  # 800 each, standard deviation 25
    assert set(Counter(sample.output_len for sample in samples)) == {1, 2}


def test_range_ratio_spreads_both_ways_as_in_vllm():
    samples = load(num_prompts=3000, random_input_len=10, random_output_len=5, random_range_ratio=0.5)
    lens = {len(sample.token_ids) for sample in samples}
    assert (min(lens), max(lens)) == (5, 15)
    assert {sample.output_len for sample in samples} == set(range(2, 9))  # floor(2.5) to ceil(7.5)


def test_random_prompts_share_the_prefix_and_stay_in_the_vocabulary():
    samples = load(num_prompts=50, random_prefix_len=6, random_input_len=4, vocab_size=17)
    assert len({tuple(sample.token_ids[:6]) for sample in samples}) == 1
    assert len({tuple(sample.token_ids[6:]) for sample in samples}) > 45
    assert {token for sample in samples for token in sample.token_ids} == set(range(17))


def test_a_seed_fixes_the_prompts():
    assert load(num_prompts=3, seed=1) == load(num_prompts=3, seed=1) != load(num_prompts=3, seed=2)


def test_prefixes_repeat_equally_often():
    samples = load(
        dataset_name="prefix_repetition", num_prompts=11, prefix_repetition_num_prefixes=3,
        prefix_repetition_prefix_len=8, prefix_repetition_suffix_len=5, prefix_repetition_output_len=2,
    )  # fmt: skip
    prefixes = Counter(tuple(sample.token_ids[:8]) for sample in samples)
    assert sorted(prefixes.values()) == [3, 4, 4]
    assert {(len(sample.token_ids), sample.output_len) for sample in samples} == {(13, 2)}


def sharegpt(tmp_path, *pairs):
    path = tmp_path / "sharegpt.json"
    turns = [[{"from": "human", "value": question}, {"from": "gpt", "value": answer}] for question, answer in pairs]
    path.write_text(json.dumps([{"id": "x", "conversations": turn} for turn in [*turns, turns[0][:1]]]))
    return {"dataset_name": "sharegpt", "dataset_path": str(path)}


def test_sharegpt_takes_the_first_question_and_the_length_of_its_answer(tmp_path, tokenizer):
    options = sharegpt(tmp_path, ("question", "answers"), ("the other", "is longer"))
    samples = load(tokenizer, **options, num_prompts=2, disable_shuffle=True)
    assert [sample.text for sample in samples] == ["question", "the other"]
    assert [sample.output_len for sample in samples] == [7, 9]
    assert samples[0].token_ids == tokenizer.encode("question")


def test_sharegpt_leaves_out_what_vllm_leaves_out(tmp_path, tokenizer):
    options = sharegpt(tmp_path, ("abc", "long enough"), ("x" * 1025, "long enough"), ("fits", "abc"), ("fits", "fits"))
    samples = load(tokenizer, **options, oversample=False)
    assert [(sample.text, sample.output_len) for sample in samples] == [("fits", 4)]


def test_a_dataset_that_is_too_short_repeats_unless_told_not_to(tmp_path, tokenizer):
    options = sharegpt(tmp_path, ("first", "answer"), ("second", "answer"))
    assert len(load(tokenizer, **options, num_prompts=5)) == 5
    assert len(load(tokenizer, **options, num_prompts=5, oversample=False)) == 2


def custom(tmp_path, *lines):
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return {"dataset_name": "custom", "dataset_path": str(path), "oversample": False, "disable_shuffle": True}


def test_custom_lines_are_texts_or_ids_with_lengths_of_their_own(tmp_path, tokenizer):
    options = custom(tmp_path, {"prompt": "hi", "output_tokens": 3}, "", {"prompt": [1, 2]})
    text, ids = load(tokenizer, **options, custom_output_len=9)
    assert (text.text, text.output_len) == ("hi", 3)
    assert text.token_ids == tokenizer.encode("[user]hi[assistant]")
    assert (ids.token_ids, ids.text, ids.output_len) == ([1, 2], None, 9)
    plain, _ = load(tokenizer, **options, skip_chat_template=True)
    assert plain.token_ids == tokenizer.encode("hi")


def test_output_len_stands_above_the_files_own(tmp_path, tokenizer):
    samples = load(tokenizer, **custom(tmp_path, {"prompt": "hi", "output_tokens": 3}), output_len="5")
    assert samples[0].output_len == 5


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"prompts.jsonl:1 is no JSON object with a \"prompt\""),
        ({"text": "a"}, r"prompts.jsonl:1 is no JSON object with a \"prompt\""),
        ([1], r"prompts.jsonl:1 is no JSON object with a \"prompt\""),
        ({"prompt": ""}, "prompt is '';"),
        ({"prompt": [1, "a"]}, "prompt is .1, 'a'.;"),
        ({"prompt": "a", "output_tokens": 0}, "output_tokens is 0; it must be an integer, at least 1"),
    ],
)
def test_a_wrong_line_is_named(tmp_path, tokenizer, line, message):
    with pytest.raises(ConfigError, match=message):
        load(tokenizer, **custom(tmp_path, line))


def test_a_file_that_is_no_sharegpt_file_says_so(tmp_path, tokenizer):
    path = tmp_path / "x.json"
    path.write_text('[{"messages": []}]')
    with pytest.raises(ConfigError, match="is no ShareGPT file"):
        load(tokenizer, dataset_name="sharegpt", dataset_path=str(path))


def test_texts_without_a_tokenizer_and_files_without_a_fitting_prompt_are_refused(tmp_path, tokenizer):
    options = sharegpt(tmp_path, ("abc", "abc"))
    with pytest.raises(ConfigError, match="there is no tokenizer; name one: --tokenizer"):
        load(None, **options)
    with pytest.raises(ConfigError, match="holds no prompt of a fitting length"):
        load(tokenizer, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dataset_name": "custom"}, "a custom dataset needs a file"),
        ({"dataset_path": "x"}, "dataset_path is given for random prompts"),
        ({"random_range_ratio": 1.0}, "it must be at least 0 and below 1"),
        ({"num_prompts": 0}, "it must be at least 1"),
        ({"input_len": "9:5"}, "input_len is '9:5'; give a number of tokens, or a range such as 100:1024"),
        ({"output_len": "0"}, "output_len is '0'"),
        ({"input_len": "5", "dataset_name": "prefix_repetition"}, "input_len is given for prefix_repetition"),
    ],
)
def test_flags_that_make_no_sense_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        DatasetFlags(**options)


def test_a_length_is_a_number_or_a_range():
    assert Lengths.parse("input_len", "100:1024") == Lengths(100, 1024)
    assert Lengths.parse("input_len", "7") == Lengths(7, 7)
