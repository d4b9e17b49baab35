"""Calls as a Python list: [f(a=1, b="x"), g()]. The whole answer is the list; one that begins otherwise is text."""

import ast
import json
import re
import warnings
from typing import Any

from servers.tool_parsers.events import Event, EventList

_BEFORE_CALL = re.compile(r"\[\s{0,64}([A-Za-z_][\w.]{0,127}\s{0,64}\(?)?")
_PAIRS = {"(": ")", "[": "]", "{": "}"}


class PythonicCalls:
    """Tells each call when its parenthesis closes: keyword arguments that are literals, as JSON."""

    def __init__(self) -> None:
        self._out = EventList()
        self._raw = ""  # of the call under way, with what stands before it
        self._closing: list[str] = []  # brackets open within the call
        self._quote = ""
        self._is_escaped = False
        self._num_calls = 0
        self._is_text = self._is_over = False

    def push(self, text: str) -> list[Event]:
        """Read further text."""
        if self._is_text or self._is_over:
            self._out.text(text)
        else:
            for character in text:
                self._read(character)
        return self._out.take()

    def finish(self) -> list[Event]:
        """Say what is still held, at the end of the text."""
        if not self._is_over and (not self._num_calls or self._raw.strip(" \t\r\n,")):
            self._out.text(self._raw)
        return self._out.finish()

    def _read(self, character: str) -> None:
        if self._is_text or self._is_over:
            self._out.text(character)
            return
        self._raw += character
        if self._closing:
            self._read_in_call(character)
        elif character == "]" and self._num_calls and self._raw.strip(" \t\r\n,") == "]":
            self._is_over, self._raw = True, ""
        elif not self._may_become_call():
            self._become_text()
        elif character == "(":
            self._closing.append(")")

    def _may_become_call(self) -> bool:
        before = self._raw.lstrip(" \t\r\n,") if self._num_calls else self._raw.lstrip()
        if self._num_calls:
            before = "[" + before
        return not before or (before.startswith("[") and _BEFORE_CALL.fullmatch(before) is not None)

    def _read_in_call(self, character: str) -> None:
        if self._quote:
            if character == self._quote and not self._is_escaped:
                self._quote = ""
            self._is_escaped = character == "\\" and not self._is_escaped
        elif character in "\"'":
            self._quote = character
        elif character in _PAIRS:
            self._closing.append(_PAIRS[character])
        elif character == self._closing[-1]:
            self._closing.pop()
            if not self._closing:
                self._end_call()
        elif character in ")]}":
            self._become_text()

    def _end_call(self) -> None:
        call = _parse(self._raw.lstrip(" \t\r\n,[") if self._num_calls else self._raw.lstrip().removeprefix("["))
        if call is None:
            self._become_text()
            return
        name, arguments = call
        self._out.start(name)
        self._out.arguments(arguments)
        self._num_calls += 1
        self._raw = ""

    def _become_text(self) -> None:
        self._is_text = True
        self._out.text(self._raw)
        self._raw = ""


def _parse(source: str) -> tuple[str, str] | None:
    """Return the name and the arguments as JSON, or None if it is no such call."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of unknown escapes in strings
            call = ast.parse(source.strip(), mode="eval").body
            if not isinstance(call, ast.Call) or call.args:
                return None
            return ast.unparse(call.func), json.dumps(_keywords(call), ensure_ascii=False, allow_nan=False)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


def _keywords(call: ast.Call) -> dict[str, Any]:
    values = {}
    for keyword in call.keywords:
        if keyword.arg is None:
            raise ValueError("**arguments name nothing")
        values[keyword.arg] = _json_value(ast.literal_eval(keyword.value))
    return values


def _json_value(value: Any) -> Any:
    """Refuse what JSON has no word for."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case list() | tuple():
            return [_json_value(one) for one in value]
        case dict() if all(isinstance(key, str) for key in value):
            return {key: _json_value(one) for key, one in value.items()}
    raise ValueError(f"{value!r:.40} is no JSON value")
