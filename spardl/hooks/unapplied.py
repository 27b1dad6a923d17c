"""Averages that no step of an optimizer used, though each worker's moments have what they were made of."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from spardl.basics.errors import ConfigError
from spardl.basics.weak import weakly
from spardl.hooks.averager import LOOKED, Named

__all__ = ["Unapplied", "refuse_gradients"]


class Unapplied:
    """Sees what becomes of averages until the next ones.

    Args:
        named: the parameters whose gradients are averaged; each is trained.
        optimizer: whose steps apply the averages.
        in_place: whether gradients are the averages after a backward pass, and not each worker's own.
    """

    def __init__(self, named: Sequence[Named], optimizer: torch.optim.Optimizer, *, in_place: bool) -> None:
        self._in_place, self._steps = in_place, 0
        self._due = self._told = False
        self._added: set[nn.Parameter] = set()
        self._noted: dict[nn.Parameter, str] = {}
        self._hooks = [optimizer.register_step_pre_hook(self._applied)]
        # Not of the parameters, whose own hooks would be seen by torch.compile.
        self._nodes = [get_gradient_edge(each.parameter).node for each in named]
        pairs = zip(self._nodes, named, strict=True)
        self._hooks += [node.register_prehook(weakly(self._look, each)) for node, each in pairs]

    def averaged(self) -> None:
        """There are averages, which the optimizer is to apply; warns, once, where those before were not.

        Raises:
            ConfigError: if what was averaged before is in them again.
        """
        if self._noted:
            name = min(self._noted.values())
            raise ConfigError(
                f"the gradient of {name} was averaged together with what had been averaged before; call "
                "optimizer.zero_grad() before the first backward pass of each step, and leave all backward passes of "
                "a step but the last to no_sync(), as well as those that are to change nothing"
            )
        if self._due and not self._told:
            warnings.warn(
                "spardl: averages were thrown away before the optimizer's step(), but the gradients are in what each "
                "worker carries over; make a backward pass that is to change nothing (a discriminator's, while the "
                "generator learns) in no_sync(), before zero_grad(), on all workers.",
                stacklevel=4,
            )
            self._told = True
        self._due = True
        self._steps += 1
        self._added.clear()

    def check_due(self, parameters: Sequence[nn.Parameter]) -> None:
        """Accepts a step that applies averages.

        Args:
            parameters: that have gradients.

        Raises:
            ConfigError: if there were no averages since the last one.
        """
        if not self._due:
            refuse_gradients(parameters)

    def forget(self) -> None:
        """What was carried over was replaced."""
        self._due = False
        self._added.clear()
        self._noted.clear()

    def _applied(self, *_: object) -> None:
        self._due = False

    def _look(self, named: Named, *_: object) -> None:
        """Is called before a backward pass adds to a gradient; looks at the first one since there were averages."""
        name, parameter = named
        before, first = parameter.grad, parameter not in self._added
        self._added.add(parameter)
        # Most loops have none then. Where there are zeros, to look costs time.
        looks = self._due or (self._in_place and self._steps % LOOKED == 1)
        if first and looks and before is not None and before.any():
            self._noted[parameter] = name
        elif parameter in self._noted and (before is None or not before.any()):
            del self._noted[parameter]  # it was cleared after that pass

    def close(self) -> None:
        """Looks no more."""
        for hook in self._hooks:
            hook.remove()
        self._nodes = []


def refuse_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Accepts a step before which nothing was averaged, if there is nothing to apply.

    Args:
        parameters: of the optimizer.

    Raises:
        ConfigError: if one has a gradient that is not zero.
    """
    if any(each.grad is not None and each.grad.any() for each in parameters):
        raise ConfigError(
            "step() would apply gradients that were not averaged since the last step(); call it once after each "
            "backward pass outside no_sync(), and detach() the handle before the model is trained without it"
        )
