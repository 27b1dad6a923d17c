"""Hooks of a module that are no part of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["Uncopied"]


class Uncopied:
    """A function as a module's hook, which does nothing in copies of the module (``copy.deepcopy``, ``torch.save``).

    Args:
        function: the hook; whatever it is bound to is neither copied nor saved.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *arguments: Any) -> Any:
        """What the function gives."""
        return self._function(*arguments)

    def __deepcopy__(self, memo: object) -> Uncopied:
        return Uncopied(_nothing)

    def __reduce__(self) -> tuple[Any, ...]:
        return Uncopied, (_nothing,)


def _nothing(*arguments: object) -> None:
    pass
