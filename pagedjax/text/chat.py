"""Chat messages: what is accepted, and how the model's chat template turns them into a prompt.

Templates are programs from model repositories: transformers runs them in Jinja's sandbox. Knows no HTTP and no tokens
beyond the special ones that a template may write.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from jinja2 import Environment, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from transformers import PreTrainedTokenizerFast

from pagedjax.errors import ConfigError, InvalidRequestError

ChatTemplate = str | dict[str, str]  # some tokenizers have several by name, such as "default" and "tool_use"

ROLES = ("system", "developer", "user", "assistant", "tool")
RESERVED_ARGUMENTS = {
    "messages", "conversation", "conversations", "documents", "tools", "chat_template", "tokenize",
    "sanitize_control_tokens", "add_generation_prompt", "continue_final_message", "padding", "truncation", "max_length",
    "return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs",
}  # fmt: skip


class ChatTokenizer(Protocol):
    """What rendering needs of a tokenizer."""

    hf: PreTrainedTokenizerFast
    chat_template: ChatTemplate | None


def render_chat(
    tokenizer: ChatTokenizer,
    messages: Sequence[Any],
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: list[Any] | None = None,
    chat_template: str | None = None,
    **template_arguments: Any,
) -> str:
    """Return the prompt that the chat template makes of `messages`; `template_arguments` are further variables of it.

    Encode it without special tokens: the template has written them.

    Raises:
      InvalidRequestError: a message is malformed, there is no template, or the template refuses.
    """
    template = chat_template or tokenizer.chat_template
    if not template:
        raise _invalid("the model has no chat template; give one with --chat-template, or send a plain prompt")
    if continue_final_message and add_generation_prompt:
        raise InvalidRequestError(
            "continue_final_message and add_generation_prompt are both true; set add_generation_prompt to false",
            param="continue_final_message",
        )
    for name in sorted(RESERVED_ARGUMENTS & template_arguments.keys()):
        raise InvalidRequestError(
            f"chat_template_kwargs holds {name!r}, which is not a variable of templates; remove it",
            param="chat_template_kwargs",
        )
    checked = validate_messages(messages)
    if "developer" not in str(template):
        checked = [_developer_as_system(message) for message in checked]
    try:
        rendered = tokenizer.hf.apply_chat_template(
            checked,
            tools=tools,
            chat_template=template if isinstance(template, str) else None,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tokenize=False,
            **template_arguments,
        )
    except Exception as error:  # a template is a program: it raises what it likes, and these messages made it
        raise _invalid(f"the chat template refuses the messages: {error}") from error
    assert isinstance(rendered, str), "apply_chat_template(tokenize=False) gives text"
    return rendered


def validate_messages(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """Return `messages` as templates expect them: text parts joined by line breaks, tool arguments as objects.

    Raises:
      InvalidRequestError: naming the message and what is wrong with it; `param` is "messages".
    """
    if not messages or isinstance(messages, str | Mapping):
        raise _invalid(f"messages is {messages!r:.80}; it must be a list of at least one message")
    return [_validate_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def load_chat_template(chat_template: str | None) -> str | None:
    """Return the template of `--chat-template`: the file's text, or the value itself where it is Jinja text.

    Raises:
      ConfigError: the file cannot be read, or the template is no valid Jinja.
    """
    if chat_template is None:
        return None
    is_text = any(character in chat_template for character in "{}\n")
    template = chat_template if is_text else _read_template(Path(chat_template))
    try:
        Environment(extensions=[loopcontrols, _GenerationTag]).parse(template)
    except TemplateSyntaxError as error:
        raise ConfigError(
            f"the chat template has an error in line {error.lineno}: {error.message}; correct it"
        ) from error
    return template


class _GenerationTag(Extension):
    """The tag `{% generation %}`, with which templates mark the model's words; for parsing only."""

    tags = {"generation"}  # noqa: RUF012  Jinja reads it from the class

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _read_template(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"the chat template {str(path)!r} cannot be read ({error}); give a Jinja file, or the template itself"
        ) from error


def _validate_message(message: Any, name: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise _invalid(f"{name} is {message!r:.80}; it must be an object with role and content")
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise _invalid(f"{name}.role is {role!r:.80}; it must be one of {', '.join(ROLES)}")
    checked = {**message, "content": _validate_content(message, name)}
    if message.get("tool_calls") is not None:
        checked["tool_calls"] = _validate_tool_calls(message["tool_calls"], f"{name}.tool_calls")
    return checked


def _validate_content(message: Mapping[str, Any], name: str) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    if content is None:
        if message["role"] == "assistant" and isinstance(message.get("tool_calls"), list) and message["tool_calls"]:
            return ""
        raise _invalid(f"{name} has no content; give a string or a list of text parts")
    if not isinstance(content, list):
        raise _invalid(f"{name}.content is {content!r:.80}; it must be a string or a list of text parts")
    return "\n".join(_validate_part(part, f"{name}.content[{i}]") for i, part in enumerate(content))


def _validate_part(part: Any, name: str) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return part["text"]
    kind = part.get("type") if isinstance(part, Mapping) else part
    raise _invalid(f'{name} is {kind!r:.80}; only parts like {{"type": "text", "text": "..."}} are supported')


def _validate_tool_calls(calls: Any, name: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise _invalid(f"{name} is {calls!r:.80}; it must be a list of calls")
    return [_validate_tool_call(call, name) for call in calls]


def _validate_tool_call(call: Any, name: str) -> dict[str, Any]:
    """Parse a call's arguments: clients send JSON text, templates want the object."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise _invalid(f"{name} holds {call!r:.80}; each entry needs a function with name and arguments")
    arguments = function.get("arguments") or "{}"
    try:
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError) as error:  # malformed, thousands of digits, or nested as deep
        raise _invalid(f"{name} holds arguments that are not JSON: {arguments!r:.80}") from error
    return {**call, "function": {**function, "arguments": arguments}}


def _developer_as_system(message: dict[str, Any]) -> dict[str, Any]:
    """Templates older than the developer role know its messages as the system's."""
    return {**message, "role": "system"} if message["role"] == "developer" else message


def _invalid(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, param="messages")
