"""One executable that is to be built, by name. Knows nothing of what it computes, or of how it is compiled."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax


@dataclass(frozen=True)
class Task:
    """One executable to build: `function`, already jitted, at the shapes of `arguments`.

    Attributes:
      donated: arguments, by number, that it was jitted to donate.
      is_full_model: holds every layer, and takes the longest to lower and to compile.
      is_portable: another process can make it from a `TaskSpec`.
      num_tokens: rows of the model's matrix products, which say how these are best compiled; 0 if it has none.
    """

    name: str
    function: Any
    arguments: tuple
    donated: tuple[int, ...] = ()
    is_full_model: bool = False
    is_portable: bool = False
    num_tokens: int = 0

    @classmethod
    def portable(
        cls, name: str, function: Callable, arguments: tuple, *, donate: tuple[int, ...] = (),
        is_full_model: bool = False, num_tokens: int = 0, **static: Any,
    ) -> "Task":  # fmt: skip
        """Make the task of a function that is not jitted yet; see `jit_with`."""
        return cls(
            name, jit_with(function, donate=donate, **static), arguments, donate, is_full_model, True, num_tokens
        )

    def lower(self) -> jax.stages.Lowered:
        """Trace and lower it in this thread."""
        return self.function.lower(*self.arguments)


def jit_with(function: Callable, *, donate: tuple[int, ...] = (), **static: Any) -> Any:
    """`jax.jit` of `function` with keyword arguments bound and positional arguments donated by number."""

    def bound(*args: Any) -> Any:
        return function(*args, **static)

    bound.__name__ = function.__name__
    return jax.jit(bound, donate_argnums=donate)


def shapes_of(tree: Any) -> Any:
    """The same tree with a `jax.ShapeDtypeStruct` in place of each array."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)
