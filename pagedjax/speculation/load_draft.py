"""Loads the draft model that the options name, and checks that it speaks the target's tokens."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from pagedjax.config import AUTO, EngineConfig
from pagedjax.errors import ConfigError
from pagedjax.loading import LoadedModel, load_model, load_model_config, resolve_dtype
from pagedjax.models.config import ModelConfig
from pagedjax.speculation.vocabulary import check_same_vocabulary
from pagedjax.text.tokenizer import Tokenizer, load_tokenizer

logger = logging.getLogger(__name__)


def load_draft(config: EngineConfig, target: ModelConfig, tokenizer: Tokenizer | None) -> LoadedModel | None:
    """Return the draft model of an engine, with weights of the target's type, or None if it has none.

    Raises:
      ConfigError: it cannot be found, is not supported, or has another vocabulary than the target.
      CheckpointError: its weights are missing, corrupt or do not fit.
    """
    speculation = config.speculation
    if speculation is None or speculation.model is None:
        return None
    load_format = "dummy" if config.load_format == "dummy" else "auto"
    own = replace(
        config, model=speculation.model, revision=speculation.revision, load_format=load_format, tokenizer=None,
        dtype=resolve_dtype(config.dtype, target).name,  # "auto" is the target's type here, whatever the draft's is
    )  # fmt: skip
    with _named(speculation.model):
        shape = load_model_config(own)
        draft_tokenizer = None if tokenizer is None else load_tokenizer(own, remedy="choose another draft model")
    check_same_vocabulary(target, shape, target_tokenizer=tokenizer, draft_tokenizer=draft_tokenizer)
    with _named(speculation.model):
        loaded = load_model(own)
    positions, longest = loaded.config.max_position_embeddings, config.max_model_len
    if longest is None or longest == AUTO:
        longest = target.max_position_embeddings
    if positions < longest:
        logger.warning(
            "the draft model's positions end at %d, requests may be %d tokens long: past that its drafts are useless, "
            "though never wrong; choose another draft model, or set --max-model-len",
            positions, longest,
        )  # fmt: skip
    return loaded


@contextmanager
def _named(model: str) -> Iterator[None]:
    """Say of errors, which know of one model only, that they are the draft's."""
    try:
        yield
    except ConfigError as error:
        raise type(error)(f"the draft model {model!r} cannot be used: {error}") from error
