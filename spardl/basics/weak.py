"""What keeps nothing alive: methods, and what is done once an object is gone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakMethod, finalize

import torch

__all__ = ["Uncopied", "weakly", "when_dropped"]


# Hooks of a module that are no part of it.


class Uncopied(partial[Any]):
    """A function as a module's hook, which does nothing in copies of the module (``copy.deepcopy``, ``torch.save``).

    Where the module is compiled, the hook is called between graphs and not a part of one: it has no frame of its own
    that torch.compile could look at.

    Args:
        function: the hook; whatever it is bound to is neither copied nor saved.
    """

    def __new__(cls, function: Callable[..., Any]) -> Uncopied:
        """Of the function."""
        return super().__new__(cls, torch.compiler.disable(function))

    def __deepcopy__(self, memo: object) -> Uncopied:
        return Uncopied(_nothing)

    def __reduce__(self) -> tuple[Any, ...]:
        return Uncopied, (_nothing,)


def _nothing(*arguments: object) -> None:
    pass


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
