"""A process in which chat templates from requests are rendered: they are programs of strangers, so it can be killed.

Jinja's sandbox keeps them from the machine, but not from running or growing for ever. The model's own template needs
none of this.
"""

import multiprocessing
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from transformers import PreTrainedTokenizerFast

from pagedjax.errors import InvalidRequestError
from pagedjax.text.chat import ChatTemplate, render_chat

RENDER_SECONDS = 5.0
START_SECONDS = 120.0  # to import what rendering needs
MAX_BYTES = 2 << 30  # of the process's data


@dataclass
class _ChatTokenizer:
    hf: PreTrainedTokenizerFast
    chat_template: ChatTemplate | None = None


class TemplateWorker:
    """Renders one template at a time; starts its process when it is first needed, and again when it had to be killed.

    `render` may be called from several threads. `render_seconds` and `max_chars` bound each rendering.
    """

    def __init__(self, hf: PreTrainedTokenizerFast, *, max_chars: int, render_seconds: float = RENDER_SECONDS):
        self._hf = hf
        self._max_chars = max_chars
        self._render_seconds = render_seconds
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    def render(self, messages: Sequence[Any], **options: Any) -> str:
        """Return what `pagedjax.text.chat.render_chat` would.

        Raises:
          InvalidRequestError: as there; or the template ran too long, or took too much memory.
        """
        with self._lock:
            try:
                connection = self._start()
                connection.send((messages, options))
                if not connection.poll(self._render_seconds):
                    raise _invalid(f"was still running after {self._render_seconds:g} seconds; simplify it")
                result = connection.recv()
            except (EOFError, OSError):
                self._kill()
                raise _invalid("took more memory than it may; simplify it") from None
            except BaseException:
                self._kill()
                raise
        if isinstance(result, Exception):
            raise result
        return result

    def close(self) -> None:
        """End the process; harmless when repeated."""
        with self._lock:
            self._kill()

    def _start(self) -> Connection:
        if self._connection is None:
            ours, theirs = multiprocessing.Pipe()
            with theirs:  # a process of multiprocessing would run the caller's script again
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "pagedjax.text.template_worker", str(theirs.fileno())],
                    env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                    stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()],
                )  # fmt: skip
            self._connection = ours
            ours.send((self._hf, self._max_chars))
            assert ours.poll(START_SECONDS), "the process for chat templates does not start"
            ours.recv()
        return self._connection

    def _kill(self) -> None:
        if self._process is not None and self._connection is not None:
            self._process.kill()
            self._process.wait()
            self._connection.close()
        self._process = self._connection = None


def _serve(connection: Connection) -> None:
    """Take the tokenizer, then render what comes until the other side closes."""
    hf, max_chars = connection.recv()
    resource.setrlimit(resource.RLIMIT_DATA, (MAX_BYTES, MAX_BYTES))
    tokenizer = _ChatTokenizer(hf)
    connection.send("ready")
    while True:
        try:
            messages, options = connection.recv()
        except EOFError:
            return
        connection.send(_render(tokenizer, messages, options, max_chars))


def _render(
    tokenizer: _ChatTokenizer, messages: Sequence[Any], options: dict[str, Any], max_chars: int
) -> str | Exception:
    try:
        text = render_chat(tokenizer, messages, **options)
    except InvalidRequestError as error:
        return InvalidRequestError(str(error)[:1000], param=error.param)
    if len(text) > max_chars:
        return _invalid(f"made {len(text)} characters, more than {max_chars} never fit max_model_len; shorten it")
    return text


def _invalid(problem: str) -> InvalidRequestError:
    return InvalidRequestError(f"chat_template {problem}", param="chat_template")


if __name__ == "__main__":
    _serve(Connection(int(sys.argv[1])))
