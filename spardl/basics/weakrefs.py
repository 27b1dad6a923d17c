"""Weak references to bound methods, finalizers, and module hooks that copies of a module do not have."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakMethod, finalize

import torch

__all__ = ["TransientHook", "on_finalize", "weak_method"]


class TransientHook(partial[Any]):
    """A module hook that does nothing in copies of the module (``copy.deepcopy``, ``torch.save``).

    In a compiled module, the hook runs between graphs and is not traced.

    Args:
        function: Hook to call; objects that it is bound to are neither copied nor saved.
    """

    def __new__(cls, function: Callable[..., Any]) -> TransientHook:
        """Wraps ``function`` so that deepcopy and pickle drop it."""
        # A disabled function has no frame that torch.compile could trace.
        return super().__new__(cls, torch.compiler.disable(function))

    def __deepcopy__(self, memo: object) -> TransientHook:
        return TransientHook(_nothing)

    def __reduce__(self) -> tuple[Any, ...]:
        return TransientHook, (_nothing,)


def _nothing(*arguments: object) -> None:
    pass


def weak_method(method: Callable[..., Any], *first: Any) -> Callable[..., Any]:
    """Returns a wrapper of a bound method that does not keep the method's object alive.

    Use it for hooks of tensors, autograd nodes and modules.

    Args:
        method: Bound method of an object that something else keeps alive.
        *first: Arguments passed before those of the caller.

    Returns:
        A function that calls the method, or returns ``None`` once the object is gone.
    """
    # Python's garbage collector does not see into hooks of tensors and autograd nodes: an object that holds the tensor
    # and is held by its hook would never be freed. A module hook would keep it until the next collection.
    reference = WeakMethod(method)

    def call(*arguments: object) -> Any:
        alive = reference()
        return None if alive is None else alive(*first, *arguments)

    # Hooks also run in the backward pass of a compiled step. Tracing them there would compile dozens of frames and
    # recompile them in later steps.
    disabled: Callable[..., Any] = torch.compiler.disable(call)
    return disabled


def on_finalize(owner: Any, then: Callable[..., Any], *arguments: Any) -> finalize[..., Any]:
    """Calls a function when an object is garbage-collected, but not at interpreter exit.

    Args:
        owner: Object to watch.
        then: Function to call once ``owner`` is gone.
        *arguments: Arguments of ``then``; they must not hold references to ``owner``.

    Returns:
        The finalizer. Its ``detach()`` cancels the call; it returns ``None`` if the function has already been called or
        cancelled.
    """
    made = finalize(owner, then, *arguments)
    made.atexit = False
    return made
