"""The steps of an optimizer that a handle was given: what they apply, and whether they apply every average."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from spardl.basics.errors import ConfigError
from spardl.hooks.averager import LOOKED, LOOKED_FIRST, Averager, Named
from spardl.hooks.choosing import check_known
from spardl.hooks.unapplied import Marks, Unapplied, Unaveraged, refuse_gradients, warn_clipped
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
        clip_norm: largest norm of each worker's own gradient, which the handle limits itself.
    """

    def __init__(
        self,
        method: Method,
        optimizer: torch.optim.Optimizer | None,
        trained: Sequence[Named],
        averager: Callable[[], Averager | None],
        *,
        delayed: bool = False,
        clip_norm: float | None = None,
    ) -> None:
        self._averager, self._delayed, self._clip_norm = averager, delayed, clip_norm
        self._replaced = False
        self._plain = PlainSteps.of(method.momentum, optimizer, self._look)
        self._unapplied: Unapplied | None = None
        self._unaveraged: Unaveraged | None = None
        if optimizer is not None and (self._plain or (delayed and method.carries)):
            self._unapplied = Unapplied(trained, optimizer, in_place=not delayed)
        elif not delayed:
            self._unaveraged = Unaveraged(trained, carries=method.carries)
        self._marks = Marks()
        self._trained = [each.parameter for each in trained]
        self._told = False

    # --- a backward pass

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

    def ignores(self, parameters: Iterable[Tensor]) -> bool:
        """Whether nothing can use the gradients of the backward pass, and it must not count.

        Args:
            parameters: those whose gradients come first in it, of any shape.
        """
        return self._unapplied is not None and self._unapplied.stale(parameters)

    def check_ignored(self) -> None:
        """Accepts a backward pass that is ignored, at its end.

        Raises:
            ConfigError: if a part of the gradients was cleared before it, and the rest was not.
        """
        if self._unapplied:
            self._unapplied.check_stale()

    def begin(self, averager: Averager) -> None:
        """Is called before gradients are averaged.

        Undoes the last averages if they were cleared before a step, and takes over state of the optimizer.
        """
        if self._unapplied and self._unapplied.discarded() and not self._delayed:
            averager.undoing.undo()
        self.take_over(averager)

    def averaged(self, discarded: Collection[nn.Parameter] = ()) -> None:
        """There are averages, which the optimizer is to apply.

        Args:
            discarded: parameters whose averages the loop is to discard.

        Raises:
            ConfigError: if what was averaged before is in them again.
        """
        if self._unapplied:
            self._unapplied.averaged()
        if self._unaveraged:
            self._unaveraged.averaged(discarded)

    def mark(self) -> None:
        """The backward pass has ended, and every gradient is what the optimizer is to apply."""
        if self._plain and not self._delayed:
            self._marks.set(self._trained)

    @property
    def updates(self) -> bool:
        """Whether steps of the optimizer apply averages to all parameters."""
        return self._plain is not None or self._delayed

    # --- a step

    def _look(self, parameters: list[nn.Parameter]) -> None:
        averager = self._averager()
        if averager is None:
            refuse_gradients(parameters)
            return
        check_known(parameters, averager.known)
        if not self._delayed:
            if self._unapplied:
                self._unapplied.check_due(parameters)
            self._check_unchanged(averager, parameters)

    def _check_unchanged(self, averager: Averager, parameters: list[nn.Parameter]) -> None:
        """Accepts gradients that are the averages, and those that the loop limited as the handle does already.

        Raises:
            ConfigError: if they were changed, even by a call that found nothing to change in this step.
        """
        changed = self._marks.changed(parameters, scaled=averager.scaled)
        self._marks.clear()
        if not changed:
            _check_values(averager, parameters, self._clip_norm)
        elif self._clip_norm is None:
            raise _changed(averager, changed[0], None)
        else:
            _take_limit_off(averager, parameters, self._clip_norm)
            if not self._told:
                warn_clipped(self._clip_norm)
                self._told = True

    def forget(self) -> None:
        """What was carried over was replaced."""
        self._replaced = True
        if averager := self._averager():
            averager.undoing.forget()
        self._marks.clear()
        if self._unapplied:
            self._unapplied.forget()
        if self._unaveraged:
            self._unaveraged.forget()

    def left(self) -> None:
        """The handle was dropped: as ``close``, but for steps that are made later, which the model still waits for."""
        if not self._delayed:
            self.close()

    def close(self) -> None:
        """The optimizer's steps are its own again."""
        for each in (self._plain, self._unapplied, self._unaveraged):
            if each:
                each.close()
        self._marks.clear()
        self._trained = []


def _check_values(averager: Averager, parameters: Iterable[nn.Parameter], clip_norm: float | None) -> None:
    """Accepts gradients that are the averages still; a scaler may have taken its scale off.

    Reads entries in each of the first steps, then in every ``LOOKED``-th one.

    Args:
        averager: that has the averages.
        parameters: that an optimizer is about to update.
        clip_norm: limit of this handle, if it has one.

    Raises:
        ConfigError: if they are others.
    """
    if averager.engine.steps > LOOKED_FIRST and averager.engine.steps % LOOKED != 1:
        return
    for parameter, average in _averages(averager, parameters):
        assert parameter.grad is not None
        if not averager.is_still(parameter.grad, average):
            raise _changed(averager, parameter, clip_norm)


def _averages(averager: Averager, parameters: Iterable[nn.Parameter]) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """Parameters whose gradients are not zero, and their averages."""
    numbers = {parameter: number for number, parameter in enumerate(averager.gradient.parameters)}
    for parameter in parameters:
        # Where nobody used it, DDP leaves it as it was.
        if parameter.requires_grad and parameter.grad is not None and parameter.grad.any():
            yield parameter, averager.gradient.part(numbers[parameter]).view(parameter.shape)


def _changed(averager: Averager, parameter: nn.Parameter, clip_norm: float | None) -> ConfigError:
    """Returns the error for a gradient that is not the average any more.

    Args:
        averager: that has the average.
        parameter: whose gradient it is.
        clip_norm: limit of this handle, if it has one.
    """
    pairs = zip(averager.gradient.names, averager.gradient.parameters, strict=True)
    name = next(name for name, each in pairs if each is parameter)
    line = f"the gradient of {name} was changed between backward() and step(), and is an update by then; "
    if clip_norm is not None:
        return ConfigError(
            f"{line}this handle limits gradients to clip_norm={clip_norm} already: delete clip_grad_norm_() from "
            "the loop"
        )
    return ConfigError(
        f"{line}delete clip_grad_norm_() from the loop and give this handle clip_norm= in place of it (even a call "
        'that changes no value counts), scaler= with a GradScaler, or recipe="published"'
    )


def _take_limit_off(averager: Averager, parameters: Iterable[nn.Parameter], clip_norm: float) -> None:
    """Restores averages that the loop limited with ``clip_grad_norm_``, if to the limit of this handle.

    Args:
        averager: that has the averages.
        parameters: that an optimizer is about to update.
        clip_norm: limit of this handle.

    Raises:
        ConfigError: if they were changed in another way.
    """
    pairs = list(_averages(averager, parameters))
    if all(parameter.grad is not None and averager.is_still(parameter.grad, each) for parameter, each in pairs):
        return
    norm = math.sqrt(sum(float(each.square().sum(dtype=torch.float64)) for _, each in pairs))
    for multiple in (1.0, 1 / averager.engine.scale):
        limited = multiple * clip_norm / (norm * multiple + 1e-6)
        if all(torch.allclose(each.grad, average * limited, rtol=1e-2) for each, average in pairs):  # type: ignore[arg-type]
            for parameter, average in pairs:
                parameter.grad.copy_(average * multiple)  # type: ignore[union-attr]
            return
    raise _changed(averager, pairs[0][0], clip_norm)
