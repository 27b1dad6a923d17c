"""Averages that no step of an optimizer used, though each worker's moments have what they were made of."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import partial

import torch
from torch.autograd.graph import get_gradient_edge

from spardl.basics.errors import ConfigError
from spardl.hooks.averager import LOOKED, Named

__all__ = ["Unapplied"]

_ZERO = "call optimizer.zero_grad() before the first backward pass of each step, as what is there is an update"


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
        self._added: set[str] = set()
        self._hooks = [optimizer.register_step_pre_hook(self._applied)]
        # Not of the parameters, whose own hooks would be seen by torch.compile.
        self._nodes = [get_gradient_edge(each.parameter).node for each in named]
        pairs = zip(self._nodes, named, strict=True)
        self._hooks += [node.register_prehook(partial(self._look, each)) for node, each in pairs]

    def averaged(self) -> None:
        """There are averages, which the optimizer is to apply; warns, once, where those before were not."""
        if self._due and not self._told:
            warnings.warn(
                "spardl: averages were thrown away before the optimizer's step(), but the gradients are in what each "
                "worker carries over; make a backward pass that is to change nothing (a discriminator's, while the "
                "generator learns) in no_sync(), before zero_grad(), on all workers.",
                stacklevel=3,
            )
            self._told = True
        self._due = True
        self._steps += 1
        self._added.clear()

    def _applied(self, *_: object) -> None:
        self._due = False

    def _look(self, named: Named, *_: object) -> None:
        """Is called before a backward pass adds to a gradient; looks at the first one since there were averages."""
        if named.name in self._added:
            return
        self._added.add(named.name)
        before = named.parameter.grad
        # Most loops have none then. Where there are zeros, to look costs time.
        looks = self._due or (self._in_place and self._steps % LOOKED == 1)
        if looks and before is not None and before.any():
            way = "leave all backward passes of a step but the last to no_sync()" if self._due else _ZERO
            raise ConfigError(f"a backward pass adds to the gradient of {named.name}, which was averaged before; {way}")

    def close(self) -> None:
        """Looks no more."""
        for hook in self._hooks:
            hook.remove()
        self._nodes = []
