"""Methods that keep nothing alive."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakMethod

__all__ = ["weakly"]


def weakly(method: Callable[..., Any], *first: Any) -> Callable[..., Any]:
    """A bound method that does not keep its object: as a hook of a tensor, of a node of autograd, or of a part.

    The first two are held where Python's garbage collector does not look, so an object that both has the tensor and is
    had by its hook would stay for ever; the last would keep it until the next collection.

    Args:
        method: of an object that somebody else keeps.
        *first: what it is given before what the caller gives.

    Returns:
        What calls it, and gives ``None`` once the object is gone.
    """
    reference = WeakMethod(method)

    def call(*arguments: object) -> Any:
        alive = reference()
        return None if alive is None else alive(*first, *arguments)

    return call
