"""Fields of config dataclasses that carry their help text, and checks of their types and ranges."""

import dataclasses
import types
import typing
from typing import Any, Literal

from pagedjax.errors import ConfigError


def option(default: Any, help_text: str, **metadata: Any) -> Any:
    """A dataclass field whose metadata makes it a command line flag."""
    return dataclasses.field(default=default, metadata={"help": help_text, **metadata})


def check_types(config: Any) -> None:
    """Check each field of a config dataclass against its annotation; an int is taken for a float.

    Raises:
      ConfigError: a value has another type or is none of the choices.
    """
    for name, hint in typing.get_type_hints(type(config)).items():
        is_union = typing.get_origin(hint) in (types.UnionType, typing.Union)
        allowed = typing.get_args(hint) if is_union else (hint,)
        value = getattr(config, name)
        if any(_fits(value, kind) for kind in allowed):
            continue
        literals = [kind for kind in allowed if typing.get_origin(kind) is Literal]
        if literals:
            choices = ", ".join(str(choice) for kind in literals for choice in typing.get_args(kind))
            raise ConfigError(f"{name} is {value!r:.80}; choose one of {choices}")
        kinds = " or ".join(getattr(kind, "__name__", str(kind)) for kind in allowed)
        raise ConfigError(f"{name} is {value!r:.80}; it must be {kinds.replace('NoneType', 'None')}")


def _fits(value: Any, kind: Any) -> bool:
    if typing.get_origin(kind) is Literal:
        return any(type(value) is type(choice) and value == choice for choice in typing.get_args(kind))
    kind = typing.get_origin(kind) or kind
    if kind in (int, float) and isinstance(value, bool):
        return False
    return isinstance(value, kind) or (kind is float and isinstance(value, int))


def check_range(config: Any, name: str, low: float, high: float | None = None) -> None:
    """Raise a ConfigError unless the field is None or between `low` and `high`, both included."""
    value = getattr(config, name)
    if value is not None and not (low <= value and (high is None or value <= high)):
        bounds = f"at least {low}" if high is None else f"at least {low} and at most {high}"
        raise ConfigError(f"{name} is {value}; it must be {bounds}")
