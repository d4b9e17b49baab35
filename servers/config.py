"""Options of the HTTP server. Like EngineConfig, each field carries its help text and becomes a flag."""

from dataclasses import dataclass

from pagedjax.config import option
from pagedjax.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Where the server listens and what it takes; values out of range are a ConfigError."""

    host: str = option("127.0.0.1", "Address to listen on; 0.0.0.0 for all interfaces.")
    port: int = option(8000, "Port to listen on; 0 picks a free one.")
    max_request_bytes: int = option(64 << 20, "Largest request body in bytes.")
    disable_access_log: bool = option(False, "No log line for each HTTP request.")

    def __post_init__(self) -> None:
        _check_range("port", self.port, 0, 65535)
        _check_range("max_request_bytes", self.max_request_bytes, 1, 1 << 40)


def _check_range(name: str, value: int, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ConfigError(f"{name} is {value!r}; it must be an integer, at least {low} and at most {high}")
