"""Turn the tokens of one completion into text as they come, never emitting half a character.

Owns the bytes of an unfinished character. The pieces put together equal the decoding of all tokens at once, with one
improvement on tokenizers with `<0xNN>` tokens: there `Tokenizer.decode` spoils a whole run of such tokens when one of
them is wrong, here every complete character stands. It does not know stop strings or stop tokens.
"""

import codecs
from collections.abc import Sequence

from pagedjax.text.tokenizer import Tokenizer

MAX_UNFINISHED_BYTES = 3  # of a UTF-8 character


class IncrementalDetokenizer:
    """Text of one completion: what prompt and output show beyond the prompt.

    A character that the prompt leaves unfinished is output when the output finishes it; its U+FFFD belongs to
    the prompt otherwise. `spaces_between_special_tokens=False` drops the space that some decoders put between two
    added tokens, where those are shown at all.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        *,
        skip_special_tokens: bool,
        spaces_between_special_tokens: bool,
    ):
        self._pieces = tokenizer.pieces
        self._skipped = self._pieces.special_ids if skip_special_tokens else frozenset()
        self._joined = {} if skip_special_tokens or spaces_between_special_tokens else self._pieces.added_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")(self._pieces.utf8_errors)
        self._is_after_added = False
        self._is_start = True
        self._shown_by_prompt = ""
        self._read_prompt(prompt_token_ids)

    def push(self, token_ids: Sequence[int]) -> str:
        """Add tokens and return the text that is certain now."""
        return self._without_prompt("".join(map(self._text_of, token_ids)))

    def flush(self) -> str:
        """Return U+FFFD for a character that stays unfinished, at the end of the completion."""
        return self._without_prompt(self._utf8.decode(b"", final=True))

    def _read_prompt(self, token_ids: Sequence[int]) -> None:
        last = []
        for token_id in reversed(token_ids):
            if token_id not in self._skipped and self._pieces.piece(token_id) is not None:
                last.insert(0, token_id)
            if len(last) == MAX_UNFINISHED_BYTES:
                break
        for token_id in last:
            self._text_of(token_id)
        unfinished, _ = self._utf8.getstate()
        self._shown_by_prompt = unfinished.decode("utf-8", self._pieces.utf8_errors)
        self._is_after_added = False

    def _text_of(self, token_id: int) -> str:
        piece = self._pieces.first_piece(token_id) if self._is_start else self._pieces.piece(token_id)
        if piece is None or token_id in self._skipped:
            return ""
        self._is_start = False
        if isinstance(piece, bytes):
            return self._utf8.decode(piece)
        if self._joined:
            is_added = token_id in self._joined
            piece = self._joined[token_id] if is_added and self._is_after_added else piece
            self._is_after_added = is_added
        return self._utf8.decode(b"", final=True) + piece

    def _without_prompt(self, text: str) -> str:
        if text and self._shown_by_prompt:
            text = text.removeprefix(self._shown_by_prompt)
            self._shown_by_prompt = ""
        return text
