"""The output items of a response: a message, reasoning, function calls; built as the answer comes, told in events."""

import uuid
from dataclasses import dataclass, field
from typing import Any, Literal

from servers.answer_parser import MessagePart

type ItemEvent = tuple[str, dict[str, Any]]  # kind without "response.", and values

_IDS = {"message": "msg", "reasoning": "rs", "function_call": "fc"}
_TEXTS = {"message": "output_text", "reasoning": "reasoning_text"}


@dataclass
class Item:
    """One item. `text` is a message's, what was thought, or the arguments of a call."""

    kind: Literal["message", "reasoning", "function_call"]
    index: int
    name: str | None = None
    call_id: str | None = None
    text: str = ""
    logprobs: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.id = f"{_IDS[self.kind]}_{uuid.uuid4().hex}"

    def as_json(self, status: str, *, is_new: bool = False) -> dict[str, Any]:
        """Return the item; a new one has no content yet."""
        item: dict[str, Any] = {"id": self.id, "type": self.kind, "status": status}
        content = [] if is_new else [self.part()]
        match self.kind:
            case "message":
                return item | {"role": "assistant", "content": content}
            case "reasoning":
                return item | {"summary": [], "content": content}
        return item | {"call_id": self.call_id, "name": self.name, "arguments": self.text}

    def part(self) -> dict[str, Any]:
        """Return the one part of a message's or a reasoning's content."""
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": self.text}
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": self.logprobs}


class OutputItems:
    """The items of one response. The last one is open until another begins or the answer ends."""

    def __init__(self) -> None:
        self._items: list[Item] = []

    def open(
        self,
        kind: Literal["message", "reasoning", "function_call"],
        *,
        name: str | None = None,
        call_id: str | None = None,
    ) -> list[ItemEvent]:
        """End the open item and begin another."""
        events = self._end("completed")
        item = Item(kind, len(self._items), name, call_id)
        self._items.append(item)
        new = item.as_json("in_progress", is_new=True)
        events.append(("output_item.added", {"output_index": item.index, "item": new}))
        if kind != "function_call":
            events.append(("content_part.added", {**self._place(item), "part": item.part()}))
        return events

    def add(self, part: MessagePart, logprobs: list[dict[str, Any]]) -> list[ItemEvent]:
        """Take in a piece of the answer; log probabilities belong to the message's text."""
        events = []
        if part.reasoning:
            events += [*self._open_unless("reasoning"), *self._grow(part.reasoning)]
        if part.content or (logprobs and self._is_open("message")):
            events += [*self._open_unless("message"), *self._grow(part.content, logprobs)]
        for call in part.calls:
            if call.id is not None:
                events += self.open("function_call", name=call.name, call_id=call.id)
            if call.arguments:
                events += self._grow(call.arguments)
        return events

    def finish(self, status: str) -> list[ItemEvent]:
        """End the answer; one without any item gets an empty message."""
        events = [] if self._items else self.open("message")
        return [*events, *self._end(status)]

    def as_json(self, status: str) -> list[dict[str, Any]]:
        """Return all items, of an answer whose last one ended so."""
        last = len(self._items) - 1
        return [item.as_json(status if item.index == last else "completed") for item in self._items]

    def _is_open(self, kind: str) -> bool:
        return bool(self._items) and self._items[-1].kind == kind

    def _open_unless(self, kind: Literal["message", "reasoning"]) -> list[ItemEvent]:
        return [] if self._is_open(kind) else self.open(kind)

    def _grow(self, text: str, logprobs: list[dict[str, Any]] | None = None) -> list[ItemEvent]:
        item = self._items[-1]
        item.text += text
        if item.kind == "function_call":
            return [("function_call_arguments.delta", {**self._place(item), "delta": text})]
        item.logprobs += logprobs or []
        extra = {"logprobs": logprobs or []} if item.kind == "message" else {}
        return [(f"{_TEXTS[item.kind]}.delta", {**self._place(item), "delta": text, **extra})]

    def _end(self, status: str) -> list[ItemEvent]:
        if not self._items:
            return []
        item = self._items[-1]
        if item.kind == "function_call":
            done = {**self._place(item), "name": item.name, "arguments": item.text}
            events: list[ItemEvent] = [("function_call_arguments.done", done)]
        else:
            extra = {"logprobs": item.logprobs} if item.kind == "message" else {}
            events = [
                (f"{_TEXTS[item.kind]}.done", {**self._place(item), "text": item.text, **extra}),
                ("content_part.done", {**self._place(item), "part": item.part()}),
            ]
        return [*events, ("output_item.done", {"output_index": item.index, "item": item.as_json(status)})]

    def _place(self, item: Item) -> dict[str, Any]:
        place = {"item_id": item.id, "output_index": item.index}
        return place if item.kind == "function_call" else place | {"content_index": 0}
