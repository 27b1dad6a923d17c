"""An optimizer's update of some of its parameters, later than it was ordered."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from spardl.basics.errors import ConfigError

__all__ = ["Updater", "runs_closure", "unwrapped"]


def runs_closure(arguments: Sequence[Any], options: Mapping[str, Any]) -> bool:
    """Whether an optimizer's step was called with a closure; what wraps optimizers often gives ``None`` for one.

    Args:
        arguments: that a hook before the step was given, the optimizer among them.
        options: likewise.
    """
    return any(each is not None for each in (*arguments[1:], options.get("closure")))


def unwrapped(optimizer: Any) -> Any:
    """The optimizer itself: Accelerate's only passes steps on to it, and has it as an attribute."""
    return getattr(optimizer, "optimizer", optimizer)


class Updater:
    """Lets any optimizer that treats its parameters one by one update a part of them.

    Args:
        optimizer: of ``torch.optim``, or one like those.

    Attributes:
        applying: whether the optimizer's step is one of ours.

    Raises:
        ConfigError: if it needs all parameters at once.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ConfigError("optimizer=LBFGS needs all gradients at once, several times a step; use another")
        self._optimizer = optimizer
        self._held: list[dict[str, Any]] = []
        self.applying = False

    def hold(self) -> None:
        """Remembers learning rates and the like as they are now: what changes later is for the next step."""
        self._held = [
            {key: value for key, value in group.items() if key != "params"} for group in self._optimizer.param_groups
        ]

    def apply(self, parameters: Iterable[nn.Parameter]) -> None:
        """Updates some parameters with their gradients and the held settings."""
        wanted = set(parameters)
        self.applying = True
        groups = self._optimizer.param_groups
        before = [dict(group) for group in groups]
        try:
            # A group that was added meanwhile has none of them.
            for group, held in zip(groups, self._held, strict=False):
                group.update(held, params=[each for each in group["params"] if each in wanted])
            # Not every optimizer accepts a group without parameters.
            self._optimizer.param_groups = [group for group in groups if group["params"]]
            if self._optimizer.param_groups:
                self._optimizer.step()
        finally:
            self.applying = False
            for group, old in zip(groups, before, strict=True):
                group.update(old)
            self._optimizer.param_groups = groups
