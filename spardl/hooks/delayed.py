"""DeAR in a loop that is not ours: ``optimizer.step()`` orders the update, and the next forward pass waits for it.

The loop stays ``loss.backward(); optimizer.step()``. Between the two, every ``.grad`` is the worker's own, and nothing
should look at it; the optimizer finds none when the loop calls it, and does nothing but its bookkeeping.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from spardl.basics.errors import ConfigError
from spardl.basics.weak import Uncopied, weakly
from spardl.hooks.averager import LOOKED, LOOKED_FIRST, Averager
from spardl.hooks.optimizer_steps import Marks, refuse_gradients, warn_clipped
from spardl.schedules.dear import InHalves
from spardl.schedules.plain import runs_closure

__all__ = ["DelayedUpdate"]


class DelayedUpdate:
    """Lets a schedule that updates in the next forward pass take over an optimizer's steps.

    Args:
        averager: with such a schedule.
        model: whose forward passes wait.
        optimizer: of its parameters.
        clip_norm: largest norm of a gradient, which the schedule limits itself.
    """

    def __init__(
        self,
        averager: Averager,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        clip_norm: float | None = None,
    ) -> None:
        assert isinstance(averager.engine, InHalves)
        self._averager, self._engine = averager, averager.engine
        self._collected = self._dropped = self._usable = False
        self._sent: tuple[int, Tensor] | None = None
        self._marks = Marks()
        self._clip_norm, self._told = clip_norm, False
        self._hidden = ExitStack()
        self._hooks = list(self._register(model, optimizer))

    def _register(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[RemovableHandle]:
        # Before those of the engine, which then know that a step has begun.
        yield model.register_forward_pre_hook(Uncopied(self._forward), prepend=True)
        # What watches the first forward pass cannot be taken off during a backward pass: autograd hides it there.
        yield model.register_forward_hook(Uncopied(lambda *_: self._engine.forward_ended()), always_call=True)
        yield optimizer.register_step_pre_hook(torch.compiler.disable(self._order))
        yield optimizer.register_step_post_hook(torch.compiler.disable(self._ordered))
        for number, parameter in enumerate(self._averager.gradient.parameters):
            yield parameter.register_post_accumulate_grad_hook(weakly(self._note, number))

    def _forward(self, model: nn.Module, arguments: object) -> None:
        if not torch.is_grad_enabled():
            return  # an evaluation: waits for what it uses, too, but begins no step
        self.drop()
        if self._averager.begun:
            self._engine.forward_again()
        self._averager.begin()

    def _note(self, number: int, parameter: object) -> None:
        self._averager.note(number)

    def collect(self) -> bool:
        """The backward pass has ended: what is on its way rests at its boundary.

        Returns:
            Whether the averages can be used: whether no worker's gradient overflowed.
        """
        self._averager.begun = False
        self._engine.collect()
        self._collected, self._dropped = True, False
        looks = self._engine.steps <= LOOKED_FIRST or self._engine.steps % LOOKED == 1
        self._sent = self._sample() if looks else None
        self._usable = self._engine.agree()
        return self._usable

    def _sample(self) -> tuple[int, Tensor] | None:
        """The smallest gradient that is not zero, and its parameter's number."""
        parameters = self._averager.gradient.parameters
        for number in sorted(range(len(parameters)), key=lambda number: parameters[number].numel()):
            gradient = parameters[number].grad
            if gradient is not None and gradient.any():
                return number, gradient.clone()
        return None

    def mark(self) -> None:
        """The backward pass has ended, and every gradient is this worker's own, which was sent."""
        self._marks.set(self._averager.gradient.parameters)

    def _check_sent(self) -> None:
        """Refuses gradients that were changed after they were sent, unless limited as the schedule does already."""
        parameters = self._averager.gradient.parameters
        changed = self._marks.changed(parameters, scaled=self._averager.scaled)
        self._marks.clear()
        number, still = self._looked_at()
        if changed and number is None:
            number = next(number for number, each in enumerate(parameters) if each is changed[0])
        if number is None or (still and not changed):
            return
        line = (
            f"the gradient of {self._averager.gradient.names[number]} was changed between backward() and step(), "
            "and was sent before, by schedule=dear; "
        )
        if self._clip_norm is None:
            raise ConfigError(
                f"{line}delete clip_grad_norm_() from the loop and give attach() clip_norm= in place of it (even a "
                "call that changes no value counts), and scaler= with a GradScaler"
            )
        if not still and not self._limited(self._clip_norm):
            raise ConfigError(
                f"{line}this handle limits gradients to clip_norm={self._clip_norm} already: delete clip_grad_norm_() "
                "from the loop"
            )
        if not self._told:
            warn_clipped(self._clip_norm)
            self._told = True

    def _looked_at(self) -> tuple[int | None, bool]:
        """The number of the parameter whose gradient was copied when it was sent, and whether that is as it was."""
        if self._sent is None:
            return None, True
        number, sent = self._sent
        now = self._averager.gradient.parameters[number].grad
        return number, now is not None and self._averager.is_still(now, sent)

    def _limited(self, clip_norm: float) -> bool:
        gradients = [each.grad for each in self._averager.gradient.parameters if each.grad is not None]
        norm = math.sqrt(sum(float(each.square().sum(dtype=torch.float64)) for each in gradients))
        return math.isclose(norm, clip_norm, rel_tol=1e-2)

    def drop(self) -> None:
        """The loop did not call the optimizer; a GradScaler does not after an overflow."""
        if self._collected:
            self._collected, self._dropped = False, True
            self._engine.drop()
            if self._usable:
                self._averager.undoing.undo(landing=True)
            self._averager.tell_refusals()

    def _order(self, optimizer: torch.optim.Optimizer, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Is called before each of the optimizer's steps, ours and the loop's."""
        if self._engine.updates:
            return
        if runs_closure(arguments, options):
            raise ConfigError("schedule=dear updates later, and cannot run a closure; use schedule=wfbp")
        parameters = self._averager.gradient.parameters
        if self._dropped and any(each.grad is not None for each in parameters):
            raise ConfigError(
                "a forward pass came between backward() and step(), and schedule=dear has dropped the averages; call "
                "step() first, or make that pass in torch.no_grad()"
            )
        if not self._collected:
            refuse_gradients(parameters)
        else:
            self._check_sent()
            self._collected = False
            self._engine.finish()
            self._averager.tell_refusals()
        self._hidden.enter_context(self._averager.gradient.hidden(parameters))

    def _ordered(self, *_: object) -> None:
        if not self._engine.updates:
            self._hidden.close()

    def flush(self) -> None:
        """Sees to it that weights are those after the last step."""
        if not self._collected:  # else a step is to be ordered still, and all before it were made
            self._engine.flush()

    def settle(self) -> None:
        """Drops what no step has ordered, and flushes."""
        self.drop()
        self.flush()

    def close(self) -> None:
        """Flushes, and takes everything off the model and its optimizer, even if what is on its way is lost.

        Raises:
            PeerError: if it is: the last step has updated a part of the model then, or nothing.
        """
        if self._collected:
            warnings.warn("spardl: detached between backward() and step(): that step changes nothing.", stacklevel=3)
            for parameter in self._averager.gradient.parameters:
                parameter.grad = None  # its own, of this worker alone
        try:
            self.settle()
        finally:
            for hook in self._hooks:
                hook.remove()
            self._engine.close()
