"""Which method a handle averages with, and which schedule it runs: chosen by name, or given."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler

from spardl.basics.checks import is_a, is_finite
from spardl.basics.errors import ConfigError
from spardl.hooks.averager import Named
from spardl.method.method import Method
from spardl.method.moving import applied_twice
from spardl.method.recipes import Recipe, find_recipe, make_method
from spardl.schedules import Dear, LayerFusion, MgWfbp, Schedule, Wfbp

__all__ = [
    "check_covered",
    "check_known",
    "check_update",
    "choose_method",
    "choose_schedule",
    "options_of",
    "update_of",
]

_KINDS: tuple[type[Schedule], ...] = (Wfbp, MgWfbp, LayerFusion, Dear)
# What a limit on the size of groups is called, where there is one.
_LIMITS: tuple[tuple[type[Schedule], str], ...] = ((Wfbp, "bucket_mb"), (Dear, "threshold_mb"))


def choose_method(method: str | Method, options: Mapping[str, Any], schedule: str | Schedule | None = None) -> Method:
    """The method that a handle was asked for.

    Training in a loop that is not ours is compared with no simulation. So where a method's sums may be added up in any
    order, they are the backend's, which is the fastest, unless options name another communicator.

    Args:
        method: its name, or itself.
        options: of its parts.
        schedule: of the handle, if it has one; one that needs sums in two halves gets the method's own.

    Raises:
        ConfigError: if there is none of that name, or an option is unknown or of no use.
    """
    halves = isinstance(schedule, Dear) or schedule == Dear.name
    if isinstance(method, Method) or halves or "communicator" in options:
        return make_method(method, **options)
    recipe = find_recipe(method)
    faster = recipe.faster if isinstance(recipe, Recipe) else None
    return make_method(method, **options, **({"communicator": faster} if faster else {}))


def choose_schedule(schedule: str | Schedule, bucket_mb: float | None) -> Schedule:
    """The schedule that a handle was asked for.

    Args:
        schedule: its name, or itself.
        bucket_mb: most megabytes of gradients in a group, where a schedule has such a limit; ``None`` for its own.

    Raises:
        ConfigError: if there is none of that name, or it has no such limit, or does not send beside the computation.
    """
    if bucket_mb is not None and (not is_a(float, bucket_mb) or not bucket_mb > 0):
        raise ConfigError(f"bucket_mb must be above 0, got {bucket_mb!r}")
    if isinstance(schedule, str):
        kind = {each.name: each for each in _KINDS}.get(schedule)
        if kind is None:
            raise ConfigError(f"there is no schedule {schedule!r} for this handle; use one of {_names()}")
        return _limited(kind, bucket_mb)
    if bucket_mb is not None:
        raise ConfigError("bucket_mb is for schedules that are given by name; set it in the schedule itself")
    if not isinstance(schedule, _KINDS):
        raise ConfigError(f"schedule must be one of {_names()}, or a schedule of that kind, got {schedule!r}")
    return schedule


def _limited(kind: type[Schedule], bucket_mb: float | None) -> Schedule:
    if bucket_mb is None:
        return kind()
    name = next((name for each, name in _LIMITS if each is kind), None)
    if name is None:
        raise ConfigError(f"schedule={kind.name} chooses the sizes of groups itself; leave bucket_mb out")
    return kind(**{name: bucket_mb})


def check_update(
    schedule: Schedule,
    method: Method,
    optimizer: torch.optim.Optimizer | None,
    clip_norm: float | None,
    scaler: GradScaler | None,
) -> None:
    """Accepts what a handle needs to know of the update, and nothing of no use.

    Args:
        schedule: of a handle.
        method: likewise.
        optimizer: that it was given.
        clip_norm: largest norm of a gradient.
        scaler: of the loss.

    Raises:
        ConfigError: if something is missing, is of no use, contradicts the method, or is none.
    """
    if scaler is not None and scaler.is_enabled() and method.compressor.absolute:
        raise ConfigError(
            f"compressor={method.compressor.name} compares gradients with a fixed number, and a GradScaler multiplies "
            'them by what changes; train without one (in bfloat16), or use "topka"'
        )
    if optimizer is None:
        _check_without(schedule, method)
    else:
        _check_once(method, optimizer)
        if doubt := applied_twice(method, optimizer):
            warnings.warn(f"spardl: {doubt}.", stacklevel=4)
    if clip_norm is None:
        return
    if not (is_finite(clip_norm) and clip_norm > 0):
        raise ConfigError(f"clip_norm must be a number above 0, or None, got {clip_norm!r}")
    if optimizer is None:
        raise ConfigError(
            f"clip_norm={clip_norm} needs optimizer= (SGD, Adam or AdamW of torch.optim): with it each worker's own "
            "gradient is clipped before compression; without it call clip_grad_norm_() between backward() and step()"
        )
    if not isinstance(schedule, Dear) and not method.momentum.moved:
        raise ConfigError(
            f"clip_norm is for schedule=dear, or a momentum that is moved before compression; with schedule="
            f"{schedule.name} and momentum={method.momentum.name} your loop clips: leave it out"
        )


def check_covered(
    schedule: Schedule, method: Method, optimizer: torch.optim.Optimizer | None, averaged: Sequence[Named]
) -> None:
    """Accepts an optimizer of just what is averaged, where its step applies averages, and gradients are no longer any.

    Args:
        schedule: of a handle.
        method: likewise.
        optimizer: that it was given.
        averaged: the parameters that the handle averages.

    Raises:
        ConfigError: if one of the two has others.
    """
    if optimizer is None or not (method.momentum.moved or isinstance(schedule, Dear)):
        return
    trained = [each for group in optimizer.param_groups for each in group["params"] if each.requires_grad]
    if method.momentum.moved:
        check_known(trained, {pair.parameter for pair in averaged})
    own = set(trained)
    others = [pair.name for pair in averaged if pair.parameter not in own]
    if others:
        raise ConfigError(
            f"{len(others)} of the {len(averaged)} parameters that this handle averages are none of the optimizer's "
            f"({others[0]}), and would have no gradients for another one; give it all of them, or set "
            "requires_grad_(False) before the model is wrapped for those that are not to be trained"
        )


def check_known(parameters: Sequence[nn.Parameter], averaged: Container[nn.Parameter]) -> None:
    """Accepts parameters that an optimizer is to update with averages.

    Args:
        parameters: of the optimizer.
        averaged: those that there are averages of.

    Raises:
        ConfigError: if there are others.
    """
    if others := sum(each not in averaged for each in parameters):
        raise ConfigError(
            f"{others} of the optimizer's {len(parameters)} parameters are none that this handle averages, and its "
            "step would no longer train them; give them an optimizer of their own; layers of this model that were "
            "unfrozen need a new handle, made after requires_grad_(True)"
        )


def _check_once(method: Method, optimizer: torch.optim.Optimizer) -> None:
    momentum = method.momentum
    has_own = any(group.get("momentum") or "betas" in group for group in optimizer.param_groups)
    if momentum.remembers and not momentum.moved and has_own:
        raise ConfigError(
            f"momentum={momentum.name} is what each worker applies, and {type(optimizer).__name__} would apply its own "
            "to that again; give it torch.optim.SGD with momentum=0"
        )


def _check_without(schedule: Schedule, method: Method) -> None:
    if isinstance(schedule, Dear):
        raise ConfigError(
            "schedule=dear takes over the optimizer's step; give attach() a torch.optim.Optimizer, optimizer=..."
        )
    if method.momentum.moved:
        raise ConfigError(
            f"momentum={method.momentum.name} is what the optimizer would do after averaging; give attach() the "
            "optimizer, optimizer=..., whose steps then only apply averages"
        )


def options_of(schedule: Schedule) -> dict[str, Any]:
    """A schedule's name and options, which all workers must be given the same."""
    options = {field.name: getattr(schedule, field.name) for field in fields(schedule)}  # type: ignore[arg-type]
    return {"schedule": schedule.name, **options}


def _names() -> str:
    return ", ".join(kind.name for kind in _KINDS)


def update_of(optimizer: torch.optim.Optimizer | None, named: Sequence[Named]) -> Callable[[], dict[str, Any]]:
    """What tells how an optimizer updates some parameters, which all workers must do alike.

    Args:
        optimizer: of a handle, if it was given one.
        named: all parameters that the handle was given, frozen ones included.

    Returns:
        Learning rate and weight decay of each parameter group and the names of frozen parameters, at the time of the
        call; nothing without an optimizer.
    """

    def update() -> dict[str, Any]:
        if optimizer is None:
            return {}
        found: dict[str, Any] = {}
        for number, group in enumerate(optimizer.param_groups):
            for key, name in (("lr", "learning rate"), ("weight_decay", "weight decay")):
                if key in group:
                    found[f"{name} of parameter group {number}"] = float(group[key])
        found["frozen parameters"] = [name for name, parameter in named if not parameter.requires_grad]
        return found

    return update
