"""Calls as Llama 3 writes them: the whole answer is {"name": "f", "parameters": {...}}, or several joined by ";"."""

from servers.tool_parsers.call_object import CallObject
from servers.tool_parsers.events import Event, EventList

PYTHON_TAG = "<|python_tag|>"


class LlamaCalls:
    """Calls from the first character on, the tag before them left out; an answer that begins otherwise is text."""

    def __init__(self) -> None:
        self._out = EventList()
        self._held = ""  # white space and perhaps the tag, before an object
        self._object: CallObject | None = None
        self._is_text = False
        self._num_calls = 0

    def push(self, text: str) -> list[Event]:
        """Read further text."""
        if self._is_text:
            self._out.text(text)
        else:
            for character in text:
                self._read(character)
        return self._out.take()

    def finish(self) -> list[Event]:
        """Say what is still held, at the end of the text."""
        if self._object is not None:
            if not self._object.is_call:
                self._out.text(self._held + self._object.raw)
        elif not self._num_calls or self._held.strip(" \t\r\n;"):
            self._out.text(self._held)
        return self._out.finish()

    def _read(self, character: str) -> None:
        if self._is_text:
            self._out.text(character)
        elif self._object is not None:
            self._read_object(self._object, character)
        elif character == "{" and self._held.strip() in self._allowed:
            self._object = CallObject()
            self._read_object(self._object, character)
        else:
            self._held += character
            if not any(allowed.startswith(self._held.strip()) for allowed in self._allowed):
                self._become_text(self._held)

    @property
    def _allowed(self) -> tuple[str, ...]:
        """What may stand before an object, white space aside."""
        return ("", ";") if self._num_calls else ("", PYTHON_TAG)

    def _read_object(self, call: CallObject, character: str) -> None:
        self._out.add_all(call.push(character))
        if not call.is_over:
            return
        if call.is_call:
            self._object, self._held = None, ""
            self._num_calls += 1
        else:
            self._become_text(self._held + call.raw)

    def _become_text(self, text: str) -> None:
        self._is_text, self._object, self._held = True, None, ""
        self._out.text(text)
