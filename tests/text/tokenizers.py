"""Small tokenizers of every kind the text package must stream, and the embedded model's own.

Byte-level BPE with merges across the bytes of characters; BPE with byte fallback as Llama 2 and Gemma have it;
Unigram with Metaspace; WordPiece; whole words without a decoder.
"""

import functools

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as RustTokenizer
from transformers import PreTrainedTokenizerFast

from pagedjax.loading.hub import demo_path
from pagedjax.text.gguf_tokenizer import tokenizer_from_gguf
from pagedjax.text.tokenizer import Tokenizer

TEXTS = [
    "The quick brown fox jumps over the lazy dog. Hello, world! It's 12345 o'clock.",
    "你好，世界。今天天气很好，我们去公园散步吧。人工智能正在改变世界。",
    "😀😃👍🏽👨‍👩‍👧‍👦🇩🇪❤️ emoji and ñandú, naïve café, straße, Ελληνικά, русский язык, ไทย, မြန်မာ",
]
SPECIALS = ["<s>", "</s>", "<unk>", "<|im_start|>", "<|im_end|>"]
ADDED = ["<tool>", "<caf\u00e9 tool>", "<工具>"]  # not special: shown whatever skip_special_tokens says
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def wrap(rust):
    """A Tokenizer with special and ordinary added tokens on top of `rust`."""
    rust.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    rust.add_tokens([AddedToken(token, normalized=False) for token in ADDED])
    hf = PreTrainedTokenizerFast(tokenizer_object=rust, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    return Tokenizer(hf)


def byte_level():
    rust = RustTokenizer(models.BPE())
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    rust.train_from_iterator(TEXTS * 3, trainer)
    return wrap(rust)


def byte_fallback(*, strips_leading_space=True):
    letters = ["▁", *"abcdefghijklmnopqrstuvwxyz.,!你好é"]
    merges = [("▁", "h"), ("▁", "a"), ("l", "l"), ("▁h", "e"), ("▁he", "ll"), ("▁hell", "o"), ("▁", "▁"), ("你", "好")]
    words = [*SPECIALS[:3], *BYTES, *letters, *(left + right for left, right in merges), "\ufffd"]
    vocab = {token: i for i, token in enumerate(words)}
    rust = RustTokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    replace = normalizers.Replace(" ", "▁")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    rust.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace]) if strips_leading_space else replace
    rust.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strips_leading_space else steps)
    return wrap(rust)


def metaspace():
    pieces = ["<unk>", "▁", "▁hello", "▁world", *"abcdehlorw", "你", "▁你好", "!"]
    rust = RustTokenizer(models.Unigram([(piece, -float(i)) for i, piece in enumerate(pieces)], unk_id=0))
    rust.pre_tokenizer, rust.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return wrap(rust)


def word_piece():
    pieces = ["<unk>", "hello", "world", "##s", "##ing", "你", "##好", "!", "'", "n't", "don"]
    rust = RustTokenizer(models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="<unk>"))
    rust.pre_tokenizer, rust.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    return wrap(rust)


def whole_words():
    rust = RustTokenizer(models.WordLevel({f"w{i}": i for i in range(50)} | {"<unk>": 50}, unk_token="<unk>"))
    rust.pre_tokenizer = pre_tokenizers.Split(Regex(r"\s+"), behavior="removed")
    return wrap(rust)


MAKERS = {
    "byte-level": byte_level,
    "byte-fallback": byte_fallback,
    "byte-fallback-keeping-space": lambda: byte_fallback(strips_leading_space=False),
    "metaspace": metaspace,
    "word-piece": word_piece,
    "whole-words": whole_words,
}


KINDS = [*MAKERS, "demo"]  # the embedded model's own


@functools.cache
def tokenizer_of(kind):
    return Tokenizer(tokenizer_from_gguf(demo_path())) if kind == "demo" else MAKERS[kind]()


def bpe_with_word_ends():
    """GPT-1's kind, which drops the space after the last token, whichever that is."""
    rust = RustTokenizer(models.BPE(vocab={"a</w>": 0, "b": 1}, merges=[]))
    rust.decoder = decoders.BPEDecoder(suffix="</w>")
    return PreTrainedTokenizerFast(tokenizer_object=rust)
