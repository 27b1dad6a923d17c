"""Hooks that keep nothing alive."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakMethod

__all__ = ["weakly"]


def weakly(method: Callable[..., None], *first: Any) -> Callable[..., None]:
    """A bound method as a hook of a tensor, or of a node of autograd, that lasts for as long as its object does.

    Those are held where Python's garbage collector does not look, so an object that both has the tensor and is had by
    its hook would stay for ever.

    Args:
        method: of an object that somebody else keeps.
        *first: what it is given before what the hook is.
    """
    reference = WeakMethod(method)

    def call(*arguments: object) -> None:
        if (alive := reference()) is not None:
            alive(*first, *arguments)

    return call
