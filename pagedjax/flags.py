"""Command line flags made from the fields of config dataclasses: names, types, choices and help in one place.

A field `max_model_len` becomes `--max-model-len` (or `--max_model_len`), a bool also `--no-...`, a Literal its choices.
Field metadata: help, short, positional, several (one flag takes several words), words (that stand for values). Only
flags that were given are passed on, so defaults stand in the dataclass alone. Knows vLLM's other flags, to say why one
is refused; knows nothing of engines or servers.
"""

import argparse
import dataclasses
import difflib
import functools
import json
import re
import tomllib
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import resources
from typing import Any, Literal, NoReturn

from pagedjax.errors import ConfigError

_SUFFIXES = {"k": 1000, "m": 1000**2, "g": 1000**3, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}  # as vLLM reads them


@dataclasses.dataclass(frozen=True)
class VllmFlags:
    """vLLM's flags: those that work here, and those that are refused, with the reason."""

    works: tuple[str, ...]
    refused: dict[str, str]


def parse_flags(configs: Sequence[type], arguments: Sequence[str], *, program: str, summary: str) -> list[Any]:
    """Build one instance of each config dataclass from command line arguments.

    Raises:
      ConfigError: a flag is unknown (the message says whether vLLM has it, or what is closest), or a value is wrong.
      SystemExit: --help was asked for.
    """
    parser = flag_parser(configs, program=program, summary=summary)
    given, rest = parser.parse_known_args([_with_dashes(argument) for argument in arguments])
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in vars(given).items()}
    for argument in rest:
        if argument.startswith("-"):
            raise ConfigError(_unknown_flag(argument.split("=")[0], known=list(parser._option_string_actions)))
    _take_positionals(configs, values, rest)
    return [config(**{name: values[name] for name in _names(config) if name in values}) for config in configs]


def flag_parser(configs: Sequence[type], *, program: str, summary: str) -> argparse.ArgumentParser:
    """Return the parser of these dataclasses' flags; its errors are ConfigErrors."""
    positionals = "".join(f" [{field.name.upper()}]" for field in _positional_fields(configs))
    parser = _Parser(
        prog=program, usage=f"{program}{positionals} [flags]", description=summary, allow_abbrev=False, add_help=True
    )
    for config in configs:
        hints = typing.get_type_hints(config)
        for field in dataclasses.fields(config):
            _add_flag(parser, field, hints[field.name])
    return parser


@functools.cache
def vllm_flags() -> VllmFlags:
    """Read the list of vLLM's flags."""
    data = tomllib.loads(resources.files("pagedjax").joinpath("vllm_flags.toml").read_text(encoding="utf-8"))
    refused = {flag: group["reason"] for group in data["refused"] for flag in group["flags"]}
    return VllmFlags(tuple(data["works"]), refused)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def _add_flag(parser: argparse.ArgumentParser, field: dataclasses.Field[Any], hint: Any) -> None:
    kind, is_list = _kind(hint)
    names = [f"--{field.name.replace('_', '-')}"]
    if "short" in field.metadata:
        names.append(field.metadata["short"])
    options: dict[str, Any] = {"default": argparse.SUPPRESS, "help": _help(field)}
    if kind is bool:
        parser.add_argument(*names, action=argparse.BooleanOptionalAction, **options)
        return
    if typing.get_origin(kind) is Literal:
        options["choices"] = typing.get_args(kind)
        kind = type(options["choices"][0])
    else:
        options["metavar"] = "JSON" if kind is dict else kind.__name__.upper()
    if is_list:
        options |= {"action": "extend", "nargs": "+"} if field.metadata.get("several") else {"action": "append"}
    parser.add_argument(*names, type=_with_words(_PARSERS[kind], field.metadata.get("words", {})), **options)


def _kind(hint: Any) -> tuple[Any, bool]:
    """Return the type of one value, without None, and whether the flag may be repeated."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        parts = [part for part in typing.get_args(hint) if part is not types.NoneType]
        objects = [part for part in parts if typing.get_origin(part) is dict]
        (hint,) = objects or parts  # what may be a JSON object is one on the command line
    if typing.get_origin(hint) is tuple:
        return typing.get_args(hint)[0], True
    return (dict if typing.get_origin(hint) is dict else hint), False


def _help(field: dataclasses.Field[Any]) -> str:
    text = field.metadata["help"].replace("%", "%%")
    return text if field.default in (None, ()) else f"{text} Default: {field.default}."


def _integer(text: str) -> int:
    """Read 4096, 4k (4000) or 4K (4096)."""
    matched = re.fullmatch(r"(-?\d+(?:\.\d+)?)([kmgKMG])", text)
    if matched is None:
        return int(text)
    value = float(matched[1]) * _SUFFIXES[matched[2]]
    if value != int(value):
        raise ValueError(text)
    return int(value)


def _with_words(parse: Callable[[str], Any], words: Mapping[str, Any]) -> Callable[[str], Any]:
    """Return a parser that also takes these words for values."""

    def parse_value(text: str) -> Any:
        return words[text] if text in words else parse(text)

    parse_value.__name__ = parse.__name__
    return parse_value


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except RecursionError:  # nested too deeply
        value = None
    if not isinstance(value, dict):
        raise ValueError(text)
    return value


_integer.__name__, _json_object.__name__ = "int", "JSON object"  # argparse names the type in its message
_PARSERS: dict[type, Callable[[str], Any]] = {int: _integer, float: float, str: str, dict: _json_object}


def _with_dashes(argument: str) -> str:
    """Spell `--max_model_len=4` as `--max-model-len=4`."""
    name, equals, value = argument.partition("=")
    return f"{name.replace('_', '-')}{equals}{value}" if name.startswith("--") else argument


def _unknown_flag(flag: str, *, known: Sequence[str]) -> str:
    positive = re.sub("^--no-", "--", flag)
    reasons = vllm_flags().refused
    if positive in reasons or flag in reasons:
        return (
            f"{flag} is a flag of vLLM that pagedjax refuses: {reasons.get(flag, reasons.get(positive))}; leave it out"
        )
    close = difflib.get_close_matches(flag, known, n=1, cutoff=0.6)
    return f"unknown flag {flag}; " + (f"did you mean {close[0]}?" if close else "--help lists the flags")


def _take_positionals(configs: Sequence[type], values: dict[str, Any], words: Sequence[str]) -> None:
    fields = list(_positional_fields(configs))
    if len(words) > len(fields):
        raise ConfigError(f"unexpected argument {words[len(fields)]!r}; flags begin with --")
    for field, word in zip(fields, words, strict=False):
        if field.name in values:
            raise ConfigError(f"{field.name} is given twice, as {word!r} and as --{field.name}; leave one out")
        values[field.name] = word


def _positional_fields(configs: Sequence[type]) -> Iterator[dataclasses.Field[Any]]:
    return (field for config in configs for field in dataclasses.fields(config) if field.metadata.get("positional"))


def _names(config: type) -> list[str]:
    return [field.name for field in dataclasses.fields(config)]
