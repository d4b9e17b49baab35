"""Find tool calls in what a model writes, as it writes it.

A parser takes text in pieces and gives events; put together they do not depend on where the text was cut, because each
parser looks at one character after the other. Text that turns out to be no call comes back as text, in full. The names
are vLLM's.
"""

from collections.abc import Callable

from servers.tool_parsers.events import Arguments, CallStart, Event, Text, ToolParser
from servers.tool_parsers.forced import NamedCall, RequiredCalls
from servers.tool_parsers.grammars import ANSWER_GRAMMARS
from servers.tool_parsers.hermes import HermesCalls
from servers.tool_parsers.llama import LlamaCalls
from servers.tool_parsers.pythonic import PythonicCalls

TOOL_PARSERS: dict[str, Callable[[], ToolParser]] = {
    "hermes": HermesCalls,
    "llama3_json": LlamaCalls,
    "pythonic": PythonicCalls,
}

__all__ = [
    "ANSWER_GRAMMARS",
    "TOOL_PARSERS",
    "Arguments",
    "CallStart",
    "Event",
    "NamedCall",
    "RequiredCalls",
    "Text",
    "ToolParser",
]
