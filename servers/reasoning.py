"""Take apart what a model thinks and what it answers: <think>thoughts</think>answer.

White space beside the tags belongs to neither. The parts do not depend on where the text was cut into pieces. Names of
parsers are vLLM's.
"""

from dataclasses import dataclass
from typing import Literal

from pagedjax import ReasoningTokens
from servers.tags import partial_match

START, END = "<think>", "</think>"

State = Literal["open", "undecided", "closed"]  # whether an answer's first text is reasoning

# How an answer begins where the prompt holds neither tag at its end.
REASONING_PARSERS: dict[str, State] = {
    "deepseek_r1": "open",  # the first tag may be missing
    "qwen3": "undecided",  # the first tag decides
}


def state_after(prompt: str, parser: str, *, is_continued: bool = False) -> State:
    """Return how the answer to `prompt` begins: chat templates may open the reasoning, or leave it out.

    A continued message goes on where it stands.
    """
    end = prompt.rstrip()
    if end.endswith(START) or (is_continued and end.rfind(START) > end.rfind(END)):
        return "open"
    return "closed" if is_continued or end.endswith(END) else REASONING_PARSERS[parser]


def reasoning_tokens(state: State) -> ReasoningTokens | None:
    """Return what a structured output must know of the reasoning before it."""
    return None if state == "closed" else ReasoningTokens(START, END, is_open=state == "open")


@dataclass(frozen=True)
class Parts:
    """A piece of an answer."""

    reasoning: str = ""
    content: str = ""


class ReasoningParser:
    """Reads one answer, phase after phase: first tag, space, reasoning, space, content."""

    def __init__(self, state: State):
        self._state = state
        self._phase = self._read_content if state == "closed" else self._read_first_tag
        self._held = ""  # may still become part of a tag, or of the white space beside one
        self._reasoning = self._content = ""  # since the last call

    def push(self, text: str) -> Parts:
        """Read further text."""
        self._held += text
        phase = None
        while phase != self._phase:
            phase = self._phase
            phase()
        return self._take()

    def finish(self) -> Parts:
        """Say what is still held, at the end of the text."""
        is_undecided = self._phase == self._read_first_tag and self._state == "undecided"
        if is_undecided or self._phase == self._read_content:
            self._content += self._held
        elif self._phase in (self._read_first_tag, self._read_reasoning):
            self._reasoning += self._held.rstrip() if self._phase == self._read_reasoning else self._held.strip()
        self._held = ""
        return self._take()

    def _take(self) -> Parts:
        parts = Parts(self._reasoning, self._content)
        self._reasoning = self._content = ""
        return parts

    def _read_first_tag(self) -> None:
        text = self._held.lstrip()
        if text.startswith(START):
            self._held, self._phase = text[len(START) :], self._skip_before_reasoning
        elif not START.startswith(text):
            self._phase = self._skip_before_reasoning if self._state == "open" else self._read_content

    def _skip_before_reasoning(self) -> None:
        self._held = self._held.lstrip()
        if self._held:
            self._phase = self._read_reasoning

    def _read_reasoning(self) -> None:
        reasoning, end, content = self._held.partition(END)
        if end:
            self._reasoning += reasoning.rstrip()
            self._held, self._phase = content, self._skip_before_content
            return
        certain = reasoning[: len(reasoning) - partial_match(reasoning, END)].rstrip()
        self._reasoning += certain
        self._held = reasoning[len(certain) :]

    def _skip_before_content(self) -> None:
        self._held = self._held.lstrip()
        if self._held:
            self._phase = self._read_content

    def _read_content(self) -> None:
        self._content += self._held
        self._held = ""
