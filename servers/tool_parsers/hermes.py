"""Calls as Hermes and Qwen models write them: <tool_call>{"name": "f", "arguments": {...}}</tool_call>."""

from servers.tags import partial_match
from servers.tool_parsers.call_object import CallObject
from servers.tool_parsers.events import Event, EventList

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesCalls:
    """Text, and calls between tags. A missing end tag is forgiven, anything but a call between the tags is text."""

    def __init__(self) -> None:
        self._out = EventList()
        self._held = ""  # perhaps the start of a tag
        self._object: CallObject | None = None
        self._is_after_call = False

    def push(self, text: str) -> list[Event]:
        """Read further text."""
        if self._object is None and not self._held and not self._is_after_call and "<" not in text:
            self._out.text(text)  # as most text is
        else:
            for character in text:
                self._read(character)
        return self._out.take()

    def finish(self) -> list[Event]:
        """Say what is still held, at the end of the text."""
        if self._object is not None and not self._object.is_call:
            self._out.text(OPEN + self._object.raw)
        elif not self._is_after_call or not CLOSE.startswith(self._held):
            self._out.text(self._held)
        return self._out.finish()

    def _read(self, character: str) -> None:
        if self._object is not None:
            self._read_object(self._object, character)
            return
        self._held += character
        tags = (OPEN, CLOSE) if self._is_after_call else (OPEN,)
        if self._held in tags:
            self._object = CallObject() if self._held == OPEN else None
            self._held, self._is_after_call = "", False
            return
        keep = max(partial_match(self._held, tag) for tag in tags)
        text, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        self._is_after_call = self._is_after_call and not text.strip()
        self._out.text(text)

    def _read_object(self, call: CallObject, character: str) -> None:
        self._out.add_all(call.push(character))
        if not call.is_over:
            return
        self._object, self._is_after_call = None, call.is_call
        if not call.is_call:
            self._out.text(OPEN + call.raw[:-1])
            self._read(character)  # it may begin the next tag
