"""Which method a handle averages with, and which schedule it runs: chosen by name, or given."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import nn

from spardl.basics.checks import is_a, is_finite
from spardl.basics.errors import ConfigError
from spardl.method.method import Method
from spardl.method.recipes import Recipe, find_recipe, make_method
from spardl.schedules import Dear, LayerFusion, MgWfbp, Schedule, Wfbp

__all__ = ["check_covered", "check_update", "choose_method", "choose_schedule", "options_of"]

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


def check_update(schedule: Schedule, method: Method, optimizer: object, clip_norm: float | None) -> None:
    """Accepts what a handle needs to know of the update, and nothing of no use.

    Args:
        schedule: of a handle.
        method: likewise.
        optimizer: that it was given.
        clip_norm: largest norm of a gradient.

    Raises:
        ConfigError: if something is missing, is of no use, or is none.
    """
    if optimizer is None:
        _check_without(schedule, method)
    if clip_norm is None:
        return
    if not (is_finite(clip_norm) and clip_norm > 0):
        raise ConfigError(f"clip_norm must be a number above 0, or None, got {clip_norm!r}")
    if not isinstance(schedule, Dear) and not method.momentum.moved:
        raise ConfigError(
            f"clip_norm is for schedule=dear, or a momentum that is moved before compression; with schedule="
            f"{schedule.name} and momentum={method.momentum.name} your loop clips: leave it out"
        )


def check_covered(method: Method, optimizer: torch.optim.Optimizer | None, averaged: Iterable[nn.Parameter]) -> None:
    """Accepts an optimizer all of whose parameters are averaged, where its step would only apply averages.

    Args:
        method: of a handle.
        optimizer: that it was given.
        averaged: the parameters that the handle averages.

    Raises:
        ConfigError: if it has others.
    """
    if optimizer is None or not method.momentum.moved:
        return
    own = set(averaged)
    trained = [each for group in optimizer.param_groups for each in group["params"] if each.requires_grad]
    others = [each for each in trained if each not in own]
    if others:
        raise ConfigError(
            f"{len(others)} of the optimizer's {len(trained)} parameters are none that this handle averages, and its "
            "step would no longer train them; give them an optimizer of their own"
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
