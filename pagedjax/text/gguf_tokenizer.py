"""A transformers tokenizer rebuilt from GGUF metadata, without torch and without the `gguf` package.

Gives what the model's own tokenizer.json would: byte-level BPE with the pre-tokenizer that the file names, or a
SentencePiece vocabulary whose merges are recovered from its scores. Knows no weights.
"""

from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from pagedjax.errors import CheckpointError, ConfigError
from pagedjax.loading.gguf_file import GGUFFile, Metadata

CONTROL, USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type
SPACE = "▁"  # how SentencePiece spells a space
REMEDY = "pass the model's own tokenizer directory as --tokenizer"

Merges = list[tuple[str, str]]


@dataclass(frozen=True)
class PreTokenizer:
    """How a byte-level vocabulary splits text before merging."""

    pattern: str | None = None  # None is GPT-2's, which ByteLevel brings
    split_digits: bool = False
    normalize_nfc: bool = False
    ignore_merges: bool = False  # a piece that is a token needs no merging
    add_bos: bool = False  # where the file has no flag


QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_PATTERN = QWEN2_PATTERN.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
QWEN2 = PreTokenizer(pattern=QWEN2_PATTERN, normalize_nfc=True)
LLAMA3 = PreTokenizer(pattern=LLAMA3_PATTERN, ignore_merges=True, add_bos=True)

PRE_TOKENIZERS = {
    "gpt-2": PreTokenizer(),
    "default": PreTokenizer(),
    "smollm": PreTokenizer(split_digits=True),
    "qwen2": QWEN2,
    "deepseek-r1-qwen": QWEN2,
    "llama-bpe": LLAMA3,
    "llama3": LLAMA3,
    "llama-v3": LLAMA3,
}
"""By `tokenizer.ggml.pre`."""

ARCHITECTURE_DEFAULTS = {"qwen2": "qwen2", "qwen3": "qwen2"}
"""By `general.architecture`, for old files without `tokenizer.ggml.pre`; others split as GPT-2 did."""


def tokenizer_from_gguf(path: Path, *, remedy: str = REMEDY) -> PreTrainedTokenizerFast:
    """Build the tokenizer of a GGUF file, with its chat template and special tokens.

    Args:
        remedy: what to do about one that is not supported.

    Raises:
        ConfigError: the kind of tokenizer is not supported.
        CheckpointError: the file is damaged or holds no tokenizer.
    """
    file = GGUFFile(path)
    try:
        return _Builder(path, file.metadata, remedy).build()
    finally:
        file.close()


class _Builder:
    """The tokenizer part of one file's metadata."""

    def __init__(self, path: Path, metadata: Metadata, remedy: str):
        self.path = path
        self.remedy = remedy
        self.metadata = metadata
        kind = self._get("model")
        if kind not in ("gpt2", "llama"):
            raise ConfigError(f"{path} has the tokenizer type {kind!r}; supported are gpt2 and llama: {remedy}")
        self.is_byte_level = kind == "gpt2"
        self.tokens: list[str] = self._require("tokens")
        self.token_types: list[int] = list(self._get("token_type", ()))

    def build(self) -> PreTrainedTokenizerFast:
        backend = self._byte_level() if self.is_byte_level else self._sentencepiece()
        backend.add_tokens(self._added_tokens())
        return PreTrainedTokenizerFast(
            tokenizer_object=_NotCopied(backend),
            chat_template=self.metadata.get("tokenizer.chat_template"),
            clean_up_tokenization_spaces=False,
            add_bos_token=bool(self._get("add_bos_token", self._adds_bos())),
            add_eos_token=bool(self._get("add_eos_token", False)),
            **self._special_tokens(),
        )

    def _byte_level(self) -> Tokenizer:
        pre = self._pre_tokenizer()
        merges = [_split_merge(merge) for merge in self._require("merges")]
        backend = Tokenizer(self._bpe(merges, ignore_merges=pre.ignore_merges))
        steps: list[pre_tokenizers.PreTokenizer] = []
        if pre.split_digits:
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        if pre.pattern:
            steps.append(pre_tokenizers.Split(Regex(pre.pattern), behavior="isolated"))
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre.pattern is None))
        backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
        if pre.normalize_nfc:
            backend.normalizer = normalizers.NFC()
        backend.decoder = decoders.ByteLevel()
        return backend

    def _sentencepiece(self) -> Tokenizer:
        self.tokens = [
            token.replace(" ", SPACE) if kind == USER_DEFINED else token
            for token, kind in zip(self.tokens, self.token_types, strict=True)
        ]
        unknown = self._token(self._get("unknown_token_id", 0))
        backend = Tokenizer(self._bpe(self._recover_merges(), unk_token=unknown, fuse_unk=True, byte_fallback=True))
        adds_space = bool(self._get("add_space_prefix", True))
        replace = normalizers.Replace(" ", SPACE)
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), replace]) if adds_space else replace
        steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if adds_space else steps)
        if not adds_space:
            backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
        return backend

    def _bpe(self, merges: Merges, **options: Any) -> BPE:
        vocabulary = {token: token_id for token_id, token in enumerate(self.tokens)}
        try:
            return BPE(vocab=vocabulary, merges=merges, **options)
        except Exception as error:  # tokenizers raises nothing narrower
            raise CheckpointError(
                f"{self.path}: its merges do not fit its tokens ({error}); convert the model again"
            ) from error

    def _pre_tokenizer(self) -> PreTokenizer:
        architecture = self.metadata.get("general.architecture", "")
        name = self._get("pre", ARCHITECTURE_DEFAULTS.get(architecture, "gpt-2"))
        if name not in PRE_TOKENIZERS:
            raise ConfigError(
                f"{self.path} has the pre-tokenizer {name!r}; supported are {', '.join(PRE_TOKENIZERS)}: {self.remedy}"
            )
        return PRE_TOKENIZERS[name]

    def _recover_merges(self) -> Merges:
        """List every pair of tokens that makes a token, best score first, then longest left part.

        SentencePiece merges by the score of the result alone. User-defined tokens (Gemma's runs of spaces and
        newlines) come before all others, whatever score the converter gave them.
        """
        tokens = set(self.tokens)
        pairs = []
        for token, score, kind in zip(self.tokens, self._require("scores").tolist(), self.token_types, strict=True):
            rank = float("-inf") if kind == USER_DEFINED else -score
            for cut in range(len(token) - 1, 0, -1):
                left, right = token[:cut], token[cut:]
                if left in tokens and right in tokens:
                    pairs.append((rank, -cut, cut - len(token), left, right))
        pairs.sort(key=itemgetter(0, 1, 2))
        return [(left, right) for _, _, _, left, right in pairs]

    def _adds_bos(self) -> bool:
        return self._pre_tokenizer().add_bos if self.is_byte_level else True

    def _added_tokens(self) -> list[AddedToken]:
        """Tokens that are matched whole in the text: special ones and, not special, user-defined ones."""
        return [
            AddedToken(token, normalized=False, special=kind == CONTROL)
            for token, kind in zip(self.tokens, self.token_types, strict=True)
            if kind in (CONTROL, USER_DEFINED)
        ]

    def _special_tokens(self) -> dict[str, str]:
        """Name the special tokens; SentencePiece files may leave out the usual ids."""
        unknown, bos, eos = (None, None, None) if self.is_byte_level else (0, 1, 2)
        ids = {
            "unk_token": self._get("unknown_token_id", unknown),
            "bos_token": self._get("bos_token_id", bos),
            "eos_token": self._get("eos_token_id", eos),
            "pad_token": self._get("padding_token_id"),
        }
        return {name: self._token(token_id) for name, token_id in ids.items() if token_id is not None}

    def _token(self, token_id: int) -> str:
        if not 0 <= token_id < len(self.tokens):
            raise CheckpointError(
                f"{self.path} names the special token {token_id}, its vocabulary has {len(self.tokens)}; "
                "convert the model again"
            )
        return self.tokens[token_id]

    def _get(self, key: str, default: Any = None) -> Any:
        return self.metadata.get(f"tokenizer.ggml.{key}", default)

    def _require(self, key: str) -> Any:
        value = self._get(key)
        if value is None:
            raise CheckpointError(f"{self.path} has no tokenizer.ggml.{key}; {self.remedy}")
        return value


class _NotCopied:
    """Hands over a backend that has no other owner; transformers would deep-copy it, half of the loading time."""

    def __init__(self, backend: Tokenizer):
        self._backend = backend

    def __deepcopy__(self, memo: dict[int, Any]) -> Tokenizer:
        return self._backend


def _split_merge(merge: str) -> tuple[str, str]:
    cut = merge.find(" ", 1)  # from 1: the left part may itself be a space
    return merge[:cut], merge[cut + 1 :]
