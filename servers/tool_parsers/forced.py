"""Calls that a grammar has forced: a JSON array of calls (tool_choice "required"), or one call's arguments (named)."""

from collections.abc import Mapping
from typing import Any

from servers.tool_parsers.call_object import CallObject
from servers.tool_parsers.events import Event, EventList
from servers.tool_parsers.grammars import calls_schema


class RequiredCalls:
    """[{"name": "f", "parameters": {...}}, ...], as `schema` describes it."""

    def __init__(self) -> None:
        self._out = EventList()
        self._object: CallObject | None = None

    @staticmethod
    def schema(parameters: Mapping[str, dict[str, Any]], *, is_parallel: bool) -> dict[str, Any]:
        """Return the JSON schema of at least one call of the functions, whose parameters have the given schemas."""
        call = calls_schema(parameters, "parameters")
        array = {"type": "array", "minItems": 1, "items": {"anyOf": call["anyOf"]}, "$defs": call["$defs"]}
        return array if is_parallel else array | {"maxItems": 1}

    def push(self, text: str) -> list[Event]:
        """Read further text."""
        for character in text:
            if self._object is None and character == "{":
                self._object = CallObject()
            if self._object is not None:
                self._out.add_all(self._object.push(character))
                if self._object.is_over:
                    self._object = None
        return self._out.take()

    def finish(self) -> list[Event]:
        """Say what is still held, at the end of the text: nothing, an unfinished call that has not begun is none."""
        return self._out.finish()


class NamedCall:
    """The arguments of one call of a given function."""

    def __init__(self, name: str):
        self._name = name
        self._has_begun = False

    def push(self, text: str) -> list[Event]:
        """Read further text."""
        out = EventList()
        if text and not self._has_begun:
            self._has_begun = True
            out.start(self._name)
        out.arguments(text)
        return out.take()

    def finish(self) -> list[Event]:
        """Say what is still held, at the end of the text: nothing."""
        return []
