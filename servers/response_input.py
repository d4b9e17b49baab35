"""The input of /v1/responses as chat messages: plain text, messages, reasoning, function calls and what they returned.

What was thought belongs to the assistant's message or calls that follow it.
"""

from collections.abc import Mapping
from typing import Any

from pagedjax import InvalidRequestError

_TEXT_PARTS = ("input_text", "output_text", "text")
_ITEM_KEYS = {
    "message": {"type", "role", "content", "id", "status", "phase"},
    "reasoning": {"type", "content", "summary", "encrypted_content", "id", "status"},
    "function_call": {"type", "call_id", "name", "arguments", "id", "status"},
    "function_call_output": {"type", "call_id", "output", "id", "status"},
}


def to_messages(value: Any, instructions: str | None) -> list[dict[str, Any]]:
    """Return the messages that the fields input and instructions stand for.

    Raises:
      InvalidRequestError: an item is malformed or of a kind that is not supported.
    """
    messages: list[dict[str, Any]] = []
    if instructions is not None:
        messages.append({"role": "system", "content": instructions})
    if isinstance(value, str):
        return [*messages, {"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise _error("input", "it must be a string or a list of at least one item")
    thought = ""
    for i, item in enumerate(value):
        kind = _kind(item, f"input[{i}]")
        if kind == "reasoning":
            thought += _thought(item, f"input[{i}]")
            continue
        _add(messages, kind, item, f"input[{i}]")
        if thought and messages[-1]["role"] == "assistant":
            messages[-1]["reasoning"] = messages[-1].get("reasoning", "") + thought
        thought = ""  # of an answer that did not come, which templates have no place for
    return messages


def _kind(item: Any, where: str) -> str:
    if not isinstance(item, dict):
        raise _error(where, "it must be an object")
    kind = item.get("type", "message")
    if not isinstance(kind, str) or kind not in _ITEM_KEYS:
        raise _error(where, f"items of type {kind!r:.40} are not supported; {', '.join(_ITEM_KEYS)} are")
    for key in item.keys() - _ITEM_KEYS[kind]:
        raise _error(f"{where}.{key[:40]}", "there is no such field; remove it")
    return kind


def _add(messages: list[dict[str, Any]], kind: str, item: Mapping[str, Any], where: str) -> None:
    if kind == "message":
        messages.append({"role": item.get("role"), "content": _content(item.get("content"), where)})
    elif kind == "function_call_output":
        output = _content(item.get("output"), f"{where}.output")
        messages.append({"role": "tool", "tool_call_id": _text(item, "call_id", where), "content": output})
    else:
        _add_call(messages, item, where)


def _add_call(messages: list[dict[str, Any]], item: Mapping[str, Any], where: str) -> None:
    """Calls that follow each other belong to one message of the assistant."""
    function = {"name": _text(item, "name", where), "arguments": _text(item, "arguments", where)}
    call = {"id": _text(item, "call_id", where), "type": "function", "function": function}
    if not (messages and messages[-1]["role"] == "assistant" and "tool_calls" in messages[-1]):
        messages.append({"role": "assistant", "content": None, "tool_calls": []})
    messages[-1]["tool_calls"].append(call)


def _thought(item: Mapping[str, Any], where: str) -> str:
    """Return the text of a reasoning item; its summary only repeats it."""
    if item.get("encrypted_content") is not None:
        raise _error(f"{where}.encrypted_content", "encrypted reasoning cannot be read here; leave the item out")
    content = item.get("content")
    if not isinstance(content, list | None):
        raise _error(f"{where}.content", "it must be a list of text parts")
    parts = [_part(part, f"{where}.content[{i}]", ("reasoning_text",)) for i, part in enumerate(content or [])]
    return "".join(part["text"] for part in parts)


def _content(content: Any, where: str) -> str | list[dict[str, str]]:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _error(where, "its content must be a string or a list of text parts")
    return [_part(part, f"{where}.content[{i}]", _TEXT_PARTS) for i, part in enumerate(content)]


def _part(part: Any, where: str, kinds: tuple[str, ...]) -> dict[str, str]:
    if isinstance(part, dict) and part.get("type") in kinds and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    kind = part.get("type") if isinstance(part, dict) else part
    raise _error(
        where, f"it is {kind!r:.40}; only text parts are supported, like {{'type': '{kinds[0]}', 'text': ...}}"
    )


def _text(item: Mapping[str, Any], key: str, where: str) -> str:
    value = item.get(key)
    if not isinstance(value, str):
        raise _error(f"{where}.{key}", "it must be a string")
    return value


def _error(where: str, problem: str) -> InvalidRequestError:
    return InvalidRequestError(f"{where}: {problem}", param="input")
