"""State that lasts from step to step: owned by the caller, saved and loaded as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor

__all__ = ["State", "copied"]


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

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        """Sets every field from ``values``.

        Raises:
            KeyError: if the names differ from this state's own.
        """
        names = {field.name for field in fields(self)}
        if names != set(values):
            raise KeyError(f"state of {type(self).__name__} has {sorted(names)}, got {sorted(values)}")
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
