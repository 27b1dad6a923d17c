"""The steps of an optimizer that a handle was given: what they apply, and whether they apply every average."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from spardl.hooks.averager import Averager, Named
from spardl.hooks.choosing import check_known
from spardl.hooks.unapplied import Unapplied
from spardl.method.method import Method
from spardl.schedules.plain import PlainSteps

__all__ = ["OptimizerSteps"]


class OptimizerSteps:
    """Lets an optimizer only apply averages, where its state was moved; sees to it that none is thrown away or missing.

    Args:
        method: of the handle.
        optimizer: that it was given, if it was.
        trained: the parameters whose gradients are averaged.
        averager: gives what averages them, once there is one; must not keep the handle, which keeps this.
        delayed: whether steps are made later than the loop calls them; gradients are each worker's own then.
    """

    def __init__(
        self,
        method: Method,
        optimizer: torch.optim.Optimizer | None,
        trained: Sequence[Named],
        averager: Callable[[], Averager | None],
        *,
        delayed: bool = False,
    ) -> None:
        self._averager, self._delayed = averager, delayed
        self._replaced = False
        self._plain = PlainSteps.of(method.momentum, optimizer, self._look)
        self._unapplied: Unapplied | None = None
        if optimizer is not None and (self._plain or (delayed and method.carries)):
            self._unapplied = Unapplied(trained, optimizer, in_place=not delayed)

    def _look(self, parameters: list[nn.Parameter]) -> None:
        averager = self._averager()
        if averager is None:
            return
        check_known(parameters, averager.known)
        if not self._delayed:
            if self._unapplied:
                self._unapplied.check_due(parameters)
            averager.check_unchanged(parameters)

    def take_over(self, averager: Averager) -> None:
        """Moves the optimizer's state, if it has any, to ``averager``; call before each step's first gradient.

        A handle's state that was loaded since the last step, and has steps, takes precedence: older versions left the
        moments of a training before ``attach`` in the optimizer's checkpoint.
        """
        if self._plain:
            gradient, carried = averager.gradient, averager.engine.carried
            stale = self._replaced and carried.states[0][0].step > 0
            scale = averager.engine.scale
            self._plain.take_over(carried, gradient.names, gradient.parameters, scale, stale=stale)
        self._replaced = False

    def averaged(self) -> None:
        """There are averages, which the optimizer is to apply; warns, once, where those before were not.

        Raises:
            ConfigError: if what was averaged before is in them again.
        """
        if self._unapplied:
            self._unapplied.averaged()

    def forget(self) -> None:
        """What was carried over was replaced."""
        self._replaced = True
        if self._unapplied:
            self._unapplied.forget()

    def left(self) -> None:
        """The handle was dropped: as ``close``, but for steps that are made later, which the model still waits for."""
        if not self._delayed:
            self.close()

    def close(self) -> None:
        """The optimizer's steps are its own again."""
        if self._plain:
            self._plain.close()
        if self._unapplied:
            self._unapplied.close()
