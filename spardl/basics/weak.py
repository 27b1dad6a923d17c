"""What keeps nothing alive: methods, and what is done once an object is gone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakMethod, finalize

import torch

__all__ = ["weakly", "when_dropped"]


def weakly(method: Callable[..., Any], *first: Any) -> Callable[..., Any]:
    """A bound method that does not keep its object: as a hook of a tensor, of a node of autograd, or of a part.

    The first two are held where Python's garbage collector does not look, so an object that both has the tensor and is
    had by its hook would stay for ever; the last would keep it until the next collection.

    ``torch.compile`` does not trace the call: hooks also run in the backward pass of a compiled step, where tracing
    them compiles dozens of frames and recompiles them in later steps.

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

    disabled: Callable[..., Any] = torch.compiler.disable(call)
    return disabled


def when_dropped(owner: Any, then: Callable[..., Any], *arguments: Any) -> finalize[..., Any]:
    """Does something once an object is gone, but not at the end of the program.

    Args:
        owner: the object.
        then: what is called.
        *arguments: of it; none of them may have the object.

    Returns:
        What takes that back: its ``detach()`` gives ``None`` once it is called, or was taken back before.
    """
    made = finalize(owner, then, *arguments)
    made.atexit = False
    return made
