"""One streamed request to an OpenAI-style server, timed from outside.

Knows the two bodies and event shapes (completions and chat) and nothing of the server behind them.
"""

import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import aiohttp

CHAT_SUFFIX = "/chat/completions"
MAX_ERROR_CHARS = 300


class StreamError(Exception):
    """The server answered with an error, before the stream or in it."""


@dataclass
class Outcome:
    """What became of one request: times in seconds, token counts as the server's `usage` states them.

    ITLs lie between consecutive events that bring a token; an event may bring several. Without `usage`, `output_len` is
    the number of those events and `has_usage` is False.
    """

    start_time: float  # on perf_counter, when it was sent
    queue_time: float = 0.0  # from its arrival to start_time: waiting for its turn, or a client that is late
    prompt_len: int = 0
    output_len: int = 0
    ttft: float = 0.0
    latency: float = 0.0
    itls: list[float] = field(default_factory=list)
    text: str = ""
    has_usage: bool = False
    error: str | None = None

    @property
    def came_at_once(self) -> bool:
        """Whether one event brought all of several tokens, so that there is no time between them to measure."""
        return self.output_len > 1 and not self.itls

    @property
    def tpot(self) -> float | None:
        """Seconds a token after the first; None where there is none, or all came at once."""
        has_times = self.output_len > 1 and not self.came_at_once
        return (self.latency - self.ttft) / (self.output_len - 1) if has_times else None


async def send(
    session: aiohttp.ClientSession,
    url: str,
    body: Mapping[str, Any],
    *,
    headers: Mapping[str, str],
    prompt_len: int = 0,
) -> Outcome:
    """POST `body`, which asks for a stream, and follow the answer to its end. Never raises for what a server does.

    `prompt_len` stands in the outcome unless the server's `usage` says otherwise.
    """
    outcome = Outcome(perf_counter(), prompt_len=prompt_len)
    events = _Events(outcome, is_chat=url.endswith(CHAT_SUFFIX))
    try:
        async with session.post(url, json=body, headers=headers) as response:
            if response.status != 200:
                raise StreamError(f"{response.status}: {(await response.text())[:MAX_ERROR_CHARS]}")
            async for data in _server_sent_events(response.content):
                events.take(data)
        events.end()
    except StreamError as error:
        outcome.error = str(error)
    except (aiohttp.ClientError, OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        outcome.error = f"{type(error).__name__}: {error}"
    return outcome


class _Events:
    """Takes in the events of one stream as they come and fills in its Outcome."""

    def __init__(self, outcome: Outcome, *, is_chat: bool):
        self._outcome = outcome
        self._is_chat = is_chat
        self._first_choice: float | None = None
        self._last_token: float | None = None
        self._num_token_events = 0
        self._is_done = False

    def take(self, data: str) -> None:
        now = perf_counter()
        if data == "[DONE]":
            self._is_done = True
            return
        event = json.loads(data)
        if event.get("error"):
            raise StreamError(f"error in the stream: {json.dumps(event['error'])[:MAX_ERROR_CHARS]}")
        if event.get("usage"):
            self._outcome.has_usage = True
            self._outcome.prompt_len = event["usage"]["prompt_tokens"]
            self._outcome.output_len = event["usage"].get("completion_tokens", 0)
        if event.get("choices"):
            self._take_choice(event["choices"][0], now)

    def end(self) -> None:
        """Check that the stream was whole."""
        if not self._is_done or self._first_choice is None:
            raise StreamError("the stream ended early" if not self._is_done else "the stream held no choices")
        if self._last_token is None:  # nothing but an end: that is when the answer came
            self._outcome.ttft = self._first_choice - self._outcome.start_time
        if not self._outcome.has_usage:
            self._outcome.output_len = self._num_token_events

    def _take_choice(self, choice: Mapping[str, Any], now: float) -> None:
        if self._first_choice is None:
            self._first_choice = now
        self._outcome.latency = now - self._outcome.start_time
        text, is_token = self._token_of(choice)
        self._outcome.text += text
        if not is_token:
            return
        self._num_token_events += 1
        if self._last_token is None:
            self._outcome.ttft = now - self._outcome.start_time
        else:
            self._outcome.itls.append(now - self._last_token)
        self._last_token = now

    def _token_of(self, choice: Mapping[str, Any]) -> tuple[str, bool]:
        """Return the text of an event, and whether it brings a token: a role or an end alone does not.

        A token may have no text: a special one, or part of a character.
        """
        if not self._is_chat:
            text = choice.get("text") or ""
            return text, bool(text or choice.get("token_ids")) or choice.get("finish_reason") is None
        delta = choice.get("delta") or {}
        text = (delta.get("reasoning") or delta.get("reasoning_content") or "") + (delta.get("content") or "")
        is_bare = "role" in delta or choice.get("finish_reason") is not None
        return text, bool(text or delta.get("tool_calls") or choice.get("token_ids")) or not is_bare


async def _server_sent_events(content: aiohttp.StreamReader) -> AsyncIterator[str]:
    """Yield the data of each event, however long and however cut into packets; comments are skipped."""
    buffer = b""
    async for packet in content.iter_any():
        *lines, buffer = (buffer + packet).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip().decode()
