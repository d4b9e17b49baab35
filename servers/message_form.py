"""What the answers of a chat consist of: forced into a form, taken apart into reasoning, content and tool calls."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from pagedjax import SamplingParams, StructuredOutputsParams
from servers.answer_parser import AnswerParser
from servers.config import ServerConfig
from servers.output_form import output_form
from servers.reasoning import ReasoningParser, State, reasoning_tokens, state_after
from servers.tools import ToolUse, read_tools


@dataclass(frozen=True)
class MessageForm:
    """The form of the answers to one chat. `reasoning_state` is known once the prompt is (`after`)."""

    tool_use: ToolUse
    output_form: StructuredOutputsParams | None
    reasoning_parser: str | None
    reasoning_state: State = "closed"

    @classmethod
    def read(cls, fields: Mapping[str, Any], config: ServerConfig) -> Self:
        """Read the fields about tools and the form of the output.

        Raises:
          InvalidRequestError: they are malformed or contradict each other.
        """
        tool_use = read_tools(fields, config)
        return cls(tool_use, tool_use.form(output_form(fields)), config.reasoning_parser)

    def after(self, prompt: str, *, is_continued: bool) -> Self:
        """Return the form of the answers to this prompt."""
        if self.reasoning_parser is None:
            return self
        return replace(self, reasoning_state=state_after(prompt, self.reasoning_parser, is_continued=is_continued))

    def constrain(self, params: SamplingParams) -> SamplingParams:
        """Return the parameters under which the answers have their form."""
        if self.output_form is None:
            return params
        form = replace(self.output_form, reasoning=reasoning_tokens(self.reasoning_state))
        return replace(params, structured_outputs=form)

    def new_parser(self) -> AnswerParser:
        """Return the parser of one answer."""
        reasoning = ReasoningParser(self.reasoning_state) if self.has_reasoning else None
        return AnswerParser(reasoning, self.tool_use.new_parser(), is_parallel=self.tool_use.is_parallel)

    @property
    def is_parsed(self) -> bool:
        """Whether answers are anything but plain text."""
        return self.has_reasoning or self.tool_use.choice != "none"

    @property
    def has_reasoning(self) -> bool:
        """Whether answers have the field `reasoning`."""
        return self.reasoning_parser is not None

    @property
    def calls_end_answers(self) -> bool:
        """Whether calls are a reason to finish; a function that the client named itself is none (as with OpenAI)."""
        return self.tool_use.choice != "named"
