"""The notebook cell that a call comes from, and what its earlier runs left behind.

A cell that is run again builds its LLM while the old one still holds the device memory, because the variable is only
rebound afterwards. What a cell made is therefore remembered, and closed when a later run of the cell makes another.
"""

import sys
import weakref
from dataclasses import dataclass
from typing import Any, Self

# Module state, because a cell has no other place that outlives a run.
_made: "weakref.WeakKeyDictionary[Any, NotebookCell]" = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class NotebookCell:
    """One run of one cell."""

    name: str
    run: int

    @classmethod
    def of_caller(cls, depth: int) -> Self | None:
        """Return the cell whose top level made the call `depth` frames up from the caller; None for other code."""
        frame = sys._getframe(depth + 1)
        if "get_ipython" not in frame.f_globals or frame.f_code.co_name != "<module>":
            return None
        shell = frame.f_globals["get_ipython"]()
        message = shell.get_parent() if hasattr(shell, "get_parent") else {}  # names the cell, however it was edited
        name = message.get("metadata", {}).get("cellId") or frame.f_code.co_filename
        return cls(name, shell.execution_count)

    def close_earlier(self) -> None:
        """Shut down what earlier runs of this cell made, but nothing of this run."""
        for made, cell in list(_made.items()):
            if cell.name == self.name and cell.run != self.run:
                made.shutdown()

    def remember(self, made: Any) -> None:
        """Note that this run has made an object with a `shutdown` method."""
        _made[made] = self
