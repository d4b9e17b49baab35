"""Options of the HTTP server and of batches. Like EngineConfig, each field carries its help text and becomes a flag."""

import json
import os
from dataclasses import dataclass
from typing import Literal

from pagedjax.config import check_range, check_types, option
from pagedjax.errors import ConfigError

API_KEY_VARIABLE = "VLLM_API_KEY"  # a command line shows its flags to every user of the machine


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Where the server listens, whom it answers and what it takes; values out of range are a ConfigError."""

    host: str = option("127.0.0.1", "Address to listen on; 0.0.0.0 for all interfaces.")
    port: int = option(8000, "Port to listen on; 0 picks a free one.")
    uds: str | None = option(None, "Path of a Unix socket to listen on, in place of --host and --port.")
    ssl_keyfile: str | None = option(None, "Private key of the TLS certificate.")
    ssl_certfile: str | None = option(None, "TLS certificate, followed by its chain; serves HTTPS.")
    ssl_ca_certs: str | None = option(None, "Authorities whose certificates clients must show.")
    api_key: tuple[str, ...] = option(
        (),
        f"Key that clients must send (Authorization: Bearer); may be repeated, every key sees its own requests. "
        f"{API_KEY_VARIABLE} holds one too.",
    )
    allowed_hosts: tuple[str, ...] = option(
        (), "Name under which clients reach a server that listens on this machine only; may be repeated."
    )
    allowed_origins: tuple[str, ...] = option(
        (), "Web origin whose pages may use the server, such as https://example.org, or '*'; may be repeated."
    )
    max_num_queued_reqs: int = option(8192, "Most completions that wait beyond --max-num-seqs; others get a 503.")
    max_num_queued_tokens: int = option(1 << 24, "Most prompt tokens of all requests in work; others get a 503.")
    best_priority: tuple[int, ...] = option(
        (0,), "Lowest (best) priority value that requests may ask for; repeat it to give one for each --api-key."
    )
    request_timeout: float | None = option(None, "Most seconds one request may take; no limit if unset.")
    watchdog_timeout: float = option(300.0, "Seconds that one step may take before /health says 503.")
    shutdown_timeout: float = option(20.0, "Seconds that SIGTERM leaves running requests to finish.")
    sse_keep_alive_interval: float = option(0.0, "Seconds of silence after which a stream sends a comment; 0 is never.")
    max_request_bytes: int = option(8 << 20, "Largest request body in bytes.")
    trust_request_chat_template: bool = option(False, "Take chat_template from requests: a program, run in a sandbox.")
    profile_dir: str | None = option(None, "Directory for traces; switches on /start_profile and /stop_profile.")
    enable_log_requests: bool = option(False, "Log each request's id, size and sampling parameters, not its text.")
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
        check_types(self)
        object.__setattr__(self, "allowed_origins", _json_or_words("allowed_origins", self.allowed_origins))
        check_range(self, "port", 0, 65535)
        check_range(self, "max_request_bytes", 1, 1 << 40)
        check_range(self, "max_num_queued_reqs", 0)
        check_range(self, "max_num_queued_tokens", 1)
        for name in ("request_timeout", "watchdog_timeout"):
            check_range(self, name, 0.001)
        for name in ("shutdown_timeout", "sse_keep_alive_interval"):
            check_range(self, name, 0)
        self._check_agreement()

    @property
    def api_keys(self) -> tuple[str, ...]:
        """The keys of the flags and of the environment, where an empty variable is as good as none."""
        from_environment = os.environ.get(API_KEY_VARIABLE)
        return (*self.api_key, from_environment) if from_environment else self.api_key

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach the server."""
        return self.uds is not None or self.host in ("localhost", "::1") or self.host.startswith("127.")

    def _check_agreement(self) -> None:
        if self.enable_auto_tool_choice and self.tool_call_parser is None:
            raise ConfigError(
                "enable_auto_tool_choice needs to know how the model writes tool calls; set --tool-call-parser"
            )
        if any(not key.strip() or not key.isascii() for key in self.api_keys):
            raise ConfigError(
                f"--api-key or {API_KEY_VARIABLE} holds a key that is empty or not ASCII; give a long random one"
            )
        if len(set(self.api_keys)) < len(self.api_keys):
            raise ConfigError(f"--api-key and {API_KEY_VARIABLE} hold one key twice; leave one of them out")
        if len(self.best_priority) not in (1, len(self.api_keys)):
            raise ConfigError(
                f"best_priority is given {len(self.best_priority)} times for {len(self.api_keys)} keys; "
                "give one for all, or one for each key in the same order"
            )
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            raise ConfigError("ssl_keyfile and ssl_certfile belong together; give both or neither")
        if self.ssl_ca_certs is not None and self.ssl_certfile is None:
            raise ConfigError("ssl_ca_certs needs --ssl-certfile and --ssl-keyfile; give them or leave it out")
        if "*" in self.allowed_origins and not self.api_keys:
            raise ConfigError(
                "allowed_origins is '*' and there is no api_key: every web page could use the server; "
                "name the origins or give --api-key"
            )


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """The files of a batch."""

    input_file: str = option("", "File of requests, one JSON object a line.", short="-i")
    output_file: str = option("", "File to write the answers to; it must not exist.", short="-o")


def _json_or_words(name: str, values: tuple[str, ...]) -> tuple[str, ...]:
    """Take vLLM's way of giving a list, one JSON array, beside a repeated flag."""
    if len(values) != 1 or not values[0].startswith("["):
        return values
    try:
        words = json.loads(values[0])
    except ValueError:
        words = None
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise ConfigError(f"{name} is {values[0]!r:.80}; it must be a JSON array of strings, or one string a flag")
    return tuple(words)
