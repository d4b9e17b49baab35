"""What a request may ask of the form of its output. Field names and meanings are vLLM's.

Values are checked on construction, for type and size; whether a schema, regex or grammar makes sense is found by
`text.structured_output`, which compiles it.
"""

import json
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Literal

from pagedjax.errors import InvalidRequestError

MAX_GRAMMAR_CHARS = 1 << 17  # of a schema, regex, grammar, or all choices together
MAX_CHOICES = 1024
MAX_WHITESPACE_PATTERN_CHARS = 256
KINDS = ("json", "regex", "choice", "grammar", "json_object")

Kind = Literal["json", "regex", "choice", "grammar"]


@dataclass(frozen=True)
class ReasoningTokens:
    """Reasoning that may precede the structured part: each marker is the text of one token of the vocabulary."""

    start: str
    end: str
    is_open: bool  # the prompt has begun it; otherwise the first token may


@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """The output's form: exactly one of json, regex, choice, grammar and json_object.

    Attributes:
      json: a JSON schema, as an object or as text.
      regex: a regular expression that the whole output matches.
      choice: the outputs there are.
      grammar: a context-free grammar in Lark's or GBNF's notation.
      json_object: True for any JSON object.
      disable_any_whitespace: JSON without whitespace between its tokens.
      whitespace_pattern: a regular expression for that whitespace; at most 64 characters of it if None.
      reasoning: what comes before the output proper and is free; None for nothing.

    Raises:
      InvalidRequestError: none or several of them, a value of another type, or one that is too long.
    """

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | tuple[str, ...] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None
    reasoning: ReasoningTokens | None = None

    def __post_init__(self) -> None:
        given = [name for name in KINDS if getattr(self, name) is not None and getattr(self, name) is not False]
        if len(given) != 1:
            found = ", ".join(given) or "none"
            raise _invalid(f"structured_outputs needs exactly one of {', '.join(KINDS)}; given: {found}")
        for field in fields(self):
            _CHECKS[field.name](field.name, getattr(self, field.name))
        kind, text = self.source
        if len(text) > MAX_GRAMMAR_CHARS:
            raise _invalid(
                f"structured_outputs.{kind} has {len(text)} characters, the limit is {MAX_GRAMMAR_CHARS}; shorten it"
            )

    @cached_property
    def source(self) -> tuple[Kind, str]:
        """The kind of grammar and its text; choices are a JSON array."""
        if self.json_object:
            return "json", '{"type":"object"}'
        if self.regex is not None:
            return "regex", self.regex
        if self.choice is not None:
            return "choice", json.dumps(list(self.choice))
        if self.grammar is not None:
            return "grammar", self.grammar
        return "json", self.json if isinstance(self.json, str) else json.dumps(self.json)


def _check_json(name: str, value: Any) -> None:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise _invalid(f"structured_outputs.{name} is not JSON: {error!s:.120}; send a JSON schema") from None
    if not isinstance(value, dict | None):
        raise _invalid(f"structured_outputs.{name} is {value!r:.80}; it must be a JSON schema, which is an object")


def _check_text(name: str, value: Any) -> None:
    if value is not None and (not isinstance(value, str) or not value):
        raise _invalid(f"structured_outputs.{name} is {value!r:.80}; it must be a string that is not empty")


def _check_whitespace(name: str, value: Any) -> None:
    _check_text(name, value)
    if value is not None and len(value) > MAX_WHITESPACE_PATTERN_CHARS:
        raise _invalid(
            f"structured_outputs.{name} has {len(value)} characters, the limit is {MAX_WHITESPACE_PATTERN_CHARS}; "
            "shorten it"
        )


def _check_choice(name: str, value: Any) -> None:
    if value is None:
        return
    if not isinstance(value, list | tuple) or not all(isinstance(one, str) and one for one in value) or not value:
        raise _invalid(f"structured_outputs.{name} is {value!r:.80}; it must be a list of strings, none of them empty")
    if len(value) > MAX_CHOICES:
        raise _invalid(
            f"structured_outputs.{name} has {len(value)} entries, the limit is {MAX_CHOICES}; remove some or use regex"
        )


def _check_boolean(name: str, value: Any) -> None:
    if not isinstance(value, bool | None):
        raise _invalid(f"structured_outputs.{name} is {value!r:.80}; it must be true or false")


def _check_reasoning(name: str, value: Any) -> None:
    if not isinstance(value, ReasoningTokens | None):
        raise _invalid(f"structured_outputs.{name} is {value!r:.80}; it must be ReasoningTokens")


_CHECKS = {
    "json": _check_json,
    "regex": _check_text,
    "choice": _check_choice,
    "grammar": _check_text,
    "json_object": _check_boolean,
    "disable_any_whitespace": _check_boolean,
    "whitespace_pattern": _check_whitespace,
    "reasoning": _check_reasoning,
}


def _invalid(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, param="structured_outputs")
