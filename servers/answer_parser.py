"""From the text of one choice of a chat to its message: reasoning, content and tool calls, as they come."""

import uuid
from dataclasses import dataclass, field
from typing import Any

from servers.reasoning import Parts, ReasoningParser
from servers.tool_parsers import Arguments, CallStart, Event, Text, ToolParser


@dataclass
class CallPart:
    """A piece of the call with this index; `id` and `name` come with its first piece."""

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None

    def as_json(self) -> dict[str, Any]:
        if self.id is None:
            return {"index": self.index, "function": {"arguments": self.arguments}}
        function = {"name": self.name, "arguments": self.arguments}
        return {"index": self.index, "id": self.id, "type": "function", "function": function}


@dataclass
class MessagePart:
    """A piece of a message, or all of it."""

    reasoning: str = ""
    content: str = ""
    calls: list[CallPart] = field(default_factory=list)

    def as_delta(self) -> dict[str, Any]:
        """Return what a chunk says of it: the parts that are there."""
        calls = [call.as_json() for call in self.calls]
        parts = {"reasoning": self.reasoning, "content": self.content, "tool_calls": calls}
        return {name: value for name, value in parts.items() if value}

    def as_message(self, *, with_reasoning: bool) -> dict[str, Any]:
        """Return it as a whole message; content is null beside reasoning or calls only."""
        message: dict[str, Any] = {"content": self.content or (None if self.reasoning or self.calls else "")}
        if with_reasoning:
            message["reasoning"] = self.reasoning or None
        if self.calls:
            calls = [call.as_json() for call in self.calls]
            message["tool_calls"] = [{name: call[name] for name in ("id", "type", "function")} for call in calls]
        return message


class AnswerParser:
    """Reads the text of one choice. Without `is_parallel` the calls after the first are left out."""

    def __init__(self, reasoning: ReasoningParser | None, tools: ToolParser | None, *, is_parallel: bool):
        self._reasoning = reasoning
        self._tools = tools
        self._max_calls = None if is_parallel else 1
        self._num_calls = 0

    @property
    def has_calls(self) -> bool:
        """Whether a call has begun."""
        return self._num_calls > 0

    def push(self, text: str, *, is_last: bool) -> MessagePart:
        """Read further text; `is_last` where it is the end of the answer."""
        part = MessagePart()
        parts = Parts(content=text) if self._reasoning is None else self._reasoning.push(text)
        self._add(part, parts)
        if is_last:
            if self._reasoning is not None:
                self._add(part, self._reasoning.finish())
            if self._tools is not None:
                self._add_events(part, self._tools.finish())
        return part

    def _add(self, part: MessagePart, parts: Parts) -> None:
        part.reasoning += parts.reasoning
        if self._tools is None:
            part.content += parts.content
        else:
            self._add_events(part, self._tools.push(parts.content))

    def _add_events(self, part: MessagePart, events: list[Event]) -> None:
        for event in events:
            match event:
                case Text(text):
                    part.content += text
                case CallStart(name):
                    self._num_calls += 1
                    if self._is_wanted:
                        part.calls.append(CallPart(self._num_calls - 1, id=f"call_{uuid.uuid4().hex}", name=name))
                case Arguments(text) if self._is_wanted:
                    if not part.calls or part.calls[-1].index != self._num_calls - 1:
                        part.calls.append(CallPart(self._num_calls - 1))
                    part.calls[-1].arguments += text

    @property
    def _is_wanted(self) -> bool:
        return self._max_calls is None or self._num_calls <= self._max_calls
