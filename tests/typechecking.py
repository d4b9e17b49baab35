"""The type checker that the jaxtyping import hook applies to every function and dataclass of the packages it is told.

It is beartype, which takes an int for a float here, with one allowance: JAX rebuilds a registered dataclass through its
constructor, with placeholders (None, shapes, shardings) or stacked arrays in place of the fields, and such a call is
no mistake.
"""

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

from beartype import BeartypeConf, beartype

_beartype = beartype(conf=BeartypeConf(is_pep484_tower=True))


def typechecked[**P, R](function: Callable[P, R]) -> Callable[P, R]:
    """Check arguments and result of `function` on every call."""
    checked = _beartype(function)
    if function.__name__ != "__init__":
        return checked

    @wraps(function)
    def check_unless_rebuilt(*args: P.args, **kwargs: P.kwargs) -> Any:
        return None if _called_by_jax() else checked(*args, **kwargs)

    return check_unless_rebuilt


def _called_by_jax() -> bool:
    frame = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__", "").startswith("jaxtyping."):
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("__name__", "").startswith("jax.")
