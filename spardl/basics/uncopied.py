"""Hooks of a module that are no part of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

__all__ = ["Uncopied"]


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
