"""Options of the HTTP server. Like EngineConfig, each field carries its help text and becomes a flag."""

from dataclasses import dataclass
from typing import Literal

from pagedjax.config import check_types, option
from pagedjax.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Where the server listens and what it takes; values out of range are a ConfigError."""

    host: str = option("127.0.0.1", "Address to listen on; 0.0.0.0 for all interfaces.")
    port: int = option(8000, "Port to listen on; 0 picks a free one.")
    max_request_bytes: int = option(64 << 20, "Largest request body in bytes.")
    disable_access_log: bool = option(False, "No log line for each HTTP request.")
    enable_auto_tool_choice: bool = option(
        False,
        "Look for tool calls in answers where requests leave the choice to the model; needs --tool-call-parser.",
    )
    tool_call_parser: Literal["hermes", "llama3_json", "pythonic"] | None = option(
        None, "How the model writes tool calls: as Hermes and Qwen do, as Llama 3 does, or as a Python list."
    )
    exclude_tools_when_tool_choice_none: bool = option(
        False, "Keep tools from the chat template where a request forbids calls."
    )
    reasoning_parser: Literal["deepseek_r1", "qwen3"] | None = option(
        None, "Take <think>...</think> out of answers into their field `reasoning`; deepseek_r1 may lack the first tag."
    )

    def __post_init__(self) -> None:
        _check_range("port", self.port, 0, 65535)
        _check_range("max_request_bytes", self.max_request_bytes, 1, 1 << 40)
        check_types(self)
        _check_agreement(self)


def _check_agreement(config: ServerConfig) -> None:
    if config.enable_auto_tool_choice and config.tool_call_parser is None:
        raise ConfigError(
            "enable_auto_tool_choice needs to know how the model writes tool calls; set --tool-call-parser"
        )


def _check_range(name: str, value: int, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ConfigError(f"{name} is {value!r}; it must be an integer, at least {low} and at most {high}")
