"""The model's tokenizer: text to ids, ids to text, messages to a prompt.

Owns one transformers tokenizer, which is never changed after loading and may be used from several threads at once.
It does not know requests, sampling parameters or the model's own list of end-of-sequence ids.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerFast

from pagedjax.config import EngineConfig
from pagedjax.errors import ConfigError, InvalidRequestError
from pagedjax.loading import hub
from pagedjax.text.chat import ChatTemplate, load_chat_template, render_chat
from pagedjax.text.gguf_tokenizer import REMEDY, tokenizer_from_gguf
from pagedjax.text.token_pieces import TokenPieces

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tekken.json", "vocab.json", "vocab.txt")  # one is enough


def load_tokenizer(config: EngineConfig, *, has_checkpoint: bool = True, remedy: str = REMEDY) -> "Tokenizer | None":
    """Load the tokenizer of `config.tokenizer`, or else of `config.model`, with `config.chat_template`.

    None where the weights are made up (`has_checkpoint=False`: the caller's own; or dummy weights) and no
    tokenizer comes with them: such an engine takes token ids only.

    Args:
      remedy: where another tokenizer can come from.

    Raises:
      ConfigError: there is none, it cannot be read, or the chat template cannot.
    """
    if config.tokenizer is None and not has_checkpoint:
        return None
    path = _tokenizer_path(config)
    if config.tokenizer is None and config.has_dummy_weights and not _has_tokenizer(path):
        return None
    hf = tokenizer_from_gguf(path, remedy=remedy) if path.suffix == ".gguf" else _from_directory(path, remedy)
    return Tokenizer(hf, chat_template=load_chat_template(config.chat_template))


class Tokenizer:
    """One transformers tokenizer (`hf`) behind the few calls the engine makes.

    The tokenizers library is called directly: transformers switches truncation and padding on the shared object, which
    other threads may not survive. Ids of `vocab_size` and above do not exist.
    """

    def __init__(self, hf: PreTrainedTokenizerFast, *, chat_template: str | None = None):
        self.hf = hf
        self._backend = hf.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self.pieces = TokenPieces(self._backend)
        vocab = self._backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocab.values()) + 1
        self.max_chars_per_token = max(map(len, vocab))  # a text of n characters has at least n / this tokens
        self.eos_token_ids = frozenset() if hf.eos_token_id is None else frozenset([hf.eos_token_id])
        self.chat_template: ChatTemplate | None = chat_template or hf.chat_template

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of `text`; other Python threads run meanwhile.

        Raises:
          InvalidRequestError: the text holds half of a surrogate pair, which is no character.
        """
        _check_characters(text)
        # encode_batch releases the interpreter lock, encode does not; the fast kind skips character offsets
        return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of `token_ids`; ids without a token add nothing.

        Raises:
          InvalidRequestError: an id is negative or needs more than 32 bits.
        """
        try:
            return self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        except OverflowError as error:
            wrong = next(i for i in token_ids if not 0 <= i < 2**32)
            raise InvalidRequestError(
                f"token id {wrong} is in no vocabulary, this one is 0..{self.vocab_size - 1}; remove it"
            ) from error

    def bytes_of(self, token_id: int) -> bytes | None:
        """Return the bytes of a token that alone may be no text; None of one that is text."""
        piece = self.pieces.piece(token_id)
        return piece if isinstance(piece, bytes) else None

    def render_chat(self, messages: Sequence[Any], **options: Any) -> str:
        """Return `pagedjax.text.chat.render_chat(self, messages, **options)`."""
        return render_chat(self, messages, **options)

    def encode_chat(self, messages: Sequence[Any], **options: Any) -> list[int]:
        """Return the ids of `render_chat(messages, **options)`."""
        return self.encode(self.render_chat(messages, **options), add_special_tokens=False)


def _check_characters(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"the prompt holds {text[error.start]!r} at character {error.start}, half of a surrogate pair; remove it",
            param="prompt",
        ) from error


def _tokenizer_path(config: EngineConfig) -> Path:
    """A directory with tokenizer files, or a GGUF file."""
    name = config.tokenizer or config.model
    revision = config.revision if name == config.model else None
    return hub.resolve(name, revision=revision, download_dir=config.download_dir, with_weights=False)


def _has_tokenizer(path: Path) -> bool:
    return path.suffix == ".gguf" or any((path / name).is_file() for name in TOKENIZER_FILES)


def _from_directory(directory: Path, remedy: str) -> PreTrainedTokenizerFast:
    if not _has_tokenizer(directory):
        raise ConfigError(
            f"{directory} holds no tokenizer: none of {', '.join(TOKENIZER_FILES)} is there; "
            f"copy the files from the model's repository, or {remedy}"
        )
    # transformers' model classes rebuild some tokenizers by rule and lose parts that tokenizer.json states
    # (SmolLM2's digit splitting); the file itself is what the model was trained with.
    loader = PreTrainedTokenizerFast if (directory / "tokenizer.json").is_file() else AutoTokenizer
    try:
        hf = loader.from_pretrained(directory, use_fast=True, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # a damaged file raises whatever its parser raises
        raise ConfigError(f"the tokenizer in {directory} cannot be loaded: {error}") from error
    if not isinstance(hf, PreTrainedTokenizerFast):
        raise ConfigError(
            f"the tokenizer in {directory} is a {type(hf).__name__}, which has no fast version; "
            f"save one as tokenizer.json, or {remedy}"
        )
    return hf
