"""Check chat messages and render them. What their values must be is the chat template code's to say."""

from collections.abc import Mapping, Sequence
from typing import Any

from pagedjax import InvalidRequestError
from servers.checks import advice
from servers.state import ServerState

_KEYS = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning", "reasoning_content")
_KEYS_THAT_MUST_BE_EMPTY = ("refusal", "function_call", "audio", "annotations")  # of answers sent back

# Arguments of the rendering itself, which a request must not reach through chat_template_kwargs.
_RENDER_ARGUMENTS = {
    "self", "tokenizer", "messages", "tools", "chat_template", "add_generation_prompt", "continue_final_message",
}  # fmt: skip


async def render_messages(state: ServerState, fields: Mapping[str, Any], *, tools: Sequence[Any] = ()) -> str:
    """Return the prompt that the chat template makes of the tools, of the field messages and those beside it.

    Raises:
      InvalidRequestError: a message is wrong, the template refuses them, or the request may not bring its own.
    """
    variables = fields["chat_template_kwargs"] or {}
    own_template = fields["chat_template"]
    if own_template is not None and not state.config.trust_request_chat_template:
        raise InvalidRequestError(
            "chat_template is a program, and this server takes none from requests; leave it out "
            "or start the server with --trust-request-chat-template",
            param="chat_template",
        )
    for name in sorted(_RENDER_ARGUMENTS & variables.keys()):
        raise InvalidRequestError(
            f"chat_template_kwargs holds {name!r}, which is not a variable of templates; remove it",
            param="chat_template_kwargs",
        )
    is_continued, adds_prompt = fields["continue_final_message"], fields["add_generation_prompt"]
    return await state.engine.render_chat(
        check_messages(fields["messages"]),
        **({} if own_template is None else {"chat_template": own_template}),
        **({"tools": tools} if tools else {}),
        add_generation_prompt=not is_continued if adds_prompt is None else adds_prompt,
        continue_final_message=is_continued,
        **variables,
    )


def check_messages(value: Any) -> list[dict[str, Any]]:
    """Return the messages without their empty fields.

    Raises:
      InvalidRequestError: they are no list of objects, or a field is unknown.
    """
    if not isinstance(value, list) or not value:
        raise _error("messages", "it must be a list of at least one message")
    return [_check_message(f"messages[{i}]", message) for i, message in enumerate(value)]


def _check_message(where: str, message: Any) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise _error(where, "it must be an object with role and content")
    for key, entry in message.items():
        _check_key(where, key, entry)
    if not isinstance(message.get("tool_calls") or [], list):
        raise _error(f"{where}.tool_calls", "it must be a list")
    kept = {key: entry for key, entry in message.items() if key == "content" or entry not in (None, [], {})}
    if "reasoning" in kept:
        kept.setdefault("reasoning_content", kept["reasoning"])  # templates know the older name
    return kept


def _check_key(where: str, key: str, entry: Any) -> None:
    if key in _KEYS or (key in _KEYS_THAT_MUST_BE_EMPTY and not entry):
        return
    if key in _KEYS_THAT_MUST_BE_EMPTY:
        raise _error(f"{where}.{key}", "it is not supported here; remove it")
    raise _error(f"{where}.{key[:64]}", f"there is no such field; {advice(key, _KEYS)}")


def _error(where: str, problem: str) -> InvalidRequestError:
    return InvalidRequestError(f"{where}: {problem}", param="messages")
