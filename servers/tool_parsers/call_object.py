"""Read one call that a model writes as a JSON object: {"name": "f", "arguments": {...}}.

Owns the text of the object until it is known to be a call; from then on the arguments go out as they come, in the
model's own spelling. "parameters" is another word for "arguments".
"""

import json
from enum import Enum

from servers.tool_parsers.events import Arguments, CallStart, Event

_ARGUMENT_KEYS = ("arguments", "parameters")
_SPACE = " \t\r\n"


class Place(Enum):
    """Where in the object the next character stands."""

    START = "before the brace"
    KEY = "before a key"
    COLON = "after a key"
    VALUE = "before a value"
    IN_VALUE = "within a value"
    COMMA = "after a value"
    END = "after the object"


class CallObject:
    """Feed it characters until it `is_over`. Then either it was a call, or `raw` is what it read instead."""

    def __init__(self) -> None:
        self.raw = ""
        self.is_call = False  # its start has been told
        self.is_over = False
        self._place = Place.START
        self._token = ""  # key or value under way
        self._is_string = self._is_escaped = self._was_quote = False
        self._depth = 0  # within the value
        self._key: str | None = None
        self._name: str | None = None
        self._arguments: str | None = None  # complete, or as far as they have come
        self._is_streaming = False

    def push(self, character: str) -> list[Event]:
        """Read a character. Once over, it reads nothing more."""
        assert not self.is_over, "nothing belongs to an object that has ended"
        if not self.is_call:
            self.raw += character
        if self._place is Place.IN_VALUE:
            return self._in_value(character)
        if self._place is Place.KEY and self._is_string:
            self._read_key(character)
        elif character in _SPACE:
            pass
        elif self._place is Place.START and character == "{":
            self._place = Place.KEY
        elif self._place is Place.KEY and character == '"':
            self._token, self._is_string = character, True
        elif self._place is Place.COLON and character == ":":
            self._place = Place.VALUE
        elif self._place is Place.VALUE and character not in ",:}]":
            return self._begin_value(character)
        elif self._place is Place.COMMA and character == ",":
            self._place = Place.KEY
        elif self._place in (Place.COMMA, Place.KEY) and character == "}":
            return self._end()
        else:
            self.is_over = True  # no JSON
        return []

    def _read_key(self, character: str) -> None:
        self._token += character
        if self._ends_string(character):
            self._key, self._is_string, self._place = _decode_text(self._token), False, Place.COLON

    def _begin_value(self, character: str) -> list[Event]:
        self._place, self._token, self._depth = Place.IN_VALUE, "", 0
        is_arguments = self._key in _ARGUMENT_KEYS and self._arguments is None
        self._is_streaming = is_arguments and self._name is not None and character == "{"
        return [*self._start_if_streaming(), *self._in_value(character)]

    def _start_if_streaming(self) -> list[Event]:
        if not self._is_streaming:
            return []
        assert self._name is not None, "arguments are streamed once the name is known"
        self.is_call, self._arguments = True, ""
        return [CallStart(self._name)]

    def _in_value(self, character: str) -> list[Event]:
        """Read a character of a value, or the one after a number or word."""
        if self._is_string:
            ends = self._ends_string(character) and self._depth == 0
            self._is_string = self._is_string and not self._was_quote
            return self._take(character, ends=ends)
        if character == '"':
            self._is_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]" and self._depth:
            self._depth -= 1
            return self._take(character, ends=self._depth == 0)
        elif self._depth == 0 and character in ",}]" + _SPACE:
            events = self._end_value()
            self.raw = self.raw[:-1]  # push adds it again
            return [*events, *self.push(character)]
        return self._take(character, ends=False)

    def _take(self, character: str, *, ends: bool) -> list[Event]:
        events: list[Event] = []
        if self._is_streaming:
            events.append(Arguments(character))
        else:
            self._token += character
        return [*events, *self._end_value()] if ends else events

    def _ends_string(self, character: str) -> bool:
        self._was_quote = character == '"' and not self._is_escaped
        self._is_escaped = character == "\\" and not self._is_escaped
        return self._was_quote

    def _end_value(self) -> list[Event]:
        self._place = Place.COMMA
        if self._key == "name" and self._name is None:
            self._name = _decode_text(self._token) or None
        elif self._key in _ARGUMENT_KEYS and self._arguments is None:
            self._arguments = _arguments_text(self._token)
        self._is_streaming = False
        return self._tell()

    def _tell(self) -> list[Event]:
        """Tell the whole call once both parts are known."""
        if self.is_call or self._name is None or self._arguments is None:
            return []
        self.is_call = True
        return [CallStart(self._name), Arguments(self._arguments)]

    def _end(self) -> list[Event]:
        self._place, self.is_over = Place.END, True
        if self._arguments is None:
            self._arguments = "{}"
        return self._tell()


def _arguments_text(value: str) -> str:
    """Some models write the arguments as a string that holds JSON, or null for none."""
    if value == "null":
        return "{}"
    if value.startswith('"'):
        decoded = _decode_text(value)
        return value if decoded is None else decoded
    return value


def _decode_text(token: str) -> str | None:
    """Return the text of a JSON string, None for another value or a string with a mistake."""
    try:
        value = json.loads(token)
    except (ValueError, RecursionError):  # a mistake, or another value nested so deep that Python gives up
        return None
    return value if isinstance(value, str) else None
