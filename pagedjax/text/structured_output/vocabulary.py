"""The model's vocabulary as llguidance sees it: the bytes that each token adds to a text.

Where llguidance cannot read a tokenizer itself (Unigram with Metaspace, WordPiece and others), it gets the table that
detokenizing uses, so that what a mask admits is what the text then shows.
"""

from collections.abc import Sequence
from typing import Any

from pagedjax.text.tokenizer import Tokenizer


def llguidance_vocabulary(llguidance: Any, tokenizer: Tokenizer, *, size: int, eos_token_ids: Sequence[int]) -> Any:
    """Return llguidance's LLTokenizer of `size` tokens. Python stands while it is made, up to a second for 150,000."""
    options = {"n_vocab": size, "eos_token": list(eos_token_ids)}
    try:
        return llguidance.LLTokenizer(tokenizer.hf.backend_tokenizer.to_str(), **options)
    except ValueError:  # a kind it does not know
        return llguidance.LLTokenizer(llguidance.TokenizerWrapper(PieceVocabulary(tokenizer, eos_token_ids)), **options)


class PieceVocabulary:
    """What llguidance asks of a tokenizer that it cannot read."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, eos_token_ids: Sequence[int]):
        self._tokenizer = tokenizer
        pieces = tokenizer.pieces
        found = [pieces.piece(token_id) for token_id in range(tokenizer.vocab_size)]
        self.tokens = [piece.encode() if isinstance(piece, str) else piece or b"" for piece in found]
        self.special_token_ids = sorted(pieces.special_ids)
        self.eos_token_id = min(eos_token_ids)

    def __call__(self, text: str | bytes) -> list[int]:
        """Return the token ids of a text."""
        return self._tokenizer.encode(text if isinstance(text, str) else text.decode(), add_special_tokens=False)
