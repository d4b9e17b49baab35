"""Whether a draft model's tokens are the target's: a draft is a token id, and must mean the same to both."""

from pagedjax.errors import ConfigError
from pagedjax.models.config import ModelConfig
from pagedjax.text.tokenizer import Tokenizer

MAX_SHOWN = 3  # differing ids in a message


def check_same_vocabulary(
    target: ModelConfig,
    draft: ModelConfig,
    *,
    target_tokenizer: Tokenizer | None = None,
    draft_tokenizer: Tokenizer | None = None,
) -> None:
    """Compare the numbers of logits, and the tokens where both models have a tokenizer.

    Raises:
      ConfigError: they differ; the message has the sizes, or the first ids whose tokens differ.
    """
    if target.vocab_size != draft.vocab_size:
        raise ConfigError(
            f"the draft model has {draft.vocab_size} tokens, the target {target.vocab_size}; "
            "drafts are token ids, so choose a draft model of the target's family with the same vocabulary"
        )
    if target_tokenizer is None or draft_tokenizer is None:
        return
    ours, theirs = _tokens(target_tokenizer), _tokens(draft_tokenizer)
    differing = [i for i in range(target.vocab_size) if ours.get(i) != theirs.get(i)]
    if differing:
        shown = ", ".join(f"{i} is {theirs.get(i)!r} and {ours.get(i)!r}" for i in differing[:MAX_SHOWN])
        raise ConfigError(
            f"{len(differing)} of {target.vocab_size} tokens differ between the draft model and the target: {shown}; "
            "choose a draft model with the target's tokenizer"
        )


def _tokens(tokenizer: Tokenizer) -> dict[int, str]:
    return {token_id: token for token, token_id in tokenizer.hf.get_vocab().items()}
