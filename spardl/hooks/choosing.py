"""Arguments of handles: creates the method and the schedule from names and options, and checks the optimizers."""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from spardl.basics.checks import check_integer, is_finite, is_number
from spardl.basics.errors import ConfigError
from spardl.clusters.workers.membership import find_node
from spardl.communicators.steps.nodes import Nodes
from spardl.hooks.averager import Named
from spardl.method.method import Method
from spardl.method.moving import (
    Optimizers,
    double_momentum_warning,
    low_density_warning,
    matrices_of,
    optimizers_of,
)
from spardl.method.recipes import Recipe, find_recipe, make_method, method_options, muon_defaults
from spardl.method.registry import check_loss_scale
from spardl.protocol.programs import Worker
from spardl.schedules import Dear, LayerFusion, MgWfbp, Schedule, Wfbp

__all__ = [
    "check_known",
    "check_optimizer_parameters",
    "check_update",
    "choose_method",
    "choose_nodes",
    "choose_schedule",
    "default_method",
    "options_of",
    "update_facts",
]

_SCHEDULES: tuple[type[Schedule], ...] = (Wfbp, MgWfbp, LayerFusion, Dear)
# The option of a schedule that limits the size of its groups.
_SIZE_OPTIONS: tuple[tuple[type[Schedule], str], ...] = ((Wfbp, "bucket_mb"), (Dear, "threshold_mb"))


# Default methods of handles, without and with Muon; docs/tables/learning.md compares them.
_DEFAULT, _FOR_MUON = "spardl", "onebit"


def choose_method(
    method: str | Method,
    options: Mapping[str, Any],
    schedule: str | Schedule | None = None,
    optimizer: Optimizers = None,
    ranks_per_node: int | str = 1,
) -> Method:
    """Creates the method of a handle from its arguments.

    Args:
        method: Name of the method, or a method.
        options: Options of the method.
        schedule: Schedule of the handle, if it has one; ``dear`` needs a method whose sums can be split into
            reduce-scatter and all-gather.
        optimizer: Optimizers passed to the handle, if any; Muon changes the defaults of some methods.
        ranks_per_node: Number of workers per node, as for ``choose_nodes``; above 1, the communicator cannot be
            ``backend``, which sums over all workers.

    Raises:
        ConfigError: If no method has this name, or an option is unknown or has no effect.
    """
    halves = isinstance(schedule, Dear) or schedule == Dear.name
    if not isinstance(method, Method) and matrices_of(optimizers_of(optimizer)):
        options = {**muon_defaults(find_recipe(method), options), **options}
    if isinstance(ranks_per_node, str) and ranks_per_node == "auto":
        ranks_per_node, _ = find_node(os.environ)
    alone = isinstance(ranks_per_node, int) and ranks_per_node == 1
    if isinstance(method, Method) or halves or "communicator" in options or not alone:
        return make_method(method, **options)
    # The trainer needs a fixed order of additions, because its runs are compared with simulated ones. Handles need no
    # fixed order, so they use the faster sums of the backend.
    recipe = find_recipe(method)
    faster = recipe.faster if isinstance(recipe, Recipe) else None
    return make_method(method, **options, **({"communicator": faster} if faster else {}))


def default_method(options: Mapping[str, Any], optimizer: Optimizers) -> str:
    """Returns the name of the default method of a handle.

    Args:
        options: Options of the method.
        optimizer: Optimizers passed to the handle, if any.

    Raises:
        ConfigError: If the default method with Muon lacks one of the options.
    """
    if not matrices_of(optimizers_of(optimizer)) or options.get("recipe") == "published":
        return _DEFAULT
    # ``onebit`` sends signs, for which a number format has no effect.
    known = {each.name for each in method_options(_FOR_MUON)} - {"wire"}
    if unknown := sorted(options.keys() - known):
        has = {each.name for each in method_options(_DEFAULT)}
        way = f", or name a method that has it: method={_DEFAULT!r}" if unknown[0] in has else ""
        raise ConfigError(
            f"with Muon, the default method is {_FOR_MUON!r}, which has no option {unknown[0]}; remove it{way}"
        )
    return _FOR_MUON


def choose_schedule(schedule: str | Schedule, bucket_mb: float | None) -> Schedule:
    """Creates the schedule of a handle from its arguments.

    Args:
        schedule: Name of the schedule, or a schedule.
        bucket_mb: Largest size of a group in megabytes, if the schedule has such a limit; ``None`` uses its default.

    Raises:
        ConfigError: If the schedule is unknown, has no such limit, or does not overlap communication with computation.
    """
    if bucket_mb is not None and (not is_number(float, bucket_mb) or not bucket_mb > 0):
        raise ConfigError(f"bucket_mb must be above 0, got {bucket_mb!r}")
    if isinstance(schedule, str):
        # Other schedules of the library do not send during the backward pass.
        kind = {each.name: each for each in _SCHEDULES}.get(schedule)
        if kind is None:
            raise ConfigError(f"schedule={schedule!r} is not supported here; use one of {_names()}")
        return _make_schedule(kind, bucket_mb)
    if bucket_mb is not None:
        raise ConfigError("bucket_mb has no effect on a schedule object; set the limit in the schedule itself")
    if not isinstance(schedule, _SCHEDULES):
        raise ConfigError(f"schedule must be one of {_names()}, or an object of such a class, got {schedule!r}")
    return schedule


def choose_nodes(
    ranks_per_node: int | str,
    worker: Worker,
    schedule: Schedule,
    method: Method,
    environment: Mapping[str, str] = os.environ,
) -> Nodes:
    """Returns the division of workers into nodes that the argument ``ranks_per_node`` describes.

    Args:
        ranks_per_node: Number of workers per node, with consecutive ranks; ``"auto"`` reads it from the environment.
        worker: Rank of this process and number of workers.
        schedule: Schedule of the handle.
        method: Method of the handle, which runs between nodes.
        environment: Environment variables.

    Raises:
        ConfigError: If the number is invalid or unknown, the ranks of a node are not consecutive, or schedule or method
            do not support several workers per node.
    """
    if isinstance(ranks_per_node, str) and ranks_per_node == "auto":
        count, place = find_node(environment)
        if worker.rank % count != place:
            raise ConfigError(
                f"ranks_per_node='auto' needs nodes with consecutive ranks, but rank {worker.rank} is number {place} "
                f"of the {count} workers of its node; start the workers node by node, or remove ranks_per_node"
            )
    else:
        check_integer("ranks_per_node", ranks_per_node, least=1)
        count = int(ranks_per_node)
    nodes = Nodes(count)
    nodes.check(worker.size)
    if count > 1 and not isinstance(schedule, Wfbp):
        raise ConfigError(f"ranks_per_node={count} does not support schedule={schedule.name}; use schedule='wfbp'")
    sums = (method.communicator, *([method.warmup.communicator] if method.warmup.steps else []))
    if count > 1 and any(each.collective for each in sums):
        raise ConfigError(
            f"ranks_per_node={count} does not support communicator=backend, which sums over all workers; use "
            "communicator='dense'"
        )
    return nodes


def _make_schedule(kind: type[Schedule], bucket_mb: float | None) -> Schedule:
    if bucket_mb is None:
        return kind()
    option = next((option for each, option in _SIZE_OPTIONS if each is kind), None)
    if option is None:
        raise ConfigError(f"schedule={kind.name} chooses the group sizes itself; remove bucket_mb")
    return kind(**{option: bucket_mb})


def check_update(
    schedule: Schedule,
    method: Method,
    optimizers: Sequence[torch.optim.Optimizer],
    clip_norm: float | None,
    scaler: GradScaler | None,
) -> None:
    """Checks optimizers, ``clip_norm`` and scaler of a handle against its schedule and method.

    Args:
        schedule: Schedule of the handle.
        method: Method of the handle.
        optimizers: Optimizers passed to the handle, if any.
        clip_norm: Largest 2-norm of a gradient; ``None`` for no limit.
        scaler: GradScaler of the loss, if any.

    Raises:
        ConfigError: If one of these arguments is missing, has no effect, contradicts the method or is invalid.
    """
    if scaler is not None and scaler.is_enabled():
        check_loss_scale(method.compressor, 'train without GradScaler (for example in bfloat16), or use "topka"')
    if not optimizers:
        _check_without_optimizer(schedule, method)
    elif len(optimizers) > 1:
        _check_several(schedule, method, optimizers, scaler)
    for optimizer in optimizers:
        _check_momentum_once(method, optimizer)
        if doubt := double_momentum_warning(method, optimizer):
            warnings.warn(f"spardl: {doubt}.", stacklevel=4)
    if doubt := low_density_warning(method):
        warnings.warn(f"spardl: {doubt}.", stacklevel=4)
    if clip_norm is None:
        return
    if not (is_finite(clip_norm) and clip_norm > 0):
        raise ConfigError(f"clip_norm must be a number above 0, or None, got {clip_norm!r}")
    if not optimizers:
        raise ConfigError(
            f"clip_norm={clip_norm} needs optimizer= (SGD, Adam, AdamW or Muon of torch.optim) to clip each worker's "
            "gradient before compression; pass it, or call clip_grad_norm_() between backward() and step()"
        )
    if not isinstance(schedule, Dear) and not method.momentum.moved:
        raise ConfigError(
            "clip_norm has no effect where gradients are averaged (dense methods, powersgd, recipe='published', SGD "
            "without momentum); remove it and call clip_grad_norm_() in your loop"
        )


def _check_several(
    schedule: Schedule, method: Method, optimizers: Sequence[torch.optim.Optimizer], scaler: GradScaler | None
) -> None:
    """Checks a handle with more than one optimizer."""
    if isinstance(schedule, Dear):
        raise ConfigError(
            f"schedule={schedule.name} supports one optimizer, got {len(optimizers)}; use schedule=wfbp, or one "
            "optimizer with several parameter groups"
        )
    # After an overflow, a GradScaler skips only the optimizers with an infinite gradient, and the others would diverge.
    if method.momentum.moved and scaler is not None and scaler.is_enabled():
        raise ConfigError(
            f"scaler= supports one optimizer, got {len(optimizers)}; train without GradScaler (for example in "
            "bfloat16), or use one optimizer with several parameter groups"
        )


def check_optimizer_parameters(
    schedule: Schedule, method: Method, optimizers: Sequence[torch.optim.Optimizer], averaged: Sequence[Named]
) -> None:
    """Checks that optimizers that apply averages contain exactly the averaged parameters, each of them once.

    Args:
        schedule: Schedule of the handle.
        method: Method of the handle.
        optimizers: Optimizers passed to the handle, if any.
        averaged: Parameters that the handle averages.

    Raises:
        ConfigError: If the optimizers lack some of these parameters, contain others, or share some.
    """
    # Other methods average gradients, which any number of optimizers can use.
    if not optimizers or not (method.momentum.moved or isinstance(schedule, Dear)):
        return
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    trained = [each for group in groups for each in group["params"] if each.requires_grad]
    owners = Counter(trained)
    if shared := [pair.name for pair in averaged if owners[pair.parameter] > 1]:
        raise ConfigError(
            f"{len(shared)} of the {len(averaged)} averaged parameters are in several optimizers (first: {shared[0]}); "
            "give each parameter to one of them"
        )
    # With DeAR alone, the loop's own step still updates parameters that are not averaged.
    if method.momentum.moved:
        check_known(trained, {pair.parameter for pair in averaged})
    own = set(trained)
    missing = [pair.name for pair in averaged if pair.parameter not in own]
    if missing:
        raise ConfigError(
            f"optimizer is missing {len(missing)} of the {len(averaged)} averaged parameters (first: {missing[0]}); "
            "pass an optimizer of all of them (or several: optimizer=[muon, adamw]), or freeze the others with "
            "requires_grad_(False) before wrapping the model"
        )


def check_known(parameters: Sequence[nn.Parameter], averaged: Container[Tensor]) -> None:
    """Checks that an optimizer updates averaged parameters only.

    Args:
        parameters: Parameters of the optimizer.
        averaged: Parameters that the handle averages, of any shape.

    Raises:
        ConfigError: If the optimizer contains other parameters.
    """
    if others := sum(each not in averaged for each in parameters):
        raise ConfigError(
            f"{others} of the optimizer's {len(parameters)} parameters are not averaged by this handle, so they would "
            "no longer be trained; use a second optimizer for them, or, if they were unfrozen later, create a new "
            "handle after requires_grad_(True)"
        )


def _check_momentum_once(method: Method, optimizer: torch.optim.Optimizer) -> None:
    # A local update (``moved``) replaces the momentum of the optimizer, so momentum is applied only once.
    momentum = method.momentum
    has_own = any(group.get("momentum") or "betas" in group for group in optimizer.param_groups)
    if momentum.remembers and not momentum.moved and has_own:
        raise ConfigError(
            f"momentum={momentum.name} already applies momentum on each worker, and {type(optimizer).__name__} would "
            "apply its own again; use torch.optim.SGD with momentum=0"
        )


def _check_without_optimizer(schedule: Schedule, method: Method) -> None:
    if isinstance(schedule, Dear):
        raise ConfigError("schedule=dear runs the optimizer's step itself; pass optimizer= to attach()")
    if method.momentum.moved:
        raise ConfigError(
            f"momentum={method.momentum.name} replaces the state of the optimizer; pass optimizer= to attach(), whose "
            "step() then only applies averages"
        )


def options_of(schedule: Schedule) -> dict[str, Any]:
    """Returns a schedule's name and options as a dict, which must be equal on all workers."""
    options = {field.name: getattr(schedule, field.name) for field in fields(schedule)}  # type: ignore[arg-type]
    return {"schedule": schedule.name, **options}


def _names() -> str:
    return ", ".join(kind.name for kind in _SCHEDULES)


def update_facts(
    optimizers: Sequence[torch.optim.Optimizer], named: Sequence[Named], matrices: Collection[nn.Parameter] = ()
) -> Callable[[], dict[str, Any]]:
    """Returns a function that describes how optimizers update parameters, which must be equal on all workers.

    Args:
        optimizers: Optimizers passed to the handle, if any.
        named: All parameters of the handle, including frozen ones.
        matrices: Parameters of shape (a, b) that Muon updates.

    Returns:
        Function that returns the current parameter groups, learning rates, weight decays and names of frozen
        parameters; it returns an empty dict without an optimizer.
    """
    names = {parameter: name for name, parameter in named}

    def update() -> dict[str, Any]:
        if not optimizers:
            return {}
        found: dict[str, Any] = {}
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        for number, group in enumerate(groups):
            if len(groups) > 1:
                found[f"parameters of parameter group {number}"] = sorted(
                    names[each] for each in group["params"] if each in names
                )
            for key, name in (("lr", "learning rate"), ("weight_decay", "weight decay")):
                if key in group:
                    found[f"{name} of parameter group {number}"] = float(group[key])
            if "adjust_lr_fn" in group:
                found[f"adjust_lr_fn of parameter group {number}"] = group["adjust_lr_fn"]
        found["frozen parameters"] = [name for name, parameter in named if not parameter.requires_grad]
        if matrices:
            found["matrices of Muon"] = [name for name, parameter in named if parameter in matrices]
        return found

    return update
