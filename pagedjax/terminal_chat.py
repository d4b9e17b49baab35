"""A conversation in the terminal: reads a line, streams the answer, remembers both.

Ctrl-C ends the answer that is being written, not the program. Owns the history; knows the model only as `LLM.stream`.
"""

import contextlib
import sys
import time
from collections.abc import Callable, Generator
from typing import Any, Protocol, TextIO

from pagedjax.errors import InvalidRequestError
from pagedjax.outputs import RequestOutput
from pagedjax.sampling_params import SamplingParams

HELP = "/reset forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C ends an answer early."


class StreamingModel(Protocol):
    """The part of `LLM` that a conversation needs."""

    def stream(
        self, prompt: list[dict[str, Any]], sampling_params: SamplingParams
    ) -> Generator[RequestOutput, None, None]: ...


class TerminalChat:
    """One conversation. `read_line` shows a prompt and returns what was typed; EOFError ends the conversation."""

    def __init__(
        self,
        llm: StreamingModel,
        sampling_params: SamplingParams,
        *,
        system: str | None = None,
        read_line: Callable[[str], str] = input,
        out: TextIO = sys.stdout,
    ):
        self._llm = llm
        self._sampling_params = sampling_params
        self._system = [{"role": "system", "content": system}] if system else []
        self._messages: list[dict[str, Any]] = list(self._system)
        self._read_line = read_line
        self._out = out

    def run(self) -> None:
        """Talk until the person leaves."""
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  gives input() line editing
        self._say(HELP)
        while True:
            try:
                line = self._read_line("> ").strip()
            except EOFError:
                return self._say("")
            except KeyboardInterrupt:
                self._say(f"\n{HELP}")
                continue
            if line == "/exit":
                return None
            if line == "/reset":
                self._messages = list(self._system)
            elif line in ("/help", "/?"):
                self._say(HELP)
            elif line:
                self._answer(line)

    def _answer(self, line: str) -> None:
        question = {"role": "user", "content": line}
        pieces: list[str] = []
        num_tokens, began = 0, time.monotonic()
        try:
            with contextlib.closing(self._llm.stream([*self._messages, question], self._sampling_params)) as outputs:
                for output in outputs:
                    pieces.append(output.outputs[0].text)
                    num_tokens += len(output.outputs[0].token_ids)
                    self._out.write(pieces[-1])
                    self._out.flush()
        except KeyboardInterrupt:
            self._out.write(" [interrupted]")
        except InvalidRequestError as error:  # the conversation has outgrown the context, for example
            return self._say(f"[{error}; or begin anew with /reset]")
        self._messages += [question, {"role": "assistant", "content": "".join(pieces)}]
        rate = num_tokens / max(time.monotonic() - began, 1e-6)
        return self._say(f"\n[{num_tokens} tokens, {rate:.1f} tokens/s]")

    def _say(self, text: str) -> None:
        self._out.write(f"{text}\n")
        self._out.flush()
