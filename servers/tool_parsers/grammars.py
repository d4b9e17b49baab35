"""Grammars of answers in which the model may call tools, or must, where the client fixed what they hold.

Lark's notation, with JSON schemas in it. Each parser's grammar admits the calls that the parser reads.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

_HERMES = """
call: "<tool_call>" SPACE? json_call SPACE? "</tool_call>" SPACE?
SPACE: /[ \\n]{1,2}/
"""
_HERMES_IN_TEXT = """
call: trigger SPACE? json_call SPACE? "</tool_call>"
trigger[lazy]: TEXT "<tool_call>"
TEXT: /(.|\\n)*/
SPACE: /[ \\n]{1,2}/
"""
_LLAMA = """
call: json_call
SEPARATOR: /; ?/
TEXT: /[^{](.|\\n)*/
"""


def calls_schema(parameters: Mapping[str, dict[str, Any]], key: str) -> dict[str, Any]:
    """Return the JSON schema of one call {"name": ..., key: ...} of a function, whose parameters have these schemas.

    Each function's schema stands among the definitions, and what it refers to within itself is found there.
    """
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, key: {"$ref": f"#/$defs/{i}"}},
            "required": ["name", key],
            "additionalProperties": False,
        }
        for i, name in enumerate(parameters)
    ]
    definitions = {str(i): _moved(schema, f"#/$defs/{i}") for i, schema in enumerate(parameters.values())}
    return {"anyOf": calls, "$defs": definitions}


def hermes_grammar(parameters: Mapping[str, dict[str, Any]], content: Any, *, is_parallel: bool) -> str:
    """Return the grammar of text and calls; or of either calls or JSON of the schema `content`, if that is not None."""
    if content is None:
        start, rules = f"call{'*' if is_parallel else '?'} TEXT", _HERMES_IN_TEXT
    else:
        start, rules = f"content | call{'+' if is_parallel else ''}", _HERMES
    return _grammar(start, rules, calls_schema(parameters, "arguments"), content)


def llama_grammar(parameters: Mapping[str, dict[str, Any]], content: Any, *, is_parallel: bool) -> str:
    """Return the grammar of either calls, or text, which is JSON with the schema `content` if that is not None."""
    calls = "call (SEPARATOR call)*" if is_parallel else "call"
    text = "TEXT?" if content is None else "content"
    return _grammar(f"{text} | {calls}", _LLAMA, calls_schema(parameters, "parameters"), content)


# The pythonic parser has none: its calls are no JSON.
ANSWER_GRAMMARS: dict[str, Callable[..., str]] = {"hermes": hermes_grammar, "llama3_json": llama_grammar}


def _grammar(start: str, rules: str, calls: dict[str, Any], content: Any) -> str:
    json_rules = f"json_call: %json {json.dumps(calls)}\n"
    if content is not None:
        json_rules += f"content: %json {json.dumps(content)}\n"
    return f"start: {start}\n{rules.lstrip()}{json_rules}"


def _moved(schema: Any, root: str) -> Any:
    """Return a schema whose references to its own root ("#...") begin with `root` instead."""
    match schema:
        case dict():
            return {
                key: root + value[1:]
                if key == "$ref" and isinstance(value, str) and value[:1] == "#"
                else _moved(value, root)
                for key, value in schema.items()
            }
        case list():
            return [_moved(one, root) for one in schema]
    return schema
