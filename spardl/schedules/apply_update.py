"""Optimizer steps: steps that update only some of the parameters, and steps that only apply averaged updates.

With momentum before compression, each worker computes the update of its optimizer itself (a local update). The
optimizer then only adds the averaged updates to the weights: ``ApplyUpdate`` changes its step.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from spardl.basics.errors import ConfigError
from spardl.method.momentum import Momentum
from spardl.method.moving import (
    ConvertedMoments,
    Optimizers,
    check_local_update,
    convert_moments,
    coupled_decay,
    muon_moments,
    optimizers_of,
    rule_of,
    step_size,
)
from spardl.method.muon import MuonMomentum
from spardl.schedules.gradient_state import GradientState
from spardl.vector.flat import local_part

__all__ = ["ApplyUpdate", "Updater", "decay_of", "runs_closure", "step_size_of", "take_over", "unwrap"]


# Delayed updates of some parameters.


def runs_closure(arguments: Sequence[Any], options: Mapping[str, Any]) -> bool:
    """Returns whether an optimizer step was called with a closure that is not ``None``.

    Args:
        arguments: Positional arguments of a step pre-hook, the optimizer first.
        options: Keyword arguments of the step.
    """
    return any(each is not None for each in (*arguments[1:], options.get("closure")))


def unwrap(optimizer: Any) -> Any:
    """Returns the torch optimizer inside Accelerate's wrapper; an unwrapped optimizer is returned unchanged."""
    return getattr(optimizer, "optimizer", optimizer)


class Updater:
    """Updates some of an optimizer's parameters, possibly later, with the settings of the step that they belong to.

    Args:
        optimizer: Optimizer of ``torch.optim``, or a compatible one, that updates each parameter independently.

    Attributes:
        applying: Whether ``apply`` is running, so that hooks of the optimizer can tell its steps from the user's.

    Raises:
        ConfigError: If the optimizer needs all parameters at once.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ConfigError(
                "optimizer=LBFGS needs all gradients at once, several times per step; use another optimizer"
            )
        self._optimizer = optimizer
        self._held: list[dict[str, Any]] = []
        self.applying = False

    def hold(self) -> None:
        """Saves the current learning rates and other settings, which the next ``apply`` uses even if they change."""
        self._held = [
            {key: value for key, value in group.items() if key != "params"} for group in self._optimizer.param_groups
        ]

    def apply(self, parameters: Iterable[nn.Parameter]) -> None:
        """Runs the optimizer's step on some ``parameters`` only, with the saved settings."""
        wanted = set(parameters)
        # A step updates all parameter groups, so restrict the groups during the step.
        self.applying = True
        groups = self._optimizer.param_groups
        before = [dict(group) for group in groups]
        try:
            # A group that was added after ``hold`` has no saved settings.
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


class ApplyUpdate:
    """Makes every ``optimizer.step()`` compute ``weights = (1 - lr * decay) * weights - lr * average``.

    Learning rate and decay come from the parameter group at the time of the step, so schedulers work as usual. For SGD
    and Adam, the decay here is 0: their weight decay is part of the gradient, and each worker applies it before
    compression. For Muon, the learning rate is adjusted to the shape of each matrix.

    Args:
        optimizer: Optimizer whose momentum a local update can replace. It keeps its state until ``free``.
        momentum: Local update (momentum before compression) that replaces the optimizer's state.
        check: Callback that receives the parameters before each step; it may raise an error.

    Raises:
        ConfigError: If the momentum does not match the optimizer.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        momentum: Momentum,
        check: Callable[[list[nn.Parameter]], None] | None = None,
    ) -> None:
        check_local_update(momentum, optimizer)
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
    ) -> ApplyUpdate | None:
        """Creates an object for this optimizer; returns ``None`` without one, or if it applies its own momentum.

        Args:
            momentum: Momentum rule of the method.
            optimizer: Optimizer of the training, if the caller passed one.
            check: Callback that receives the parameters before each step.

        Raises:
            ConfigError: If the momentum does not match the optimizer.
        """
        return cls(optimizer, momentum, check) if optimizer is not None and momentum.moved else None

    def _hide(
        self, optimizer: torch.optim.Optimizer, arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        arguments, options = _closed(arguments, options)
        # A GradScaler passes the scale to fused optimizers instead of unscaling the gradients.
        if getattr(optimizer, "grad_scale", None) is not None:
            raise ConfigError(
                "with fused=True the optimizer would unscale gradients itself, which this method does not support; "
                "create the optimizer without fused=True"
            )
        if (rule := rule_of(optimizer)) != self._rule:
            raise ConfigError(
                f"the optimizer's settings changed from {self._rule} to {rule} during training; keep them constant "
                "(OneCycleLR: cycle_momentum=False)"
            )
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        self._averages = [(each, each.grad) for each in parameters if each.grad is not None]
        if self._check:
            self._check([each for each, _ in self._averages])
        # The optimizer's own step then finds no gradients and changes nothing.
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
                    weights = local_part(parameter)
                    if decay:
                        weights.mul_(1 - rate * decay)
                    weights.add_(local_part(average), alpha=-step_size(optimizer, group, parameter))

    @property
    def trained(self) -> bool:
        """Whether the optimizer has state from earlier steps, or from a checkpoint without local updates."""
        return bool(self._optimizer.state)

    @property
    def has_matrices(self) -> bool:
        """Whether the optimizer is Muon, whose state for matrices has no step count."""
        return isinstance(self._rule, MuonMomentum)

    @property
    def kind(self) -> str:
        """Name of the optimizer's class."""
        return type(self._optimizer).__name__

    def steps(self, parameters: Iterable[nn.Parameter]) -> int:
        """Returns the largest step count in the optimizer's state of ``parameters``; 0 without any state."""
        # Some of the parameters may belong to other optimizers.
        return max((int(self._optimizer.state.get(each, {}).get("step", 0)) for each in parameters), default=0)

    def convert(self, parameters: Sequence[nn.Parameter], steps: int) -> dict[int, ConvertedMoments | None]:
        """Converts the optimizer's state to moments of this worker.

        Args:
            parameters: All averaged parameters, in the order of the moments.
            steps: Step count that the moments continue from, equal for all optimizers.

        Returns:
            Moments of the optimizer's own parameters, by index in ``parameters``; ``None`` where its state lacks
            values. Empty if the optimizer has no state and needs none.
        """
        groups = {each: group for group in self._optimizer.param_groups for each in group["params"]}
        own = {number: each for number, each in enumerate(parameters) if each in groups}
        states = {number: _local_state(self._optimizer.state.get(each, {})) for number, each in own.items()}
        if not any(states.values()) and (self.has_matrices or not steps):
            return {}
        if self.has_matrices:
            return {number: muon_moments(states[number], each) for number, each in own.items()}
        return {
            number: convert_moments(self._momentum, groups[each], states[number], local_part(each), steps)
            for number, each in own.items()
        }

    def free(self) -> None:
        """Deletes the optimizer's state, which is no longer updated, because its step sees no gradients."""
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                self._optimizer.state.pop(parameter, None)

    def close(self) -> None:
        """Removes the hooks; the optimizer continues with its own step, from an empty state."""
        for hook in self._hooks:
            hook.remove()


def _local_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns an optimizer's state of a parameter, with this process's part of each tensor."""
    return {name: local_part(value) if isinstance(value, Tensor) else value for name, value in state.items()}


def _closed(arguments: tuple[Any, ...], options: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Runs the closure of a step, if any, because gradients must exist before they are hidden.

    Args:
        arguments: Positional arguments of the step, the optimizer first.
        options: Keyword arguments of the step.

    Returns:
        The same arguments with a closure that only returns the loss.
    """
    closure = arguments[1] if len(arguments) > 1 else options.get("closure")
    if closure is None:
        return arguments, options
    with torch.enable_grad():
        loss = closure()
    return arguments[:1], {**options, "closure": lambda: loss}


def take_over(
    optimizers: Sequence[ApplyUpdate],
    carried: GradientState,
    names: Sequence[str],
    parameters: Sequence[nn.Parameter],
    scale: float,
    *,
    stale: bool,
) -> None:
    """Converts the state of optimizers to this worker's moments, then deletes that state; call this between steps.

    Args:
        optimizers: Optimizers of different parameters.
        carried: Residuals and moments of this worker, which receive the state.
        names: Names of the parameters, in the order of ``carried``.
        parameters: Parameters in the same order.
        scale: Loss scale of the gradients; the converted moments are multiplied by it.
        stale: Whether the optimizers' states are older than a loaded ``carried``; they are then deleted, not converted.
    """
    if not any(each.trained for each in optimizers):
        return
    if not stale:
        # ``carried`` has one step count for all optimizers.
        steps = max(each.steps(parameters) for each in optimizers)
        found: dict[int, ConvertedMoments | None] = {}
        for each in optimizers:
            moments = each.convert(parameters, steps)
            if each.has_matrices:
                _copy(moments, carried, scale)
            else:
                found |= moments
        lacking = [number for number, moments in found.items() if moments is None]
        if lacking:
            kinds = " and ".join(dict.fromkeys(each.kind for each in optimizers if not each.has_matrices))
            _warn_of(kinds, [names[number] for number in lacking], len(found))
        elif found:
            _copy(found, carried, scale)
            carried.count_updates(steps)
    for each in optimizers:
        each.free()


def _warn_of(kinds: str, lacking: Sequence[str], averaged: int) -> None:
    warnings.warn(
        f"spardl: {kinds} has no moments for {len(lacking)} of the {averaged} averaged parameters (first: "
        f"{lacking[0]}), so training continues without any moments of earlier steps; expect larger updates for some "
        "dozens of steps, or restart the learning-rate warm-up",
        stacklevel=4,
    )


@torch.no_grad()
def _copy(found: Mapping[int, ConvertedMoments | None], carried: GradientState, scale: float) -> None:
    for number, moments in found.items():
        assert moments is not None
        _, velocity, variance = carried.of(number)
        velocity.copy_(moments.velocity * scale)
        variance.copy_(moments.variance)
    carried.changed()


def decay_of(momentum: Momentum, optimizer: Optimizers) -> Callable[[nn.Parameter], float] | None:
    """Returns the weight decay that each worker adds to its gradients before compression.

    Args:
        momentum: Momentum rule of the method.
        optimizer: Optimizer that defines the weight decay, or several optimizers of different parameters.

    Returns:
        A function that returns, for a parameter, the multiple of its weights to add to its gradient; ``None`` if the
        optimizer applies momentum and weight decay itself.
    """
    return _setting_of(momentum, optimizer, lambda own, group, _: coupled_decay(own, group))


def step_size_of(momentum: Momentum, optimizer: Optimizers) -> Callable[[nn.Parameter], float] | None:
    """Returns the learning rate with which the optimizer will subtract averaged updates from the weights.

    Args:
        momentum: Momentum rule of the method.
        optimizer: Optimizer that defines the learning rate, or several optimizers of different parameters.

    Returns:
        A function that returns the current learning rate of a parameter, and 0 for a frozen one; ``None`` if the
        optimizer applies momentum itself.
    """
    return _setting_of(momentum, optimizer, step_size)


def _setting_of(
    momentum: Momentum,
    optimizer: Optimizers,
    read_setting: Callable[[torch.optim.Optimizer, Mapping[str, Any], nn.Parameter], float],
) -> Callable[[nn.Parameter], float] | None:
    """Returns a function that reads a setting of a parameter's group; ``None`` if averages are not local updates."""
    optimizers = optimizers_of(optimizer)
    if not optimizers or not momentum.moved:
        return None
    owners: dict[nn.Parameter, tuple[torch.optim.Optimizer, dict[str, Any]]] = {}
    read: list[list[dict[str, Any]]] = []

    def setting(parameter: nn.Parameter) -> float:
        # load_state_dict replaces the list of groups.
        now = [each.param_groups for each in optimizers]
        if parameter not in owners or len(read) != len(now) or any(a is not b for a, b in zip(read, now, strict=True)):
            read[:] = now
            for each in optimizers:
                owners.update({own: (each, group) for group in each.param_groups for own in group["params"]})
        # A frozen parameter has no update, and its weights must not enter the selection.
        known = parameter in owners and parameter.requires_grad
        return read_setting(*owners[parameter], parameter) if known else 0.0

    return setting
