"""Local updates: each worker applies the momentum of an optimizer to its own gradients, before compression.

If the optimizer applied momentum to averages instead, it would treat a delayed entry, the sum of many steps, as a
single gradient. A worker's own momentum uses the gradient of each step in that step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from spardl.basics.errors import ConfigError
from spardl.compressors.base import CodeCompressor
from spardl.compressors.budget import Budget
from spardl.method.method import Method
from spardl.method.momentum import AdamMomentum, AutoMomentum, Momentum, OptimizerMomentum, SgdMomentum
from spardl.method.muon import MuonMomentum, entry_size
from spardl.method.residuals import ErrorFeedback

__all__ = [
    "ConvertedMoments",
    "Optimizers",
    "check_local_update",
    "convert_moments",
    "coupled_decay",
    "double_momentum_warning",
    "joint_rule",
    "low_density_warning",
    "matrices_of",
    "muon_moments",
    "optimizers_of",
    "resolve_momentum",
    "rule_of",
    "step_size",
    "trained_by",
]

_Group = Mapping[str, Any]
Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None
"""Argument ``optimizer=``: an optimizer, several optimizers of different parameters, or ``None``."""
# torch.optim.Muon exists since torch 2.9.
_MUON: type[torch.optim.Optimizer] | None = getattr(torch.optim, "Muon", None)


def _sgd(group: _Group) -> Momentum:
    return SgdMomentum(group["momentum"], nesterov=group["nesterov"])


def _adam(group: _Group) -> Momentum:
    return AdamMomentum(tuple(map(float, group["betas"])), group["eps"])


def _muon(group: _Group) -> Momentum:
    # torch checks shapes in the constructor only, not in add_param_group().
    if (other := next((each for each in group["params"] if each.ndim != 2), None)) is not None:
        raise ConfigError(
            f"Muon has a parameter of shape {tuple(other.shape)}, but updates matrices only; give it to another "
            "optimizer (optimizer=[muon, adamw])"
        )
    if (ratio := group["adjust_lr_fn"]) not in _MUON_RATIOS:
        raise ConfigError(
            f"Muon(adjust_lr_fn={ratio!r}) is unknown; use one of {', '.join(filter(None, _MUON_RATIOS))}"
        )
    return MuonMomentum(
        factor=float(group["momentum"]),
        nesterov=group["nesterov"],
        coefficients=group["ns_coefficients"],
        steps=group["ns_steps"],
        least_norm=group["eps"],
    )


_RULES: Mapping[type[torch.optim.Optimizer], Callable[[_Group], Momentum]] = MappingProxyType(
    {
        torch.optim.SGD: _sgd,
        torch.optim.Adam: _adam,
        torch.optim.AdamW: _adam,
        **({_MUON: _muon} if _MUON is not None else {}),
    }
)
# Ratio of the rate that torch.optim.Muon applies to its learning rate, for a matrix with a rows and b columns.
_MUON_RATIOS: Mapping[str | None, Callable[[int, int], float]] = MappingProxyType(
    {
        None: lambda rows, columns: math.sqrt(max(1.0, rows / columns)),
        "original": lambda rows, columns: math.sqrt(max(1.0, rows / columns)),
        "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
        "spectral_unclamped": lambda rows, columns: math.sqrt(rows / columns),
    }
)
# Best options with sparse updates, as measured in docs/tables/learning.md. The residual takes the role of Adam's first
# moment, which would delay updates further. Updates that are delayed by more than some dozens of steps do more harm
# than good, hence a decay. Updates have similar sizes in all layers, so it is better to send a share of each chunk than
# the largest entries of the whole vector.
_RESIDUAL_DECAY = 0.98
# Adam's default running mean of squared gradients adapts too slowly to delayed updates. The longer of these two means
# has an advantage only if a share of each chunk is sent.
_BETA2, _BETA2_CHUNKED = 0.95, 0.99
# Momentum factor of SGD's updates, and the largest density at which it is used, as measured in
# docs/choosing-a-method.md. The residual takes over a part of the role of momentum, which would add to its delay.
_SHORT_FACTOR, _SHORT_DENSITY = 0.5, 0.1
# Density of Muon's updates below which training gains little from several workers.
_MUON_DENSITY = 0.05
# As published, methods with density 1% can learn less than a single worker (docs/tables/learning.md).
_ANY_OPTIMIZER = (
    "the method bf16 or int8, which work with any optimizer (so does recipe=published, but it can learn less than a "
    "single worker)"
)
# Options that change the update, and the values at which they do not.
_REQUIRED_OPTIONS: Mapping[str, Any] = MappingProxyType(
    {"dampening": 0, "amsgrad": False, "maximize": False, "differentiable": False}
)


def optimizers_of(optimizer: Optimizers) -> tuple[torch.optim.Optimizer, ...]:
    """Returns the optimizers in an argument ``optimizer=`` as a tuple.

    Args:
        optimizer: An optimizer, a list or tuple of several, or ``None``.

    Raises:
        ConfigError: If it is something else, or contains an optimizer twice.
    """
    if optimizer is None:
        return ()
    found = tuple(optimizer) if isinstance(optimizer, list | tuple) else (optimizer,)
    for each in found:
        if not isinstance(each, torch.optim.Optimizer):
            raise ConfigError(f"optimizer must be a torch.optim.Optimizer, or a list of several, got {each!r}")
    if not found or len({id(each) for each in found}) < len(found):
        raise ConfigError(
            "optimizer is an empty list; pass the optimizers of the model"
            if not found
            else "optimizer contains the same optimizer twice; pass each one once"
        )
    return found


def resolve_momentum(method: Method, optimizer: Optimizers, *, for_handle: bool = False) -> Method:
    """Replaces ``momentum=auto`` by the local update that works best with an optimizer.

    Args:
        method: Method; returned unchanged unless its momentum is ``auto``.
        optimizer: Optimizer that applies the averages, or several optimizers of different parameters; without one,
            ``momentum=auto`` becomes ``momentum=optimizer``.
        for_handle: Whether to use the defaults of handles (``attach`` and others), which keep the learning rate of
            dense training suitable. For SGD, if ``TopK`` sends at most 10% of the entries and the method has a
            residual, the momentum factor then becomes at most 0.5 and updates are multiplied by a gain, unless
            ``factor`` is set. Updates of Adam and Muon are multiplied by the measured factor, unless ``update_scale``
            is set. The trainer passes false, so that earlier runs stay reproducible.

    Returns:
        The method with the resolved momentum. For SGD, each worker applies SGD's momentum, or a smaller factor with a
        gain. For Adam, each worker keeps only the second moment: with the optimizer's beta2, but at most 0.99 if
        ``scope=auto`` means chunks or Muon's updates are sent as codes, and at most 0.95 otherwise, unless ``beta2`` is
        set. The residual is multiplied by 0.98 in each step, unless its decay is set or the compressor compares changes
        with weights. For Muon, each worker applies all of Muon to its matrices; scope and residual decay are those for
        Adam. If Muon's updates are sent as codes, AdamW keeps its first moment.

    Raises:
        ConfigError: If the optimizer's momentum cannot be applied before compression, or options of Adam or SGD are
            set for another optimizer.
    """
    optimizers = optimizers_of(optimizer)
    if not isinstance(method.momentum, AutoMomentum):
        return method
    rule = joint_rule(optimizers) if optimizers else OptimizerMomentum()
    beta2, kinds = method.momentum.beta2, _kinds(optimizers)
    if beta2 is not None and optimizers and all(type(each) is _MUON for each in optimizers):
        raise ConfigError(f"beta2={beta2} has no effect with Muon, because only Adam and AdamW use it; remove it")
    if not isinstance(rule, AdamMomentum):
        without = f"with {kinds}" if optimizers else "without optimizer="
        if beta2 is not None:
            raise ConfigError(f"beta2={beta2} has no effect {without}, because only Adam and AdamW use it; remove it")
        if (scale := method.momentum.update_scale) not in (None, "none"):
            raise ConfigError(
                f"update_scale={scale} has no effect {without}, because only Adam, AdamW and Muon use it; remove it"
            )
        return replace(method, momentum=_resolve_sgd(method, rule, method.momentum.factor, for_handle=for_handle))
    if (factor := method.momentum.factor) is not None:
        raise ConfigError(f"momentum_factor={factor} has no effect with {kinds}, because only SGD uses it; remove it")
    residual, compressor, limit = method.residual, method.compressor, _BETA2
    # Codes send all entries without delay, so no residual takes the role of the first moment. (This was not tried with
    # other optimizers.)
    sends_all = isinstance(rule, MuonMomentum) and isinstance(compressor, CodeCompressor)
    # No decay with ``needs_weights``: a change may need hundreds of steps until it is visible in bfloat16.
    if isinstance(residual, ErrorFeedback) and residual.decay is None and not compressor.needs_weights:
        residual = replace(residual, decay=_RESIDUAL_DECAY)
    if isinstance(compressor, Budget) and compressor.takes_chunks(compressor.scope, compressor.density):
        compressor, limit = replace(compressor, scope="chunk"), _BETA2_CHUNKED
    if sends_all:
        limit = _BETA2_CHUNKED
    squares = min(rule.betas[1], limit) if beta2 is None else beta2
    default = "measured" if for_handle else "none"
    betas = (rule.betas[0] if sends_all else 0.0, squares)
    rule = replace(rule, betas=betas, update_scale=method.momentum.update_scale or default)
    return replace(method, compressor=compressor, momentum=rule, residual=residual)


def _resolve_sgd(method: Method, rule: Momentum, factor: float | None, *, for_handle: bool) -> Momentum:
    """Returns the momentum to use in place of ``rule``, for SGD or without an optimizer."""
    if not isinstance(rule, SgdMomentum):
        if factor is not None:
            raise ConfigError(f"momentum_factor={factor} has no effect without optimizer=; pass SGD, or remove it")
        return rule
    compressor = method.compressor
    waits = isinstance(compressor, Budget) and compressor.chunks_updates and compressor.density <= _SHORT_DENSITY
    if factor is None and for_handle and waits and method.residual.remembers:
        factor = min(_SHORT_FACTOR, rule.factor)
    if factor is not None:
        rule = SgdMomentum.shortened(rule, factor)
    return rule if rule.factor or rule.gain != 1 else OptimizerMomentum()


def _kinds(optimizers: Sequence[torch.optim.Optimizer]) -> str:
    return " and ".join(type(each).__name__ for each in optimizers)


def double_momentum_warning(method: Method, optimizer: torch.optim.Optimizer) -> str | None:
    """Returns a warning if momentum is applied twice: by a compressor that averages running means, and the optimizer.

    Args:
        method: Method that averages gradients.
        optimizer: Optimizer that applies the averages.

    Returns:
        The text of a warning; ``None`` if momentum is applied once.
    """
    groups = optimizer.param_groups
    factor = next(filter(None, (group.get("momentum") or group.get("betas", (0,))[0] for group in groups)), 0)
    if not method.compressor.smooths or method.momentum.moved or not factor:
        return None
    way = "betas=(0, ...), or use SGD with momentum=0"
    if "ns_steps" in groups[0]:  # Muon, whose updates have the same size with any momentum
        way = "momentum=0, and betas=(0, ...) for other parameters, or use SGD with momentum=0"
    elif "momentum" in groups[0]:
        way = f"momentum=0 and a learning rate {1 / (1 - factor):.2g} times as large"
    return (
        f"compressor={method.compressor.name} averages running means of gradients, and {type(optimizer).__name__} "
        f"applies its own momentum ({float(factor):g}) to them again; set its {way}"
    )


def low_density_warning(method: Method) -> str | None:
    """Returns a warning if a method that compresses Muon's updates sends too few of their entries.

    Args:
        method: Method with a resolved momentum.

    Returns:
        The text of a warning; ``None`` if the method sends enough.
    """
    compressor = method.compressor
    if not isinstance(method.momentum, MuonMomentum) or not isinstance(compressor, Budget):
        return None
    if compressor.density >= _MUON_DENSITY:
        return None
    return (
        f"density={compressor.density:g} is low for Muon, whose updates have entries of similar sizes: training may "
        'learn little more than a single worker; use the method "onebit", or density=0.1 with wire="int4"'
    )


def check_local_update(momentum: Momentum, optimizer: torch.optim.Optimizer) -> None:
    """Checks that a local update matches the optimizer whose momentum it is to replace.

    Args:
        momentum: Local update of the method.
        optimizer: Optimizer whose parameter groups differ at most in learning rate and weight decay.

    Raises:
        ConfigError: If the optimizer is of another kind, or has unsupported options.
    """
    own = rule_of(optimizer)
    if not isinstance(momentum, type(own)):
        raise ConfigError(
            f"momentum={momentum.name} does not match {type(optimizer).__name__}; use momentum=auto, which matches any "
            f"optimizer (here momentum={own.name})"
        )


def rule_of(optimizer: torch.optim.Optimizer) -> Momentum:
    """Returns the local update for an optimizer: the rule with which workers compute its updates themselves.

    Args:
        optimizer: SGD, Adam, AdamW or Muon of torch.

    Raises:
        ConfigError: If the optimizer is of another kind, has unsupported options, or has groups that differ in them.
    """
    make = _RULES.get(type(optimizer))
    if make is None:
        names = ", ".join(kind.__name__ for kind in _RULES)
        raise ConfigError(
            f"this method compresses updates and supports the optimizers {names}, not {type(optimizer).__name__}; use "
            f"one of these, or {_ANY_OPTIMIZER}"
        )
    groups = optimizer.param_groups
    for name, required in _REQUIRED_OPTIONS.items():
        if any(group.get(name, required) != required for group in groups):
            raise ConfigError(
                f"this method compresses updates and does not support {type(optimizer).__name__}"
                f"({name}={groups[0][name]}); use {name}={required}, or {_ANY_OPTIMIZER}"
            )
    rules = [make(group) for group in groups]
    if any(rule != rules[0] for rule in rules):
        raise ConfigError(
            "this method compresses updates, so parameter groups may differ in learning rate and weight decay, but not "
            f"in momentum, betas or eps; make these equal, or use {_ANY_OPTIMIZER}"
        )
    return rules[0]


def joint_rule(optimizers: Sequence[torch.optim.Optimizer]) -> Momentum:
    """Returns one local update for several optimizers of different parameters.

    Args:
        optimizers: At least one optimizer: any number of one kind, or Muon and Adam or AdamW.

    Raises:
        ConfigError: If ``rule_of`` rejects an optimizer, or the optimizers cannot be combined.
    """
    rules = [rule_of(each) for each in optimizers]
    matrices = [rule for rule in rules if isinstance(rule, MuonMomentum)]
    others = [rule for rule in rules if not isinstance(rule, MuonMomentum)]
    if any(rule != own[0] for own in (matrices, others) for rule in own):
        raise ConfigError(
            f"this method compresses updates, so the optimizers ({_kinds(optimizers)}) may differ in learning rate and "
            f"weight decay, but not in momentum, betas or eps; make these equal, or use {_ANY_OPTIMIZER}"
        )
    if not matrices or not others:
        return rules[0]
    if not isinstance(others[0], AdamMomentum):
        raise ConfigError(
            f"this method compresses updates and supports Muon with AdamW or Adam, not {_kinds(optimizers)}; use one "
            f"of these, or {_ANY_OPTIMIZER}"
        )
    return replace(matrices[0], betas=others[0].betas, eps=others[0].eps)


def trained_by(optimizers: Iterable[torch.optim.Optimizer]) -> dict[nn.Parameter, torch.optim.Optimizer]:
    """Returns the optimizer of each parameter; the last one if several of the ``optimizers`` contain it."""
    return {each: own for own in optimizers for group in own.param_groups for each in group["params"]}


def matrices_of(optimizers: Iterable[torch.optim.Optimizer]) -> frozenset[nn.Parameter]:
    """Returns the parameters of shape (a, b) that a Muon optimizer among the ``optimizers`` updates."""
    return frozenset(each for each, own in trained_by(optimizers).items() if type(own) is _MUON)


def step_size(optimizer: torch.optim.Optimizer, group: _Group, parameter: Tensor) -> float:
    """Returns the learning rate that ``optimizer.step()`` applies to an averaged update.

    Args:
        optimizer: Optimizer whose momentum a local update replaces.
        group: Parameter group of the optimizer.
        parameter: Parameter of the group, of any shape.

    Returns:
        The learning rate. For Muon it depends on the parameter's shape, and is meant for updates whose entries have a
        root mean square of 1.
    """
    rate = float(group["lr"])
    if type(optimizer) is not _MUON or not parameter.numel():
        return rate
    return rate * _MUON_RATIOS[group["adjust_lr_fn"]](*parameter.shape) * entry_size(*parameter.shape)


def coupled_decay(optimizer: torch.optim.Optimizer, group: _Group) -> float:
    """Returns the multiple of the weights that an optimizer adds to a gradient before it updates its moments.

    Args:
        optimizer: Optimizer whose momentum a local update replaces.
        group: Parameter group of the optimizer.

    Returns:
        The weight decay of SGD and Adam; 0 for AdamW and Muon, which apply it directly to the weights.
    """
    decoupled = type(optimizer) in (torch.optim.AdamW, _MUON)
    coupled = not decoupled and not group.get("decoupled_weight_decay", False)
    return float(group["weight_decay"]) if coupled else 0.0


class ConvertedMoments(NamedTuple):
    """Moments of one parameter, converted from the state of an optimizer.

    Missing moments are empty, or a single zero, which stands for a velocity of any length.

    Attributes:
        velocity: Running mean of the gradients, shape (n,).
        variance: Running mean of the squared gradients or, for a matrix of Muon, of the gradients; shape (n,).
    """

    velocity: Tensor
    variance: Tensor


def muon_moments(state: Mapping[str, Any], like: Tensor) -> ConvertedMoments:
    """Converts the state of Muon for one parameter into moments of a worker; zeros, as in torch, if it is empty.

    Args:
        state: State of Muon for one parameter.
        like: Parameter of shape (a, b).
    """
    mean = state.get("momentum_buffer")
    return ConvertedMoments(like.new_zeros(1), (torch.zeros_like(like) if mean is None else mean).reshape(-1))


def convert_moments(
    momentum: Momentum, group: _Group, state: Mapping[str, Any], like: Tensor, updates: int
) -> ConvertedMoments | None:
    """Converts the state of an optimizer for one parameter into moments of a worker, to continue training.

    A running mean ``m`` with decay rate ``b`` estimates, after ``t`` steps, a mean of ``m / (1 - b**t)``. The worker
    may use another decay rate, and has one step count for all parameters, so the moments are scaled to keep each
    estimate.

    Args:
        momentum: Local update of the workers, for this kind of optimizer.
        group: Parameter group that contains the parameter.
        state: State of the optimizer for the parameter.
        like: The parameter, of any shape.
        updates: Step count that the workers continue from.

    Returns:
        The moments; ``None`` if the state lacks values that Adam needs. SGD without a momentum buffer starts with
        zeros, as in torch.
    """
    empty = like.new_empty(0)
    if not isinstance(momentum, AdamMomentum):
        buffer = state.get("momentum_buffer")
        velocity = (torch.zeros_like(like) if buffer is None else buffer).reshape(-1)
        # Both velocities estimate the mean gradient / (1 - factor).
        return ConvertedMoments(velocity / momentum.gain if isinstance(momentum, SgdMomentum) else velocity, empty)
    if not {"step", "exp_avg", "exp_avg_sq"} <= state.keys():
        return None
    steps = int(state["step"])
    if not steps:
        return None
    first, second = (
        (1 - mine**updates) / (1 - theirs**steps) for mine, theirs in zip(momentum.betas, group["betas"], strict=True)
    )
    # A single zero is a velocity of any length.
    velocity = state["exp_avg"].reshape(-1) * first if momentum.betas[0] else like.new_zeros(1)
    return ConvertedMoments(velocity, state["exp_avg_sq"].reshape(-1) * second)
