"""Tools and the form of the text of /v1/responses, in the words of chats: the same things, shaped otherwise."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from pagedjax import InvalidRequestError
from servers.output_form import errors_by_field


def chat_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a chat that the fields tools, tool_choice, parallel_tool_calls and text stand for.

    Raises:
      InvalidRequestError: a tool is no function, or text is malformed.
    """
    return {
        "tools": [_tool(f"tools[{i}]", tool) for i, tool in enumerate(fields["tools"])],
        "tool_choice": _tool_choice(fields["tool_choice"]),
        "parallel_tool_calls": fields["parallel_tool_calls"],
        "response_format": _response_format(fields["text"]),
        "structured_outputs": None,
    }


@contextmanager
def errors_in_these_words(chat: Mapping[str, Any]) -> Iterator[None]:
    """Say text.format where an error speaks of a chat's response_format."""
    try:
        with errors_by_field(chat):
            yield
    except InvalidRequestError as error:
        if error.param != "response_format":
            raise
        raise InvalidRequestError(str(error).replace("response_format", "text.format"), param="text") from None


def _tool(where: str, tool: Any) -> Any:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        kind = tool.get("type") if isinstance(tool, dict) else tool
        raise InvalidRequestError(f"{where} is {kind!r:.80}; only tools of type function are supported", param="tools")
    return {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}


def _tool_choice(value: Any) -> Any:
    match value:
        case {"type": "function", "name": name} if len(value) == 2:
            return {"type": "function", "function": {"name": name}}
    return value


def _response_format(text: Mapping[str, Any]) -> dict[str, Any] | None:
    for key in text.keys() - {"format", "verbosity"}:
        raise _invalid(f"{key[:64]!r} is no field of text; it has format")
    if text.get("verbosity") not in (None, "medium"):
        raise _invalid("text.verbosity is not supported here; leave it out")
    value = text.get("format")
    if value is None:
        return None
    if not isinstance(value, dict):
        raise _invalid(f"text.format is {value!r:.80}; it must be an object with a type")
    if value.get("type") != "json_schema":
        return value
    return {"type": "json_schema", "json_schema": {key: one for key, one in value.items() if key != "type"}}


def _invalid(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, param="text")
