"""State that lasts from step to step: owned by the caller, saved and loaded as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

__all__ = ["State", "copied", "described", "same_kind"]


@dataclass
class State:
    """Base of all per-worker state: a dataclass whose fields are numbers, booleans, strings or tensors.

    An operator without state uses this class itself.
    """

    def rescale(self, factor: float) -> None:
        """Follows gradients that are multiplied by ``factor`` from here on; tensors are replaced, not changed."""

    def state_dict(self) -> dict[str, Any]:
        """The fields by name. Tensors are shared, not copied."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def check(self, values: Mapping[str, Any]) -> None:
        """Accepts ``values`` that ``load_state_dict`` can set; changes nothing.

        Raises:
            KeyError: if the names differ from this state's own.
            ValueError: if a value is of another kind or a tensor of another shape; empty tensors fit all shapes.
        """
        names = {field.name for field in fields(self)}
        if names != set(values):
            raise KeyError(f"state of {type(self).__name__} has {sorted(names)}, got {sorted(values)}")
        for name, value in values.items():
            mine = getattr(self, name)
            if not same_kind(value, mine):
                raise ValueError(f"{name} is {described(value)}, expected {described(mine)}")
            if isinstance(mine, Tensor) and value.shape != mine.shape and mine.numel() and value.numel():
                raise ValueError(f"{name} is {described(value)}, expected {described(mine)}")

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        """Sets every field from ``values``.

        Raises:
            KeyError: as ``check``.
            ValueError: as ``check``.
        """
        self.check(values)
        for name, value in values.items():
            mine = getattr(self, name)
            same = isinstance(mine, Tensor) and isinstance(value, Tensor)
            # Where it was saved is not always where it is needed.
            setattr(self, name, value.to(mine.device) if same else value)


def copied(values: Any) -> Any:
    """Plain data whose tensors share no memory with those given."""
    if isinstance(values, Tensor):
        return values.clone()
    if isinstance(values, Mapping):
        return {name: copied(value) for name, value in values.items()}
    if isinstance(values, list):
        return [copied(value) for value in values]
    return values


def same_kind(value: Any, mine: Any) -> bool:
    """Whether a saved ``value`` can take the place of ``mine``: a number of its kind, or a tensor of its type."""
    if isinstance(mine, Tensor):
        fits = isinstance(value, Tensor) and value.layout is torch.strided and not value.is_meta
        return fits and (value.dtype, value.dim()) == (mine.dtype, mine.dim())
    if isinstance(mine, float):
        return isinstance(value, int | float) and not isinstance(value, bool)
    return type(value) is type(mine)


def described(value: Any) -> str:
    """A saved value in a few words, for error messages."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    return f"{type(value).__name__} {value!r}"[:60]
