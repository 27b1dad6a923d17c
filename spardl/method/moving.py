"""An optimizer's own state, moved before compression: what each worker then does to its gradient.

Momentum after averaging takes what is late, a sum of many steps, for one gradient; moments that each worker keeps of
its own gradients see every step when it happens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from spardl.basics.checks import check_kind
from spardl.basics.errors import ConfigError
from spardl.compressors.budget import Budget
from spardl.method.method import Method
from spardl.method.momentum import AdamMomentum, AutoMomentum, Momentum, OptimizerMomentum, SgdMomentum
from spardl.method.residuals import ErrorFeedback

__all__ = ["Trained", "applied_twice", "check_moved", "coupled_decay", "definite", "rule_of", "trained_moments"]

_Group = Mapping[str, Any]


def _sgd(group: _Group) -> Momentum:
    return SgdMomentum(group["momentum"], nesterov=group["nesterov"])


def _adam(group: _Group) -> Momentum:
    return AdamMomentum(tuple(map(float, group["betas"])), group["eps"])


_RULES: Mapping[type[torch.optim.Optimizer], Callable[[_Group], Momentum]] = MappingProxyType(
    {torch.optim.SGD: _sgd, torch.optim.Adam: _adam, torch.optim.AdamW: _adam}
)
# What goes with sparse updates, measured in docs/tables/learning.md: the residual does the work of Adam's first moment,
# whose own inertia would come on top; an update that has waited for longer than some dozens of steps does more harm
# than good; and updates are of one size everywhere, so that a share of each chunk is better than the largest of all.
_DECAY = 0.98
# A memory of squares as long as Adam's own follows what is late too slowly. The longer of these two gains nothing
# without a share for each chunk.
_SQUARES, _SQUARES_OF_CHUNKS = 0.95, 0.99
# docs/tables/learning.md: as published, 1% can learn less than a single worker does.
_ANY_OPTIMIZER = (
    "a method that works with any optimizer: bf16 or int8; recipe=published works as well, but can end behind a single "
    "worker"
)
# Options under which the update is another one: what they must be.
_PLAIN: Mapping[str, Any] = MappingProxyType(
    {"dampening": 0, "amsgrad": False, "maximize": False, "differentiable": False}
)


def definite(method: Method, optimizer: torch.optim.Optimizer | None) -> Method:
    """A method whose momentum is known.

    Args:
        method: any.
        optimizer: that will use the averages, if it is known; otherwise ``momentum=auto`` leaves its state to it.

    Returns:
        The same; in place of ``momentum=auto``, what has proved best with such an optimizer: SGD's own momentum; of
        Adam's moments, the second one with a share of 0.99 at most where ``scope=auto`` becomes a share of each chunk,
        else 0.95, unless another was chosen, and a residual that decays by 0.98 in each step unless it has a decay
        already.

    Raises:
        ConfigError: if its state cannot be moved, or a share of squares was chosen, and it has none.
    """
    check_kind("optimizer", optimizer, torch.optim.Optimizer, optional=True)
    if not isinstance(method.momentum, AutoMomentum):
        return method
    rule = rule_of(optimizer) if optimizer else OptimizerMomentum()
    beta2 = method.momentum.beta2
    if not isinstance(rule, AdamMomentum):
        if beta2 is not None:
            reason = f"{type(optimizer).__name__} has none" if optimizer else "there is no optimizer="
            raise ConfigError(f"beta2={beta2} is the share of Adam's squares that is left, and {reason}; leave it out")
        if (scale := method.momentum.update_scale) != "none":
            reason = f"{type(optimizer).__name__} has none" if optimizer else "there is no optimizer="
            raise ConfigError(f"update_scale={scale} is for Adam's updates, and {reason}; leave it out")
        plain = isinstance(rule, SgdMomentum) and not rule.factor
        return replace(method, momentum=OptimizerMomentum() if plain else rule)
    residual = method.residual
    if isinstance(residual, ErrorFeedback) and residual.decay is None:
        residual = replace(residual, decay=_DECAY)
    compressor, most = method.compressor, _SQUARES
    if isinstance(compressor, Budget) and compressor.takes_chunks(compressor.scope, compressor.density):
        compressor, most = replace(compressor, scope="chunk"), _SQUARES_OF_CHUNKS
    squares = min(rule.betas[1], most) if beta2 is None else beta2
    rule = replace(rule, betas=(0.0, squares), update_scale=method.momentum.update_scale)
    return replace(method, compressor=compressor, momentum=rule, residual=residual)


def applied_twice(method: Method, optimizer: torch.optim.Optimizer) -> str | None:
    """Why an optimizer should have no momentum, if it has one and averages are running means already.

    Args:
        method: how gradients are averaged.
        optimizer: that applies the averages.

    Returns:
        The text of a warning; ``None`` if all is well.
    """
    groups = optimizer.param_groups
    factor = next(filter(None, (group.get("momentum") or group.get("betas", (0,))[0] for group in groups)), 0)
    if not method.compressor.smooths or method.momentum.moved or not factor:
        return None
    way = "betas=(0, ...), or use SGD with momentum=0"
    if "momentum" in groups[0]:
        way = f"momentum=0 and a learning rate {1 / (1 - factor):.2g} times as large"
    return (
        f"compressor={method.compressor.name} averages running means of gradients, and {type(optimizer).__name__} "
        f"applies its own momentum ({float(factor):g}) to them again; set its {way}"
    )


def check_moved(momentum: Momentum, optimizer: torch.optim.Optimizer) -> None:
    """Accepts an optimizer whose state a momentum takes the place of.

    Args:
        momentum: before compression, taken from an optimizer of that kind.
        optimizer: with parameter groups that differ at most in learning rate and weight decay.

    Raises:
        ConfigError: if it is of another kind, or its options mean something that is not moved.
    """
    own = rule_of(optimizer)
    if not isinstance(momentum, type(own)):
        raise ConfigError(
            f"momentum={momentum.name} is not what {type(optimizer).__name__} does; use momentum=auto, that of any "
            f"optimizer, here momentum={own.name}"
        )


def rule_of(optimizer: torch.optim.Optimizer) -> Momentum:
    """What an optimizer does to gradients before it applies them, as a momentum that workers can have.

    Args:
        optimizer: SGD, Adam or AdamW of torch.

    Raises:
        ConfigError: if it is another, or has options under which its update is another, or groups that differ.
    """
    make = _RULES.get(type(optimizer))
    if make is None:
        names = ", ".join(kind.__name__ for kind in _RULES)
        raise ConfigError(
            f"the state of {type(optimizer).__name__} cannot be moved before compression, only that of {names}; use "
            f"one of these, or {_ANY_OPTIMIZER}"
        )
    groups = optimizer.param_groups
    for name, plain in _PLAIN.items():
        if any(group.get(name, plain) != plain for group in groups):
            raise ConfigError(
                f"{type(optimizer).__name__}({name}={groups[0][name]}) cannot be moved before compression; use "
                f"{name}={plain}, or {_ANY_OPTIMIZER}"
            )
    rules = [make(group) for group in groups]
    if any(rule != rules[0] for rule in rules):
        raise ConfigError(
            "parameter groups may differ in learning rate and weight decay; these differ in momentum or betas: "
            f"make them equal, or use {_ANY_OPTIMIZER}"
        )
    return rules[0]


def coupled_decay(optimizer: torch.optim.Optimizer, group: _Group) -> float:
    """The multiple of its weights that an optimizer adds to a gradient before its moments see it.

    Args:
        optimizer: of a kind that can be moved.
        group: one of its parameter groups.

    Returns:
        The weight decay of SGD and Adam; 0 for AdamW, which shrinks weights in the update.
    """
    coupled = type(optimizer) is not torch.optim.AdamW and not group.get("decoupled_weight_decay", False)
    return float(group["weight_decay"]) if coupled else 0.0


class Trained(NamedTuple):
    """Moments of one parameter, converted from the state of a trained optimizer; empty tensors where it has none.

    Attributes:
        velocity: of the gradients, shape (n,).
        variance: of their squares, shape (n,).
    """

    velocity: Tensor
    variance: Tensor


def trained_moments(
    momentum: Momentum, group: _Group, state: Mapping[str, Any], like: Tensor, updates: int
) -> Trained | None:
    """Converts the state of a trained optimizer for one parameter into moments that a worker can continue with.

    A running mean with share ``b`` after ``t`` steps estimates ``mean / (1 - b**t)``. The worker may use another share,
    and has one step count for all parameters; the conversion keeps each estimate.

    Args:
        momentum: of the workers, taken from an optimizer of that kind.
        group: of the optimizer that has the parameter.
        state: of the optimizer for the parameter.
        like: the parameter, of any shape.
        updates: step count of the workers from here on.

    Returns:
        Moments, or ``None`` if the state lacks what Adam needs. SGD without a buffer begins with zeros as in torch.
    """
    empty = like.new_empty(0)
    if not isinstance(momentum, AdamMomentum):
        buffer = state.get("momentum_buffer")
        return Trained((torch.zeros_like(like) if buffer is None else buffer).reshape(-1), empty)
    if not {"step", "exp_avg", "exp_avg_sq"} <= state.keys():
        return None
    steps = int(state["step"])
    if not steps:
        return None
    first, second = (
        (1 - mine**updates) / (1 - theirs**steps) for mine, theirs in zip(momentum.betas, group["betas"], strict=True)
    )
    velocity = state["exp_avg"].reshape(-1) * first if momentum.betas[0] else empty
    return Trained(velocity, state["exp_avg_sq"].reshape(-1) * second)
