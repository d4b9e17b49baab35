"""Checks of single JSON values: each returns the value as the engine wants it, or refuses it by name.

Ranges that SamplingParams checks are left to it.
"""

import difflib
import json
import math
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

from pagedjax.errors import InvalidRequestError
from pagedjax.sampling_params import MAX_LOGIT_BIAS

MAX_TOKEN_IDS = 1 << 18  # in one field; no vocabulary is larger
type Check = Callable[[str, Any], Any]


def boolean(name: str, value: Any) -> bool:
    """Accept true and false, and nothing that resembles them."""
    return value if isinstance(value, bool) else _refuse(name, value, "true or false")


def boolean_or(word: str) -> Check:
    """Accept true, false and this word."""

    def check(name: str, value: Any) -> bool | str:
        return value if isinstance(value, bool) or value == word else _refuse(name, value, f"true, false or {word!r}")

    return check


def integer(name: str, value: Any) -> int:
    """Accept a whole number."""
    return value if _is_integer(value) else _refuse(name, value, "an integer")


def positive_integer(name: str, value: Any) -> int:
    """Accept a whole number of 1 or more."""
    return value if _is_integer(value) and value >= 1 else _refuse(name, value, "an integer, at least 1")


def number(name: str, value: Any) -> float:
    """Accept a finite number."""
    return _finite(value) if _is_finite(value) else _refuse(name, value, "a finite number")


def text(name: str, value: Any) -> str:
    """Accept a string."""
    return value if isinstance(value, str) else _refuse(name, value, "a string")


def nonempty_text(name: str, value: Any) -> str:
    """Accept a string with at least one character."""
    return value if isinstance(value, str) and value else _refuse(name, value, "a string that is not empty")


def texts(name: str, value: Any) -> list[str]:
    """Accept a list of strings."""
    is_texts = isinstance(value, list) and all(isinstance(entry, str) for entry in value)
    return value if is_texts else _refuse(name, value, "a list of strings")


def text_or_texts(name: str, value: Any) -> list[str]:
    """Accept a string or a list of strings; return a list."""
    return [value] if isinstance(value, str) else texts(name, value)


def token_ids(name: str, value: Any) -> list[int]:
    """Accept a list of whole numbers."""
    if isinstance(value, list) and len(value) > MAX_TOKEN_IDS:
        _refuse(name, value, f"a list of at most {MAX_TOKEN_IDS} token ids")
    return value if is_token_ids(value) else _refuse(name, value, "a list of token ids")


def is_token_ids(value: Any) -> bool:
    """Whether `value` is a list of whole numbers."""
    return isinstance(value, list) and set(map(type, value)) <= {int}


def json_object(name: str, value: Any) -> dict[str, Any]:
    """Accept a JSON object."""
    return value if isinstance(value, dict) else _refuse(name, value, "an object")


def json_array(name: str, value: Any) -> list[Any]:
    """Accept a JSON array."""
    return value if isinstance(value, list) else _refuse(name, value, "an array")


def biases(name: str, value: Any) -> dict[int, float]:
    """Accept an object from token ids, as decimal strings, to numbers."""
    json_object(name, value)
    if len(value) > MAX_LOGIT_BIAS:
        _refuse(name, value, f"an object of at most {MAX_LOGIT_BIAS} entries")
    result = {}
    for key, bias in value.items():
        is_id = key.isascii() and key.isdigit() and len(key) < 20
        if not is_id or not _is_finite(bias):
            _refuse(f"{name}[{key!r:.40}]", bias, "a finite number under a token id such as '42'", param=name)
        result[int(key)] = _finite(bias)
    return result


def one_of(*words: str) -> Check:
    """Accept these words."""

    def check(name: str, value: Any) -> str:
        return (
            value if isinstance(value, str) and value in words else _refuse(name, value, f"one of {', '.join(words)}")
        )

    return check


def some_of(*words: str) -> Check:
    """Accept a list of these words."""

    def check(name: str, value: Any) -> list[str]:
        is_known = isinstance(value, list) and all(isinstance(one, str) and one in words for one in value)
        return value if is_known else _refuse(name, value, f"a list of {', '.join(words)}")

    return check


class Only:
    """Accept just these values: of a known field whose others are not built here."""

    def __init__(self, *accepted: Any):
        self._accepted = accepted

    def __call__(self, name: str, value: Any) -> Any:
        if not any(type(value) is type(one) and value == one for one in self._accepted):
            others = "".join(f" or send {json.dumps(one)}" for one in self._accepted)
            raise InvalidRequestError(
                f"{name} is {_shown(value)}; this is not supported here, leave it out{others}", param=name
            )
        return value


def anything(name: str, value: Any) -> Any:
    """Accept anything: of a field that the endpoint checks as a whole."""
    return value


def ignored(name: str, value: Any) -> None:
    """Accept anything: of a field that by its definition has no effect on the answer."""


def advice(name: str, known: Iterable[str]) -> str:
    """Return what to do about a name that is not known: the closest one that is, if any is close."""
    close = difflib.get_close_matches(name[:64], known, n=1)
    return f"did you mean {close[0]!r}?" if close else "remove it"


def _refuse(name: str, value: Any, wanted: str, *, param: str | None = None) -> NoReturn:
    raise InvalidRequestError(f"{name} is {_shown(value)}; it must be {wanted}", param=param or name)


def _shown(value: Any) -> str:
    """Quote a value, briefly: what came in may be huge."""
    if isinstance(value, dict | list):
        return f"a JSON {'object' if isinstance(value, dict) else 'array'} of {len(value)} entries"
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > 10**20:
        return "a huge integer"
    return f"{value if not isinstance(value, str) else value[:100]!r:.80}"


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_finite(value: Any) -> bool:
    is_number = isinstance(value, float) or _is_integer(value)
    return is_number and math.isfinite(_finite(value))


def _finite(value: float | int) -> float:
    try:
        return float(value)
    except OverflowError:  # an integer beyond every float
        return math.inf
