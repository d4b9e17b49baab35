"""What each token id adds to a text: bytes, which may be part of a character, or finished text.

Byte-level vocabularies (GPT-2's and most since) give bytes for every token; SentencePiece ones give text, and bytes
for their `<0xNN>` tokens. Owns the table, filled as tokens are seen. It knows no requests and no streams.
"""

import codecs
import functools
import json
import re

from tokenizers import Tokenizer as RustTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

from pagedjax.errors import ConfigError

BYTE_LEVEL_DECODERS = {"ByteLevel", "Fuse"}
TEXT_DECODERS = {
    "Replace",
    "ByteFallback",
    "Fuse",
    "Strip",
    "Metaspace",
    "WordPiece",
}  # each token apart from the first
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
BYTE_OF_CHARACTER = {character: byte for byte, character in bytes_to_unicode().items()}


class TokenPieces:
    """The table of one tokenizer; safe to share between threads.

    Raises:
      ConfigError: a token's text depends on more than the token, so that text could not be streamed.
    """

    def __init__(self, backend: RustTokenizer):
        self._backend = backend
        self.added_tokens = {i: token.content for i, token in backend.get_added_tokens_decoder().items()}
        self.special_ids = frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)
        steps = _decoder_steps(backend)
        self.is_byte_level = "ByteLevel" in steps
        self._has_byte_tokens = "ByteFallback" in steps
        self._anchor = [] if self.is_byte_level else self._find_anchor()
        self.utf8_errors = "replace" if self.is_byte_level else EACH_BYTE
        self.piece = functools.cache(self._piece)

    def first_piece(self, token_id: int) -> bytes | str | None:
        """What the token adds at the start of a text, where some decoders drop a space."""
        piece = self.piece(token_id)
        if piece is None or self.is_byte_level:
            return piece
        text = self._decode([token_id])
        return text if isinstance(piece, str) or not text else piece

    def _piece(self, token_id: int) -> bytes | str | None:
        """What the token adds after other tokens; None for an id that no token has."""
        token = self._backend.id_to_token(token_id)
        if token is None:
            return None
        if self.is_byte_level:
            return _bytes_of(token)
        if self._has_byte_tokens and (match := BYTE_TOKEN.fullmatch(token)):
            return bytes.fromhex(match[1])
        return self._decode([*self._anchor, token_id])[len(self._decode(self._anchor)) :]

    def _find_anchor(self) -> list[int]:
        """A token that ends in a letter or digit, to see what the decoder puts between tokens."""
        ids = range(self._backend.get_vocab_size(with_added_tokens=True))
        plain = (i for i in ids if i not in self.special_ids and not self._is_byte_token(i))
        return next(([i] for i in plain if self._decode([i])[-1:].isalnum()), [])

    def _is_byte_token(self, token_id: int) -> bool:
        token = self._backend.id_to_token(token_id)
        return self._has_byte_tokens and token is not None and BYTE_TOKEN.fullmatch(token) is not None

    def _decode(self, token_ids: list[int]) -> str:
        return self._backend.decode(token_ids, skip_special_tokens=False)


def _decoder_steps(backend: RustTokenizer) -> set[str]:
    if backend.decoder is None:  # tokens are joined by spaces
        return set()
    description = json.loads(backend.decoder.__getstate__())
    steps = {step["type"] for step in description.get("decoders", [description])}
    allowed = BYTE_LEVEL_DECODERS if "ByteLevel" in steps else TEXT_DECODERS
    if not steps <= allowed:
        raise ConfigError(
            f"the tokenizer's decoder is {' + '.join(sorted(steps))}; supported are ByteLevel, or any of "
            f"{', '.join(sorted(TEXT_DECODERS))}: choose another --tokenizer"
        )
    return steps


def _bytes_of(token: str) -> bytes:
    """Undo GPT-2's spelling of bytes; an added token that was never spelled so is taken as it is."""
    try:
        return bytes(BYTE_OF_CHARACTER[character] for character in token)
    except KeyError:
        return token.encode()


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError), "this handler is for decoding"
    return "\ufffd" * (error.end - error.start), error.end


EACH_BYTE = "pagedjax.each_byte"  # one U+FFFD for each wrong byte, as the ByteFallback decoder gives
codecs.register_error(EACH_BYTE, _replace_each_byte)
