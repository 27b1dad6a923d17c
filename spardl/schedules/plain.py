"""An optimizer whose state was moved before compression: its step only applies what was averaged."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from spardl.basics.errors import ConfigError
from spardl.method.momentum import Momentum
from spardl.method.moving import Trained, check_moved, coupled_decay, rule_of, trained_moments
from spardl.schedules.carried import Carried

__all__ = ["PlainSteps", "Updater", "decay_of", "runs_closure", "unwrapped"]


# An optimizer's update of some of its parameters, later than it was ordered.


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


class PlainSteps:
    """Makes each step of an optimizer ``weights = (1 - lr * decay) * weights - lr * average``.

    Learning rate and decay are those of the parameter's group when the step is made, so schedulers go on working; decay
    is 0 where weight decay is a part of the gradient (SGD, Adam), and then goes through the moments as well.

    Args:
        optimizer: of a kind that can be moved. It keeps its state until ``take_over``.
        momentum: what takes the place of its state.
        check: is called with the parameters before a step, and may raise.

    Raises:
        ConfigError: if the momentum is no such optimizer's.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        momentum: Momentum,
        check: Callable[[list[nn.Parameter]], None] | None = None,
    ) -> None:
        check_moved(momentum, optimizer)
        self._optimizer, self._check, self._rule = optimizer, check, rule_of(optimizer)
        self._momentum = momentum
        self._averages: list[tuple[nn.Parameter, Tensor]] = []
        self._hooks = [
            optimizer.register_step_pre_hook(torch.compiler.disable(self._hide)),
            optimizer.register_step_post_hook(torch.compiler.disable(self._apply)),
        ]

    @classmethod
    def of(
        cls,
        momentum: Momentum,
        optimizer: torch.optim.Optimizer | None,
        check: Callable[[list[nn.Parameter]], None] | None = None,
    ) -> PlainSteps | None:
        """The same; ``None`` where the momentum, or the optimizer's lack, leaves an optimizer its state.

        Raises:
            ConfigError: if the momentum is no such optimizer's.
        """
        return cls(optimizer, momentum, check) if optimizer is not None and momentum.moved else None

    def _hide(
        self, optimizer: torch.optim.Optimizer, arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        arguments, options = _closed(arguments, options)
        if getattr(optimizer, "grad_scale", None) is not None:
            raise ConfigError("a fused optimizer takes off a scale by itself; make it without fused=True")
        if (rule := rule_of(optimizer)) != self._rule:
            raise ConfigError(
                f"the optimizer had {self._rule} when its state was moved, and now has {rule}; keep it as it is "
                "(OneCycleLR: cycle_momentum=False)"
            )
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        self._averages = [(each, each.grad) for each in parameters if each.grad is not None]
        if self._check:
            self._check([each for each, _ in self._averages])
        for parameter, _ in self._averages:
            parameter.grad = None
        return arguments, options

    @torch.no_grad()
    def _apply(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        averages = dict(self._averages)
        self._averages = []
        for group in optimizer.param_groups:
            rate = float(group["lr"])
            decay = float(group["weight_decay"]) - coupled_decay(optimizer, group)
            for parameter in group["params"]:
                if (average := averages.get(parameter)) is not None:
                    parameter.grad = average
                    if decay:
                        parameter.mul_(1 - rate * decay)
                    parameter.add_(average, alpha=-rate)

    def take_over(
        self, carried: Carried, names: Sequence[str], parameters: Sequence[nn.Parameter], scale: float, *, stale: bool
    ) -> None:
        """Moves state that the optimizer has to this worker's moments, and frees it; call between two steps.

        An optimizer has state if it was trained without averages, or loaded the checkpoint of such a training.

        Args:
            carried: moments of this worker.
            names: of the parameters, in the order of ``carried``.
            parameters: in the same order.
            scale: of gradients in the moments.
            stale: whether ``carried`` was loaded after the optimizer's state was saved; the state is only freed then.
        """
        if not self._optimizer.state:
            return
        groups = {each: group for group in self._optimizer.param_groups for each in group["params"]}
        states = [self._optimizer.state.get(parameter, {}) for parameter in parameters]
        if not stale and any(states):
            updates = max((int(state.get("step", 0)) for state in states), default=0)
            found = [
                trained_moments(self._momentum, groups[parameter], state, parameter, updates)
                for parameter, state in zip(parameters, states, strict=True)
            ]
            lacking = [name for name, moments in zip(names, found, strict=True) if moments is None]
            if lacking:
                self._warn_of(lacking, len(names))
            else:
                _copy([each for each in found if each is not None], carried, scale, updates)
        self._free()

    def _warn_of(self, lacking: Sequence[str], averaged: int) -> None:
        warnings.warn(
            f"spardl: {type(self._optimizer).__name__} has no trained moments for {len(lacking)} of the {averaged} "
            f"averaged parameters (first: {lacking[0]}), so those of the others are dropped and the moments before "
            "compression continue without them; expect larger updates for some dozens of steps, or restart the "
            "learning-rate warm-up",
            stacklevel=4,
        )

    def _free(self) -> None:
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                self._optimizer.state.pop(parameter, None)

    def close(self) -> None:
        """The optimizer's steps are its own again; state that was moved begins anew."""
        for hook in self._hooks:
            hook.remove()


def _closed(arguments: tuple[Any, ...], options: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Runs the closure that a step was called with, if any, because gradients must exist before they are hidden.

    Args:
        arguments: of the step, the optimizer first.
        options: of the step.

    Returns:
        The same arguments with a closure that only returns the loss.
    """
    closure = arguments[1] if len(arguments) > 1 else options.get("closure")
    if closure is None:
        return arguments, options
    with torch.enable_grad():
        loss = closure()
    return arguments[:1], {**options, "closure": lambda: loss}


@torch.no_grad()
def _copy(found: Sequence[Trained], carried: Carried, scale: float, updates: int) -> None:
    for number, moments in enumerate(found):
        _, velocity, variance = carried.of(number)
        velocity.copy_(moments.velocity * scale)
        variance.copy_(moments.variance)
    carried.count_updates(updates)
    carried.changed()


def decay_of(momentum: Momentum, optimizer: torch.optim.Optimizer | None) -> Callable[[nn.Parameter], float] | None:
    """Where an optimizer's state is moved: what tells the weight decay that goes through it.

    Args:
        momentum: before compression.
        optimizer: whose state that is.

    Returns:
        For a parameter, the multiple of its weights that is added to its gradient; ``None`` where nothing is moved.
    """
    if optimizer is None or not momentum.moved:
        return None
    groups: dict[nn.Parameter, dict[str, Any]] = {}
    read: list[dict[str, Any]] | None = None

    def decay(parameter: nn.Parameter) -> float:
        nonlocal read
        if parameter not in groups or read is not optimizer.param_groups:  # loading a state puts others in their place
            read = optimizer.param_groups
            groups.update({each: group for group in optimizer.param_groups for each in group["params"]})
        # What is frozen has no update, and its weights must not take part in a selection.
        known = parameter in groups and parameter.requires_grad
        return coupled_decay(optimizer, groups[parameter]) if known else 0.0

    return decay
