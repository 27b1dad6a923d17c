"""Alternatives that benchmarks compare, by name: plain DDP, hooks of torch, methods of spardl, and local steps."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import spardl
from spardl.basics.errors import ConfigError
from spardl.hooks.hook import Hook

__all__ = ["ALONE", "DENSE", "TIMEOUT", "WAYS", "Handle", "Way", "attached", "moves_optimizer", "parsed"]

DENSE, ALONE = "ddp", "alone"
TIMEOUT = 300.0  # seconds after which a silent worker counts as lost
MOVED = "optimizer"  # option of spardl's ways that passes the optimizer to attach()


# Handle of spardl's hook or local steps; None without spardl.
Handle: TypeAlias = Hook | spardl.Outer | None


class Trained(NamedTuple):
    """Model and optimizer that a way is registered with.

    Attributes:
        model: Model, wrapped in DDP unless the way is local.
        optimizer: Optimizer of its parameters, or ``None``.
        clip_norm: Maximum norm of a gradient, or ``None`` for no clipping.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    clip_norm: float | None


class Way(NamedTuple):
    """One way to average.

    Attributes:
        register: Registers the way, given a :class:`Trained` and the options of the case; returns spardl's handle.
        one_bucket: Whether DDP must keep all gradients in one bucket.
        local: Whether workers train alone between two exchanges, without DDP.
    """

    register: Callable[..., Handle]
    one_bucket: bool = False
    local: bool = False


def _no_hook(trained: Trained) -> None:
    """Keeps the all-reduce of DDP."""


def _ddp(trained: Trained) -> DistributedDataParallel:
    assert isinstance(trained.model, DistributedDataParallel)
    return trained.model


def _torch_hook(hook: Callable[..., Any], trained: Trained) -> None:
    _ddp(trained).register_comm_hook(None, hook)


def _torch_powersgd(trained: Trained, rank: int = 1, start: int = 2) -> None:
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=start)
    _ddp(trained).register_comm_hook(state, powerSGD_hook.powerSGD_hook)


def _ours(method: str, trained: Trained, *, optimizer: bool = False, **options: Any) -> Hook:
    if optimizer and trained.optimizer is None:
        raise ValueError(f"{MOVED}=True needs an optimizer; pass one")
    attach = partial(spardl.attach, _ddp(trained), method, timeout=TIMEOUT)
    if optimizer:
        return attach(optimizer=trained.optimizer, clip_norm=trained.clip_norm, **options)
    return attach(**options)


def _outer(method: str, trained: Trained, **options: Any) -> spardl.Outer:
    if trained.optimizer is None:
        raise ValueError("local steps need an optimizer; pass one")
    return spardl.Outer(trained.model.named_parameters(), trained.optimizer, method, timeout=TIMEOUT, **options)


WAYS: Mapping[str, Way] = MappingProxyType(
    {
        ALONE: Way(_no_hook),
        DENSE: Way(_no_hook),
        "torch.fp16": Way(partial(_torch_hook, default_hooks.fp16_compress_hook)),
        "torch.bf16": Way(partial(_torch_hook, default_hooks.bf16_compress_hook)),
        "torch.powersgd": Way(_torch_powersgd, one_bucket=True),  # with two buckets, its messages get mixed up on gloo
        **{f"spardl.{method}": Way(partial(_ours, method)) for method in spardl.method_names()},
        **{f"outer.{method}": Way(partial(_outer, method), local=True) for method in spardl.method_names()},
    }
)


def parsed(case: str) -> tuple[Way, dict[str, Any]]:
    """Parses a case into its way and options.

    Raises:
        ConfigError: If the way does not exist, or an option has no value.
    """
    name, *words = case.split(",")
    if name not in WAYS:
        raise ConfigError(f"case {case}: {name!r} does not exist; use one of {', '.join(WAYS)}")
    options: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not (key and equals and value):
            raise ConfigError(f"case {case}: write an option as name=value, not {word!r}")
        options[key] = _literal(value)
    return WAYS[name], options


def _literal(word: str) -> object:
    try:
        return ast.literal_eval(word)
    except (SyntaxError, ValueError):
        return word


def moves_optimizer(case: str) -> bool:
    """Whether a case averages local updates of the optimizer instead of gradients.

    Raises:
        ConfigError: If the way does not exist, or the option is not True or False.
    """
    moved = parsed(case)[1].get(MOVED, False)
    if not isinstance(moved, bool):
        raise ConfigError(f"case {case}: write {MOVED}=True or {MOVED}=False, not {moved!r}")
    return moved


def attached(
    case: str, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, clip_norm: float | None = None
) -> tuple[nn.Module, Handle]:
    """Wraps a model in DDP and registers the hook of a case; local steps need no DDP.

    Args:
        case: Name of the way with its options.
        model: Model to wrap in DDP.
        optimizer: Optimizer of the model; required by local steps and by optimizer=True.
        clip_norm: Maximum norm of each worker's own gradient with optimizer=True.

    Returns:
        The wrapped model, and spardl's handle or ``None``.

    Raises:
        ConfigError: If the options of the case are invalid.
    """
    way, options = parsed(case)
    moves_optimizer(case)
    size = sum(parameter.nbytes for parameter in model.parameters())
    bucket = 1 + size // 2**20 if way.one_bucket else None
    wrapped = model if way.local else DistributedDataParallel(model, bucket_cap_mb=bucket)
    try:
        return wrapped, way.register(Trained(wrapped, optimizer, clip_norm), **options)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"case {case}: {error}") from error
