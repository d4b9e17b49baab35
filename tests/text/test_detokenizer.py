"""Streamed text equals the decoding of all tokens at once, for every kind of tokenizer and every cut of the stream."""

import functools
import random
import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedjax.errors import ConfigError
from pagedjax.text.detokenizer import IncrementalDetokenizer
from pagedjax.text.tokenizer import Tokenizer
from tests.text.tokenizers import BYTES, KINDS, TEXTS, bpe_with_word_ends, tokenizer_of

FUZZ = settings(max_examples=60, deadline=None, derandomize=True)
BYTE_TOKEN = re.compile("<0x..>")


def detokenizer(tokenizer, prompt=(), *, skip_special_tokens=True, spaces_between_special_tokens=True):
    return IncrementalDetokenizer(
        tokenizer,
        list(prompt),
        skip_special_tokens=skip_special_tokens,
        spaces_between_special_tokens=spaces_between_special_tokens,
    )


def stream(tokenizer, prompt, chunks, **options):
    """The emitted pieces, the last from flush."""
    one = detokenizer(tokenizer, prompt, **options)
    return [one.push(chunk) for chunk in chunks] + [one.flush()]


def decode(tokenizer, token_ids, skip_special_tokens):
    """What transformers shows; but of <0xNN> tokens complete characters stand, and each other byte is one U+FFFD."""
    if tokenizer.hf.backend_tokenizer.token_to_id(BYTES[0]) is None:
        return tokenizer.hf.decode(token_ids, skip_special_tokens=skip_special_tokens)
    skipped = tokenizer.pieces.special_ids if skip_special_tokens else ()
    kept = [token_id for token_id in token_ids if token_id not in skipped]
    repaired = "".join("b" if is_byte(tokenizer, token_id) else "t" for token_id in kept)
    for run in reversed(list(re.finditer("b+", repaired))):
        kept[run.start() : run.end()] = valid_bytes(tokenizer, kept[run.start() : run.end()])
    return tokenizer.hf.decode(kept)


def is_byte(tokenizer, token_id):
    return BYTE_TOKEN.fullmatch(tokenizer.hf.convert_ids_to_tokens(token_id) or "") is not None


def valid_bytes(tokenizer, run):
    """The run's tokens with each byte that is part of no character as a U+FFFD token."""
    raw = bytes(int(tokenizer.hf.convert_ids_to_tokens(token_id)[3:5], 16) for token_id in run)
    result, start = [], 0
    while start < len(raw):
        lengths = [n for n in (1, 2, 3, 4) if start + n <= len(raw) and is_utf8(raw[start : start + n])]
        length = lengths[0] if lengths else 1
        bad = tokenizer.hf.convert_tokens_to_ids("\ufffd")
        result += run[start : start + length] if lengths else [bad]
        start += length
    return result


def is_utf8(raw):
    try:
        return len(raw.decode()) == 1
    except UnicodeDecodeError:
        return False


@functools.cache
def ids_of(kind):
    """Ids at random, with bytes that begin or continue characters, specials and ids without a token among them."""
    tokenizer = tokenizer_of(kind)
    last = tokenizer.vocab_size + 3
    bytes_of_characters = [tokenizer.hf.backend_tokenizer.token_to_id(BYTES[byte]) for byte in range(0x80, 0xF5)]
    common = [i for i in bytes_of_characters if i is not None] + sorted(tokenizer.pieces.added_tokens)
    pools = [st.integers(0, last), st.sampled_from(common)] if common else [st.integers(0, last)]
    encoded = st.text(alphabet="ah 你é😀ñ\u0301🇩\n工", max_size=6).map(lambda text: tokenizer.encode(text, False))
    return st.lists(st.one_of(*[pool.map(lambda i: [i]) for pool in pools], encoded), max_size=12).map(
        lambda lists: [i for one in lists for i in one]
    )


@pytest.mark.parametrize("kind", KINDS)
@FUZZ
@given(data=st.data())
def test_the_pieces_put_together_equal_the_whole_decoding(kind, data):
    tokenizer = tokenizer_of(kind)
    ids, skip = data.draw(ids_of(kind)), data.draw(st.booleans())
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=6)))
    chunks = [ids[start:end] for start, end in zip([0, *cuts], [*cuts, len(ids)], strict=True)]
    pieces = stream(tokenizer, [], chunks, skip_special_tokens=skip)
    assert "".join(pieces) == decode(tokenizer, ids, skip)


@pytest.mark.parametrize("kind", KINDS)
@FUZZ
@given(data=st.data())
def test_the_output_is_what_follows_the_prompts_own_text(kind, data):
    tokenizer = tokenizer_of(kind)
    prompt, output = data.draw(ids_of(kind)), data.draw(ids_of(kind))
    skip = data.draw(st.booleans())
    text = "".join(stream(tokenizer, prompt, [[i] for i in output], skip_special_tokens=skip))
    shown, whole = decode(tokenizer, prompt, skip), decode(tokenizer, prompt + output, skip)
    if whole.startswith(shown):
        assert text == whole[len(shown) :]
    else:  # the output finished a character of the prompt
        assert (
            whole == shown.rstrip("\ufffd") + "\ufffd" * (len(whole) - len(text) - len(shown.rstrip("\ufffd"))) + text
        )


@pytest.mark.parametrize("kind", ["byte-level", "byte-fallback", "demo"])
@pytest.mark.parametrize("text", TEXTS)
def test_real_text_never_shows_half_a_character_and_lags_at_most_one(kind, text):
    tokenizer = tokenizer_of(kind)
    ids = tokenizer.encode(text, add_special_tokens=False)
    one, emitted = detokenizer(tokenizer), ""
    for i, token_id in enumerate(ids, 1):
        emitted += one.push([token_id])
        so_far = decode(tokenizer, ids[:i], False)
        assert "\ufffd" not in emitted
        assert emitted == so_far.rstrip("\ufffd")
    assert emitted + one.flush() == decode(tokenizer, ids, False)


@pytest.mark.parametrize("kind", ["byte-level", "byte-fallback"])
def test_a_character_that_the_prompt_began_comes_out_whole(kind):
    tokenizer = tokenizer_of(kind)
    emoji = byte_tokens(tokenizer, "😀".encode())
    for split in range(1, 4):
        prompt, output = emoji[:split], emoji[split:]
        assert stream(tokenizer, prompt, [[i] for i in output]) == [""] * (len(output) - 1) + ["😀", ""]


@pytest.mark.parametrize("kind", ["byte-level", "byte-fallback"])
def test_a_character_that_the_prompt_began_and_nobody_finishes_is_not_output(kind):
    tokenizer = tokenizer_of(kind)
    start = byte_tokens(tokenizer, "😀".encode()[:2])
    exclamation = tokenizer.encode("!", add_special_tokens=False)[-1]
    assert "".join(stream(tokenizer, start, [[exclamation]])) == "!"
    assert stream(tokenizer, start, []) == [""]


@pytest.mark.parametrize("kind", ["byte-level", "byte-fallback"])
def test_wrong_bytes_come_out_when_a_later_token_proves_them_wrong(kind):
    tokenizer = tokenizer_of(kind)
    lone, letter = byte_tokens(tokenizer, b"\xe4a")
    assert stream(tokenizer, [letter], [[lone], [letter], [lone], [lone]]) == ["", "\ufffda", "", "\ufffd", "\ufffd"]


def test_a_replacement_character_that_the_model_wrote_comes_out_at_once():
    tokenizer = tokenizer_of("byte-level")
    ids = byte_tokens(tokenizer, "\ufffd".encode())
    assert stream(tokenizer, [], [[i] for i in ids]) == ["", "", "\ufffd", ""]


def test_byte_tokens_keep_the_characters_that_are_complete():
    """`decode` gives three U+FFFD for these three bytes: the line break, which was streamed already, would be lost."""
    tokenizer = tokenizer_of("byte-fallback")
    ids = byte_tokens(tokenizer, b"\n\xf0\x9f")
    assert tokenizer.decode(ids) == "\ufffd" * 3
    assert stream(tokenizer, [], [[i] for i in ids]) == ["\n", "", "", "\ufffd\ufffd"]


@pytest.mark.parametrize(
    ("kind", "prompt", "text"),
    [("byte-fallback", [], "hello"), ("byte-fallback", [" a"], " hello"), ("metaspace", [], "hello")],
)
def test_the_leading_space_is_dropped_only_at_the_start_of_the_text(kind, prompt, text):
    tokenizer = tokenizer_of(kind)
    prompt_ids = [1, *(i for piece in prompt for i in tokenizer.encode(piece, False))]  # 1 is special or a space
    word = tokenizer.hf.convert_tokens_to_ids("▁hello")
    assert "".join(stream(tokenizer, prompt_ids if prompt else [], [[word]])) == text


def test_special_tokens_are_shown_only_on_request():
    tokenizer = tokenizer_of("byte-level")
    ids = tokenizer.encode("hi<|im_end|><tool>", add_special_tokens=False)
    assert "".join(stream(tokenizer, [], [ids])) == "hi<tool>"
    assert "".join(stream(tokenizer, [], [ids], skip_special_tokens=False)) == "hi<|im_end|><tool>"


def test_added_tokens_join_without_spaces_on_request():
    tokenizer = tokenizer_of("whole-words")
    ids = tokenizer.hf.convert_tokens_to_ids(["w1", "<tool>", "<|im_end|>", "w2"])
    options = {"skip_special_tokens": False}
    assert "".join(stream(tokenizer, [], [ids], **options)) == "w1 <tool> <|im_end|> w2"
    joined = stream(tokenizer, [], [ids], **options, spaces_between_special_tokens=False)
    assert "".join(joined) == "w1 <tool><|im_end|> w2"


def test_a_decoder_that_looks_across_tokens_is_refused_by_name():
    with pytest.raises(ConfigError, match="decoder is BPEDecoder; supported are ByteLevel"):
        Tokenizer(bpe_with_word_ends())


def test_the_time_of_a_token_does_not_grow_with_the_text():
    tokenizer = tokenizer_of("byte-fallback")
    lone = byte_tokens(tokenizer, b"\xf0")
    ids = random.Random(0).choices([*lone, *tokenizer.encode("hello 你好", False)], k=20_000)
    one = detokenizer(tokenizer, ids)
    start = time.process_time()
    pieces = [one.push([token_id]) for token_id in lone * 20_000]
    assert len("".join(pieces)) == 19_999
    assert time.process_time() - start < 10  # 0.1 s; work that grew with the text would take minutes


def byte_tokens(tokenizer, raw):
    """One token a byte."""
    if tokenizer.pieces.is_byte_level:
        by_piece = {tokenizer.pieces.piece(i): i for i in reversed(range(tokenizer.vocab_size))}
        return [by_piece[bytes([byte])] for byte in raw]
    return [tokenizer.hf.convert_tokens_to_ids(BYTES[byte]) for byte in raw]
