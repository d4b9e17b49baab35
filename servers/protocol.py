"""The request fields of each endpoint, as tables, and the one function that applies them.

A field is a name, a check and a default; null means absent. An unknown name is an error. The tables are the only
place that knows which fields exist; what they mean is the endpoints' affair.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pagedjax.errors import InvalidRequestError
from servers import checks
from servers.checks import Check, Only

_MISSING = object()


@dataclass(frozen=True)
class Field:
    """One request field; one without a default must be given."""

    name: str
    check: Check
    default: Any = _MISSING

    @property
    def is_neutral_only(self) -> bool:
        """Whether only values that change nothing are taken: what it means is not built."""
        return isinstance(self.check, Only)


# Fields that go to SamplingParams under their own names.
SAMPLING = (
    Field("n", checks.integer, None),
    Field("best_of", checks.integer, None),
    Field("use_beam_search", checks.boolean, None),
    Field("length_penalty", checks.number, None),
    Field("early_stopping", checks.boolean_or("never"), None),
    Field("temperature", checks.number, None),
    Field("top_p", checks.number, None),
    Field("top_k", checks.integer, None),
    Field("min_p", checks.number, None),
    Field("seed", checks.integer, None),
    Field("presence_penalty", checks.number, None),
    Field("frequency_penalty", checks.number, None),
    Field("repetition_penalty", checks.number, None),
    Field("logit_bias", checks.biases, None),
    Field("allowed_token_ids", checks.token_ids, None),
    Field("bad_words", checks.texts, None),
    Field("min_tokens", checks.integer, None),
    Field("stop", checks.text_or_texts, None),
    Field("stop_token_ids", checks.token_ids, None),
    Field("ignore_eos", checks.boolean, None),
    Field("include_stop_str_in_output", checks.boolean, None),
    Field("skip_special_tokens", checks.boolean, None),
    Field("spaces_between_special_tokens", checks.boolean, None),
    Field("prompt_logprobs", checks.integer, None),
)

_SHARED = (
    Field("model", checks.text, None),
    Field("max_tokens", checks.positive_integer, None),
    Field("stream", checks.boolean, False),
    Field("stream_options", checks.json_object, None),
    Field("priority", checks.integer, 0),
    Field("cache_salt", checks.nonempty_text, None),
    Field("request_id", checks.nonempty_text, None),
    Field("add_special_tokens", checks.boolean, None),
    Field("truncate_prompt_tokens", checks.integer, None),
    Field("truncation_side", checks.one_of("left", "right"), "left"),
    Field("echo", checks.boolean, False),
    Field("return_token_ids", checks.boolean, False),
    Field("return_tokens_as_token_ids", checks.boolean, False),
    Field("user", checks.text, None),
    Field("metadata", checks.ignored, None),
    Field("response_format", checks.json_object, None),
    Field("structured_outputs", checks.json_object, None),
    *SAMPLING,
)

_CHAT_ONLY = (
    Field("messages", checks.anything),  # servers.messages checks it
    Field("max_completion_tokens", checks.positive_integer, None),
    Field("logprobs", checks.boolean, False),
    Field("top_logprobs", checks.integer, None),
    Field("add_generation_prompt", checks.boolean, None),
    Field("continue_final_message", checks.boolean, False),
    Field("chat_template_kwargs", checks.json_object, None),
    Field("tools", checks.json_array, None),
    Field("tool_choice", checks.anything, None),  # servers.tools checks it
    Field("parallel_tool_calls", checks.boolean, None),
    Field("chat_template", checks.nonempty_text, None),
    Field("safety_identifier", checks.ignored, None),
    Field("prompt_cache_key", checks.ignored, None),
)

_COMPLETION_ONLY = (
    Field("prompt", checks.anything),  # servers.prompts checks it
    Field("logprobs", checks.integer, None),
)

# Known to OpenAI's or vLLM's clients but not built: accepted only with a value that changes nothing.
_UNSUPPORTED = (
    Field("logits_processors", Only(), None),
    Field("logprob_token_ids", Only(), None),
    Field("prompt_logprob_token_ids", Only(), None),
    Field("prompt_logprob_start", Only(0), None),
    Field("return_token_offsets", Only(False), None),
    Field("return_prompt_text", Only(False), None),
    Field("session_id", Only(), None),
    Field("kv_transfer_params", Only(), None),
    Field("repetition_detection", Only(), None),
    Field("thinking_token_budget", Only(), None),
    Field("stream_interval", Only(1), None),
    Field("vllm_xargs", Only(), None),
)

_UNSUPPORTED_IN_CHAT = (
    Field("functions", Only([]), None),
    Field("function_call", Only("none", "auto"), None),
    Field("modalities", Only(["text"]), None),
    Field("audio", Only(), None),
    Field("prediction", Only(), None),
    Field("reasoning_effort", Only(), None),
    Field("verbosity", Only("medium"), None),
    Field("service_tier", Only("auto", "default"), None),
    Field("store", Only(False), None),
    Field("web_search_options", Only(), None),
    Field("documents", Only([]), None),
    Field("mm_processor_kwargs", Only(), None),
    Field("media_io_kwargs", Only(), None),
    Field("include_reasoning", Only(True), None),
)

_UNSUPPORTED_IN_COMPLETIONS = (
    Field("suffix", Only(""), None),
    Field("prompt_embeds", Only(), None),
)


def _table(*groups: tuple[Field, ...]) -> dict[str, Field]:
    return {field.name: field for group in groups for field in group}


CHAT = _table(_SHARED, _CHAT_ONLY, _UNSUPPORTED, _UNSUPPORTED_IN_CHAT)
COMPLETION = _table(_SHARED, _COMPLETION_ONLY, _UNSUPPORTED, _UNSUPPORTED_IN_COMPLETIONS)
RESPONSES = _table(
    (
        Field("model", checks.text, None),
        Field("input", checks.anything),  # servers.response_input checks it
        Field("instructions", checks.text, None),
        Field("max_output_tokens", checks.positive_integer, None),
        Field("top_logprobs", checks.integer, None),
        Field("include", checks.some_of("message.output_text.logprobs"), None),
        Field("stream", checks.boolean, False),
        Field("priority", checks.integer, 0),
        Field("cache_salt", checks.nonempty_text, None),
        Field("request_id", checks.nonempty_text, None),
        Field("chat_template_kwargs", checks.json_object, None),
        Field("metadata", checks.json_object, {}),
        Field("user", checks.text, None),
        Field("safety_identifier", checks.ignored, None),
        Field("prompt_cache_key", checks.ignored, None),
    ),
    SAMPLING,
    (
        Field("n", Only(1), None),
        Field("prompt_logprobs", Only(), None),
        Field("background", Only(False), False),
        Field("conversation", Only(), None),
        Field("max_tool_calls", Only(), None),
        Field("parallel_tool_calls", checks.boolean, True),
        Field("previous_response_id", Only(), None),
        Field("prompt", Only(), None),
        Field("reasoning", Only({}, {"effort": None}, {"summary": None}, {"effort": None, "summary": None}), None),
        Field("service_tier", Only("auto", "default"), None),
        Field("store", Only(False), False),
        Field("stream_options", Only({}, {"include_obfuscation": False}), None),
        Field("text", checks.json_object, {"format": {"type": "text"}}),
        Field("tools", checks.json_array, []),
        Field("tool_choice", checks.anything, "auto"),
        Field("truncation", Only("disabled"), "disabled"),
    ),
)
TOKENIZE = _table(
    (
        Field("model", checks.text, None),
        Field("prompt", checks.text, None),
        Field("messages", checks.anything, None),
        Field("add_special_tokens", checks.boolean, None),
        Field("return_token_strs", checks.boolean, False),
        Field("add_generation_prompt", checks.boolean, None),
        Field("continue_final_message", checks.boolean, False),
        Field("chat_template_kwargs", checks.json_object, None),
        Field("chat_template", checks.nonempty_text, None),
        Field("tools", checks.json_array, None),
        Field("mm_processor_kwargs", Only(), None),
    )
)
DETOKENIZE = _table((Field("model", checks.text, None), Field("tokens", checks.token_ids)))
ABORT = _table((Field("request_id", checks.text_or_texts, None), Field("all", checks.boolean, False)))


def parse(body: Mapping[str, Any], table: Mapping[str, Field]) -> dict[str, Any]:
    """Return every field of `table`, checked, with its default where `body` has none.

    Raises:
      InvalidRequestError: a field is unknown, missing or of the wrong type; `param` names it.
    """
    for name in body:
        if name not in table:
            raise InvalidRequestError(
                f"{name[:64]!r} is no field of this endpoint; {checks.advice(name, table)}", param=name[:64]
            )
    return {name: _value(field, body.get(name)) for name, field in table.items()}


@dataclass(frozen=True)
class StreamOptions:
    """The field stream_options: usage in a last chunk, and in every chunk."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


def parse_stream_options(fields: Mapping[str, Any]) -> StreamOptions:
    """Return the checked stream_options.

    Raises:
      InvalidRequestError: an option is unknown or of the wrong type, or the call does not stream.
    """
    options = fields["stream_options"]
    if options is None:
        return StreamOptions()
    if not fields["stream"]:
        raise InvalidRequestError(
            "stream_options needs stream: true; set it or leave the options out", param="stream_options"
        )
    known = {"include_usage": False, "continuous_usage_stats": False, "include_obfuscation": False}
    for name, value in options.items():
        if name not in known:
            raise InvalidRequestError(
                f"{name[:64]!r} is no field of stream_options; {checks.advice(name, known)}", param="stream_options"
            )
        if value is not None:
            check = Only(False) if name == "include_obfuscation" else checks.boolean
            known[name] = check(f"stream_options.{name}", value)
    return StreamOptions(known["include_usage"], known["include_usage"] and known["continuous_usage_stats"])


def _value(field: Field, value: Any) -> Any:
    if value is not None:
        return field.check(field.name, value)
    if field.default is _MISSING:
        raise InvalidRequestError(f"{field.name} is missing; send it", param=field.name)
    return field.default
