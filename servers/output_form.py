"""What a request asks of the form of its output: response_format (OpenAI's field) or structured_outputs (vLLM's)."""

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from pagedjax import InvalidRequestError, StructuredOutputsParams
from servers.checks import advice

_STRUCTURED_OUTPUTS = (
    "json", "regex", "choice", "grammar", "json_object", "disable_any_whitespace", "whitespace_pattern",
)  # fmt: skip
_JSON_SCHEMA = ("name", "description", "schema", "strict")
_RESPONSE_FORMATS = ("text", "json_object", "json_schema")


def output_form(fields: Mapping[str, Any]) -> StructuredOutputsParams | None:
    """Return the form that a request asks for, None if any will do.

    Raises:
      InvalidRequestError: a field is unknown or has no sense, or both are there.
    """
    response_format, structured_outputs = fields["response_format"], fields["structured_outputs"]
    form = None if response_format is None else _of_response_format(response_format)
    if structured_outputs is None:
        return form
    if form is not None:
        raise InvalidRequestError(
            "response_format and structured_outputs both say what form the output has; leave one out",
            param="structured_outputs",
        )
    _check_names(structured_outputs, _STRUCTURED_OUTPUTS, "structured_outputs")
    return StructuredOutputsParams(**{name: value for name, value in structured_outputs.items() if value is not None})


@contextmanager
def errors_by_field(fields: Mapping[str, Any]) -> Iterator[None]:
    """Name the field that the client sent in errors about its form: the engine knows structured_outputs alone."""
    try:
        yield
    except InvalidRequestError as error:
        if error.param != "structured_outputs" or fields["structured_outputs"] is not None:
            raise
        field = "tools" if fields["response_format"] is None else "response_format"
        message = re.sub(r"structured_outputs(\.\w+)?", field, str(error), count=1)
        raise InvalidRequestError(message, param=field) from None


def _of_response_format(value: dict[str, Any]) -> StructuredOutputsParams | None:
    kind = value.get("type")
    if kind not in _RESPONSE_FORMATS:
        raise _invalid(f"response_format.type is {kind!r:.80}; it must be one of {', '.join(_RESPONSE_FORMATS)}")
    _check_names(value, ("type", "json_schema") if kind == "json_schema" else ("type",), "response_format")
    if kind == "text":
        return None
    return StructuredOutputsParams(json_object=True) if kind == "json_object" else _of_json_schema(value)


def _of_json_schema(value: dict[str, Any]) -> StructuredOutputsParams:
    wrapped = value.get("json_schema")
    if not isinstance(wrapped, dict):
        raise _invalid(f"response_format.json_schema is {wrapped!r:.80}; it must be an object with name and schema")
    _check_names(wrapped, _JSON_SCHEMA, "response_format.json_schema")
    schema = wrapped.get("schema")
    if not isinstance(schema, dict):
        raise _invalid(f"response_format.json_schema.schema is {schema!r:.80}; it must be a JSON schema, an object")
    return StructuredOutputsParams(json=schema)


def _check_names(value: Mapping[str, Any], known: Iterable[str], where: str) -> None:
    for name in value:
        if name not in known:
            raise InvalidRequestError(
                f"{name[:64]!r} is no field of {where}; {advice(name, known)}", param=where.partition(".")[0]
            )


def _invalid(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, param="response_format")
