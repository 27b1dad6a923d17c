"""DeAR in a user's loop: ``optimizer.step()`` schedules the update, and the next forward pass applies it.

The loop stays ``loss.backward(); optimizer.step()``. Between these two calls, every ``.grad`` is the worker's own
gradient and must not be changed. While ``optimizer.step()`` runs, gradients are hidden from the optimizer, so it only
updates its counters. During the next forward pass, each layer waits for its averages and is then updated.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from spardl.basics.errors import ConfigError
from spardl.basics.weakrefs import TransientHook, weak_method
from spardl.hooks.averager import ALWAYS_CHECKED, CHECK_INTERVAL, Averager, Named
from spardl.hooks.optimizer_steps import GradientMarks, check_no_gradients, is_unchanged, warn_clipped
from spardl.schedules.apply_update import runs_closure
from spardl.schedules.dear import InHalves

__all__ = ["DelayedUpdate"]


class DelayedUpdate:
    """Connects an optimizer with a schedule that applies its updates during the next forward pass.

    Args:
        averager: Averager whose schedule is ``dear``.
        model: Model whose forward passes wait for the updates.
        optimizer: Optimizer of the model's parameters.
        clip_norm: Largest 2-norm of the average, to which the schedule clips; ``None`` for no limit.
        awaited: Parameters without whose gradients DDP averages nothing.
    """

    def __init__(
        self,
        averager: Averager,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        clip_norm: float | None = None,
        awaited: Sequence[Named] = (),
    ) -> None:
        assert isinstance(averager.engine, InHalves)
        self._averager, self._engine = averager, averager.engine
        # Whether a backward pass waits for step(), whether a forward pass came first, and whether averages are finite.
        self._awaits_step = self._dropped = self._usable = False
        self._sample: tuple[int, Tensor] | None = None
        self._marks = GradientMarks()
        self._clip_norm, self._warned, self._awaited = clip_norm, False, awaited
        self._hidden = ExitStack()
        self._hooks = list(self._register(model, optimizer))

    def _register(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[RemovableHandle]:
        # Runs before the engine's own hooks, which then find that a step has begun.
        yield model.register_forward_pre_hook(TransientHook(self._before_forward), prepend=True)
        # Ends the engine's trace of the first forward pass: autograd disables its function mode in backward passes.
        yield model.register_forward_hook(TransientHook(lambda *_: self._engine.forward_ended()), always_call=True)
        yield optimizer.register_step_pre_hook(torch.compiler.disable(self._before_step))
        yield optimizer.register_step_post_hook(torch.compiler.disable(self._after_step))
        for number, parameter in enumerate(self._averager.gradient.parameters):
            yield parameter.register_post_accumulate_grad_hook(weak_method(self._on_gradient, number))

    def _before_forward(self, model: nn.Module, arguments: object) -> None:
        if not torch.is_grad_enabled():
            return  # an evaluation also waits for the weights it uses, but begins no step
        self.drop()
        if self._averager.begun:
            self._engine.forward_again()
        self._averager.begin()

    def _on_gradient(self, number: int, parameter: object) -> None:
        self._averager.note(number)

    def collect(self) -> bool:
        """Ends the backward pass; each synchronization then pauses between its reduce-scatter and its all-gather.

        Returns:
            Whether the averages can be used, that is, no gradient of any worker overflowed.
        """
        # The engine ends the step itself, in the next forward pass, so the averager must not wait for it.
        self._averager.begun = False
        self._engine.collect()
        self._awaits_step, self._dropped = True, False
        checks = self._engine.steps <= ALWAYS_CHECKED or self._engine.steps % CHECK_INTERVAL == 1
        self._sample = self._copy_sample() if checks else None
        self._usable = self._engine.agree()
        return self._usable

    def _copy_sample(self) -> tuple[int, Tensor] | None:
        """Copies the smallest gradient that is not zero; returns its parameter's number and the copy."""
        parameters = self._averager.gradient.parameters
        # The smallest one suffices: clip_grad_norm_() multiplies all gradients by the same factor.
        for number in sorted(range(len(parameters)), key=lambda number: parameters[number].numel()):
            gradient = parameters[number].grad
            if gradient is not None and gradient.any():
                return number, gradient.clone()
        return None

    def mark(self) -> None:
        """Records the gradients at the end of a backward pass, so that ``step()`` can detect later changes to them."""
        self._marks.set(self._averager.gradient.parameters)

    def _check_sent(self) -> None:
        """Raises an error if gradients changed after they were sent, unless clipped to the limit of the schedule."""
        parameters = self._averager.gradient.parameters
        changed = self._marks.changed(parameters, scaled=self._averager.scaled)
        self._marks.clear()
        number, unchanged = self._compare_sample()
        if changed and number is None:
            number = next(number for number, each in enumerate(parameters) if each is changed[0])
        if number is None or (unchanged and not changed):
            return
        line = (
            f"the gradient of {self._averager.gradient.names[number]} was changed between backward() and step(), "
            "after schedule=dear had sent it; "
        )
        if self._clip_norm is None:
            raise ConfigError(
                f"{line}delete clip_grad_norm_() from the loop, even if it changes no value, and pass clip_norm= to "
                "attach() instead (and scaler= if you use a GradScaler)"
            )
        if not unchanged and not self._is_clipped(self._clip_norm):
            raise ConfigError(
                f"{line}delete clip_grad_norm_() from the loop, because this handle already clips to "
                f"clip_norm={self._clip_norm}"
            )
        if not self._warned:
            warn_clipped(self._clip_norm)
            self._warned = True

    def _compare_sample(self) -> tuple[int | None, bool]:
        """Returns the number of the parameter whose gradient was copied, and whether the gradient is unchanged."""
        if self._sample is None:
            return None, True
        number, sent = self._sample
        now = self._averager.gradient.parameters[number].grad
        return number, now is not None and is_unchanged(now, sent, self._engine.scale)

    def _is_clipped(self, clip_norm: float) -> bool:
        gradients = [each.grad for each in self._averager.gradient.parameters if each.grad is not None]
        norm = math.sqrt(sum(float(each.square().sum(dtype=torch.float64)) for each in gradients))
        return math.isclose(norm, clip_norm, rel_tol=1e-2)

    def drop(self) -> None:
        """Discards averages for which the loop called no ``step()``, for example because a GradScaler skipped it."""
        if self._awaits_step:
            self._awaits_step, self._dropped = False, True
            self._engine.drop()
            if self._usable:
                self._averager.undo.last_step(in_flight=True)
            self._averager.report_refusals()

    def _before_step(
        self, optimizer: torch.optim.Optimizer, arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> None:
        if self._engine.updates:
            return  # the engine's own step, which applies averages
        if runs_closure(arguments, options):
            raise ConfigError("schedule=dear applies updates later and cannot run a closure; use schedule=wfbp")
        parameters = self._averager.gradient.parameters
        if self._dropped and any(each.grad is not None for each in parameters):
            raise ConfigError(
                "schedule=dear dropped the averages, because a forward pass came between backward() and step(); call "
                "step() first, or run that forward pass in torch.no_grad()"
            )
        if not self._awaits_step:
            check_no_gradients(parameters, self._awaited)
        else:
            self._check_sent()
            self._awaits_step = False
            self._engine.finish()
            self._averager.report_refusals()
        # The loop's own step must change nothing: the engine applies the update later.
        self._hidden.enter_context(self._averager.gradient.hidden(parameters))

    def _after_step(self, *_: object) -> None:
        if not self._engine.updates:
            self._hidden.close()

    def flush(self) -> None:
        """Applies all updates that ``step()`` has scheduled."""
        if not self._awaits_step:  # otherwise all earlier updates were applied before the backward pass
            self._engine.flush()

    def settle(self) -> None:
        """Discards averages for which ``step()`` was not called, and applies all other updates."""
        self.drop()
        self.flush()

    def close(self) -> None:
        """Applies pending updates, and removes all hooks from model and optimizer even if that fails.

        Raises:
            PeerError: If another worker is lost. The last update has then been applied to some layers or to none.
        """
        if self._awaits_step:
            warnings.warn(
                "spardl: detach() was called between backward() and step(), so this step() will change no weights; "
                "call detach() after step().",
                stacklevel=3,
            )
            for parameter in self._averager.gradient.parameters:
                parameter.grad = None  # this worker's own gradient, which would make workers diverge
        try:
            self.settle()
        finally:
            for hook in self._hooks:
                hook.remove()
            self._engine.close()
