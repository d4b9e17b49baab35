"""What kinds of values a config.json may hold, so that the reader meets no other.

A table of the keys that are read; keys that nobody reads may hold anything, and null is as good as absent.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from pagedjax.errors import ConfigError


class _Kind(NamedTuple):
    fits: Callable[[Any], bool]
    words: str


def check_values(hf: Mapping[str, Any]) -> None:
    """Check the keys of a config.json, those of its rope objects included.

    Raises:
      ConfigError: a value is of the wrong kind; the message names the key, the value and what it must be.
    """
    _check(hf, _KINDS)
    for name in ("rope_scaling", "rope_parameters"):
        for values in _with_nested(hf.get(name) or {}):
            _check(values, _ROPE_KINDS, prefix=f"{name}.")


def _check(values: Mapping[str, Any], kinds: Mapping[str, _Kind], *, prefix: str = "") -> None:
    for name, kind in kinds.items():
        value = values.get(name)
        if value is not None and not kind.fits(value):
            raise ConfigError(f"{prefix}{name} is {value!r:.80}; it must be {kind.words}: download config.json again")


def _with_nested(parameters: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Gemma 3 has an object for each kind of layer."""
    return [parameters, *(value for value in parameters.values() if isinstance(value, dict))]


def _is_integer(value: Any, low: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value < 2**31


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def _is_token_ids(value: Any) -> bool:
    return all(_is_integer(one, 0) for one in (value if isinstance(value, list) else [value]))


_COUNT = _Kind(lambda value: _is_integer(value, 1), "an integer, at least 1 and below 2**31")
_NUMBER = _Kind(_is_number, "a number above 0")
_FLAG = _Kind(lambda value: isinstance(value, bool), "true or false")
_TEXT = _Kind(lambda value: isinstance(value, str), "a string")
_TEXTS = _Kind(
    lambda value: isinstance(value, list) and all(isinstance(one, str) for one in value), "a list of strings"
)
_OBJECT = _Kind(lambda value: isinstance(value, dict), "an object")

_KINDS = {
    **dict.fromkeys(("architectures", "layer_types"), _TEXTS),
    **dict.fromkeys(("rope_scaling", "rope_parameters", "quantization_config"), _OBJECT),
    **dict.fromkeys(("attention_bias", "mlp_bias", "tie_word_embeddings", "use_sliding_window"), _FLAG),
    **dict.fromkeys(
        (
            "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
            "num_key_value_heads", "head_dim", "max_position_embeddings", "sliding_window", "sliding_window_pattern",
            "original_max_position_embeddings",
        ),
        _COUNT,
    ),
    **dict.fromkeys(
        (
            "rms_norm_eps", "rope_theta", "rope_local_base_freq", "query_pre_attn_scalar", "attn_logit_softcapping",
            "final_logit_softcapping",
        ),
        _NUMBER,
    ),
    "max_window_layers": _Kind(lambda value: _is_integer(value, 0), "an integer, at least 0"),
    "bos_token_id": _Kind(lambda value: _is_integer(value, 0), "a token id"),
    "eos_token_id": _Kind(_is_token_ids, "a token id or a list of them"),
}  # fmt: skip
_ROPE_KINDS = {
    **dict.fromkeys(("rope_type", "type"), _TEXT),
    **dict.fromkeys(
        (
            "rope_theta", "factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor",
        ),
        _NUMBER,
    ),
    "original_max_position_embeddings": _COUNT,
    **dict.fromkeys(
        ("mscale", "mscale_all_dim"), _Kind(lambda value: value == 0 or _is_number(value), "a number, at least 0")
    ),
    "full_attention": _OBJECT,
    "sliding_attention": _OBJECT,
}  # fmt: skip
