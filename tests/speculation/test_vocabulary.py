"""A draft model whose token ids mean something else is refused, with what differs."""

from dataclasses import replace

import pytest
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import models
from transformers import PreTrainedTokenizerFast

from pagedjax.errors import ConfigError
from pagedjax.speculation.vocabulary import check_same_vocabulary
from pagedjax.text.tokenizer import Tokenizer
from tests.fakes import FAKE_CONFIG

CONFIG = replace(FAKE_CONFIG, vocab_size=6, eos_token_ids=())


def tokenizer(words: str) -> Tokenizer:
    rust = RustTokenizer(models.WordLevel({word: i for i, word in enumerate(words.split())}, unk_token="<unk>"))
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=rust, unk_token="<unk>"))


def check(target: str | None, draft: str | None) -> None:
    tokenizers = [None if words is None else tokenizer(words) for words in (target, draft)]
    check_same_vocabulary(CONFIG, CONFIG, target_tokenizer=tokenizers[0], draft_tokenizer=tokenizers[1])


def test_equal_vocabularies_pass_and_so_do_unknown_ones():
    check("<unk> a b c", "<unk> a b c")
    check("<unk> a", None)
    check(None, "<unk> a")
    check(None, None)


def test_other_sizes_are_named():
    with pytest.raises(ConfigError, match=r"the draft model has 7 tokens, the target 6; .* with the same vocabulary"):
        check_same_vocabulary(CONFIG, replace(CONFIG, vocab_size=7))


def test_the_first_tokens_that_differ_are_named():
    with pytest.raises(ConfigError) as raised:
        check("<unk> a b c d e", "<unk> a B C D E")
    assert str(raised.value).startswith(
        "4 of 6 tokens differ between the draft model and the target: 2 is 'B' and 'b', 3 is 'C' and 'c', "
        "4 is 'D' and 'd'; choose"
    )


def test_a_token_that_only_one_of_them_has_differs():
    with pytest.raises(ConfigError, match=r"1 of 6 tokens differ .*: 3 is None and 'c'"):
        check("<unk> a b c", "<unk> a b")


def test_tokens_past_the_models_vocabulary_do_not_count():
    check("<unk> a b c d e", "<unk> a b c d e beyond")
