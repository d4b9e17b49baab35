"""What a tool parser tells: text, the start of a call, and pieces of the newest call's arguments."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Text:
    """Text that belongs to no call."""

    text: str


@dataclass(frozen=True)
class CallStart:
    """A call begins."""

    name: str


@dataclass(frozen=True)
class Arguments:
    """The next piece of the newest call's arguments, which together are JSON text."""

    text: str


type Event = Text | CallStart | Arguments


class ToolParser(Protocol):
    """Reads one answer."""

    def push(self, text: str) -> list[Event]:
        """Read further text."""
        ...

    def finish(self) -> list[Event]:
        """Say what is still held, at the end of the text."""
        ...


class EventList:
    """Collects events; neighbours of one kind become one, and white space beside calls is dropped."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._is_beside_call = False
        self._space = ""  # held until it is known what follows

    def text(self, text: str) -> None:
        """Add text."""
        body = text.lstrip() if self._is_beside_call else text
        if not body:
            return
        body = self._space + body
        kept = body.rstrip()
        self._space = body[len(kept) :]
        self._is_beside_call = False
        self._add_text(kept)

    def start(self, name: str) -> None:
        """Begin a call."""
        self._space, self._is_beside_call = "", True
        self._events.append(CallStart(name))

    def arguments(self, text: str) -> None:
        """Add to the newest call's arguments."""
        last = self._events[-1] if self._events else None
        if isinstance(last, Arguments):
            self._events.pop()
            text = last.text + text
        if text:
            self._events.append(Arguments(text))

    def add_all(self, events: Iterable[Event]) -> None:
        """Add what another parser told."""
        for event in events:
            match event:
                case Text(text):
                    self.text(text)
                case CallStart(name):
                    self.start(name)
                case Arguments(text):
                    self.arguments(text)

    def take(self) -> list[Event]:
        """Return the events since the last call."""
        events, self._events = self._events, []
        return events

    def finish(self) -> list[Event]:
        """Return the last events; nothing follows any more."""
        self._add_text(self._space)
        self._space = ""
        return self.take()

    def _add_text(self, text: str) -> None:
        last = self._events[-1] if self._events else None
        if isinstance(last, Text):
            self._events.pop()
            text = last.text + text
        if text:
            self._events.append(Text(text))
