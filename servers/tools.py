"""The tools of a chat: what the client offers, and whether the model may, must or must not call them."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pagedjax import InvalidRequestError, StructuredOutputsParams
from servers.config import ServerConfig
from servers.tool_parsers import ANSWER_GRAMMARS, TOOL_PARSERS, NamedCall, RequiredCalls, ToolParser

MAX_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,64}")
_FUNCTION_FIELDS = ("name", "description", "parameters", "strict")

Choice = Literal["none", "auto", "required", "named"]


@dataclass(frozen=True)
class ToolUse:
    """Tools as templates get them, and how they are used. `name` is the function that a named choice names."""

    tools: list[dict[str, Any]]
    choice: Choice
    is_parallel: bool  # whether one answer may hold several calls
    parser: str | None  # of the server's, for the choice auto
    name: str | None = None

    def form(self, content: StructuredOutputsParams | None) -> StructuredOutputsParams | None:
        """Return the form of the output, where the client fixed that of its content (None: it did not).

        Raises:
          InvalidRequestError: the two cannot be joined.
        """
        parameters = {tool["function"]["name"]: _parameters(tool) for tool in self.tools}
        if self.choice in ("required", "named") and content is not None:
            raise InvalidRequestError(
                "tool_choice forces a call, which has its own form; leave out response_format and structured_outputs",
                param="tool_choice",
            )
        match self.choice:
            case "required":
                return StructuredOutputsParams(json=RequiredCalls.schema(parameters, is_parallel=self.is_parallel))
            case "named":
                assert self.name is not None, "checked when it was read"
                return StructuredOutputsParams(json=parameters[self.name])
            case "auto":
                return self._free_form(parameters, content)
        return content

    def _free_form(
        self, parameters: dict[str, dict[str, Any]], content: StructuredOutputsParams | None
    ) -> StructuredOutputsParams | None:
        """Return the form of content or calls: those of strict tools follow their schemas, others have any object."""
        strict = {tool["function"]["name"] for tool in self.tools if tool["function"].get("strict")}
        if content is None and not strict:
            return None
        grammar = ANSWER_GRAMMARS.get(self.parser or "")
        if grammar is None:
            raise InvalidRequestError(
                f"the tool call parser {self.parser} knows no strict tools, and no form of output beside calls; "
                "leave out strict, or set tool_choice to none",
                param="tool_choice",
            )
        kind, text = ("json", "null") if content is None else content.source
        has_options = content is not None and (content.disable_any_whitespace or content.whitespace_pattern is not None)
        if kind != "json" or has_options:
            raise InvalidRequestError(
                "structured_outputs other than a plain json leaves no place for calls; set tool_choice to none",
                param="tool_choice",
            )
        schemas = {name: schema if name in strict else {"type": "object"} for name, schema in parameters.items()}
        return StructuredOutputsParams(grammar=grammar(schemas, json.loads(text), is_parallel=self.is_parallel))

    def new_parser(self) -> ToolParser | None:
        """Return the parser of one answer, None where it holds no calls."""
        match self.choice:
            case "required":
                return RequiredCalls()
            case "named":
                assert self.name is not None, "checked when it was read"
                return NamedCall(self.name)
            case "auto":
                assert self.parser is not None, "checked when it was read"
                return TOOL_PARSERS[self.parser]()
        return None


def read_tools(fields: Mapping[str, Any], config: ServerConfig) -> ToolUse:
    """Return the tools of a chat.

    Raises:
      InvalidRequestError: a tool or the choice is malformed, or the server was not started for it.
    """
    tools = check_tools(fields["tools"])
    names = [tool["function"]["name"] for tool in tools]
    choice, name = _read_choice(fields["tool_choice"], names)
    if choice == "none" and config.exclude_tools_when_tool_choice_none:
        tools = []
    if choice == "auto" and not config.enable_auto_tool_choice:
        raise InvalidRequestError(
            "this server does not look for tool calls in answers; start it with --enable-auto-tool-choice and "
            "--tool-call-parser, or set tool_choice to none, required or one function",
            param="tool_choice",
        )
    is_parallel = fields["parallel_tool_calls"] is not False
    return ToolUse(tools, choice, is_parallel, config.tool_call_parser, name)


def check_tools(value: list[Any] | None) -> list[dict[str, Any]]:
    """Return the tools as templates get them.

    Raises:
      InvalidRequestError: one is malformed, two have one name, or there are too many.
    """
    tools = value or []
    if len(tools) > MAX_TOOLS:
        raise _invalid(f"tools has {len(tools)} entries, the limit is {MAX_TOOLS}; remove some")
    for i, tool in enumerate(tools):
        _check_tool(f"tools[{i}]", tool)
    names = [tool["function"]["name"] for tool in tools]
    for name in names:
        if names.count(name) > 1:
            raise _invalid(f"tools names the function {name!r} twice; rename one")
    return tools


def _read_choice(value: Any, names: list[str]) -> tuple[Choice, str | None]:
    if not names:
        if value in (None, "none", "auto"):
            return "none", None
        raise InvalidRequestError(
            f"tool_choice is {value!r:.80}, but there are no tools; send some", param="tool_choice"
        )
    match value:
        case None | "auto":
            return "auto", None
        case "none" | "required":
            return value, None
        case {"type": "function", "function": {"name": str(name)}} if name in names and len(value) == 2:
            return "named", name
    raise InvalidRequestError(
        f"tool_choice is {value!r:.80}; it must be none, auto, required or "
        '{"type": "function", "function": {"name": one of the tools}}',
        param="tool_choice",
    )


def _check_tool(where: str, tool: Any) -> None:
    if not isinstance(tool, dict) or tool.get("type") != "function" or not isinstance(tool.get("function"), dict):
        raise _invalid(f'{where} is {tool!r:.80}; it must be {{"type": "function", "function": {{"name": ...}}}}')
    for field in tool.keys() - {"type", "function"}:
        raise _invalid(f"{field[:64]!r} is no field of {where}; remove it")
    function = tool["function"]
    for field in function:
        if field not in _FUNCTION_FIELDS:
            raise _invalid(f"{field[:64]!r} is no field of {where}.function; it has {', '.join(_FUNCTION_FIELDS)}")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise _invalid(f"{where}.function.name is {name!r:.80}; it must be 1 to 64 letters, digits or any of _.:-")
    for field, kind in (("description", str), ("parameters", dict), ("strict", bool)):
        if not isinstance(function.get(field), kind | None):
            raise _invalid(f"{where}.function.{field} is {function[field]!r:.80}; it must be {_KINDS[kind]}")


_KINDS = {str: "a string", dict: "a JSON schema, which is an object", bool: "true or false"}


def _parameters(tool: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a function's arguments: always an object's, and an empty one's if none is given."""
    return {"type": "object", **(tool["function"].get("parameters") or {"properties": {}})}


def _invalid(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, param="tools")
