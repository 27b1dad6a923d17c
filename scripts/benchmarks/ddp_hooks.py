"""Alternatives that benchmarks compare, by name: plain DDP, hooks of torch, methods of spardl, and local steps."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import spardl
from spardl.basics.errors import ConfigError
from spardl.hooks.hook import Hook

__all__ = ["ALONE", "DENSE", "TIMEOUT", "Handle", "attached", "moves_optimizer", "parsed"]

ALONE, DENSE = "alone", "ddp"
POWERSGD, OURS, LOCAL = "torch.powersgd", "spardl.", "outer."
CASTS: Mapping[str, Any] = MappingProxyType(
    {"torch.fp16": default_hooks.fp16_compress_hook, "torch.bf16": default_hooks.bf16_compress_hook}
)
WAYS = (
    *(ALONE, DENSE, *CASTS, POWERSGD),
    *(f"{prefix}{method}" for prefix in (OURS, LOCAL) for method in spardl.method_names()),
)
TIMEOUT = 300.0  # seconds after which a silent worker counts as lost
MOVED = "optimizer"  # option of spardl's ways that passes the optimizer to attach()

# Handle of spardl's hook or local steps; None without spardl.
Handle: TypeAlias = Hook | spardl.Outer | None


def parsed(case: str) -> tuple[str, dict[str, Any]]:
    """Parses a case into the name of a way and its options.

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
        try:
            options[key] = ast.literal_eval(value)
        except (SyntaxError, ValueError):
            options[key] = value
    return name, options


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
    name, options = parsed(case)
    moved = moves_optimizer(case)
    if optimizer is None and (moved or name.startswith(LOCAL)):
        raise ConfigError(f"case {case}: local steps and {MOVED}=True need an optimizer; pass one")
    try:
        if optimizer is not None and name.startswith(LOCAL):
            method = name.removeprefix(LOCAL)
            return model, spardl.Outer(model.named_parameters(), optimizer, method, timeout=TIMEOUT, **options)
        # With two buckets, the messages of torch's PowerSGD get mixed up on gloo.
        whole = 1 + sum(parameter.nbytes for parameter in model.parameters()) // 2**20
        ddp = DistributedDataParallel(model, bucket_cap_mb=whole if name == POWERSGD else None)
        return ddp, _registered(name, ddp, optimizer if moved else None, clip_norm if moved else None, options)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"case {case}: {error}") from error


def _registered(
    name: str,
    ddp: DistributedDataParallel,
    optimizer: torch.optim.Optimizer | None,
    clip_norm: float | None,
    options: dict[str, Any],
) -> Handle:
    if name.startswith(OURS):
        others = {key: value for key, value in options.items() if key != MOVED}
        moving: dict[str, Any] = {} if optimizer is None else {"optimizer": optimizer, "clip_norm": clip_norm}
        return spardl.attach(ddp, name.removeprefix(OURS), timeout=TIMEOUT, **moving, **others)
    if name == POWERSGD:
        ddp.register_comm_hook(_powersgd(**options), powerSGD_hook.powerSGD_hook)
    elif options:
        raise TypeError(f"{name} has no option {min(options)}")
    elif name in CASTS:
        ddp.register_comm_hook(None, CASTS[name])
    return None


def _powersgd(rank: int = 1, start: int = 2) -> powerSGD_hook.PowerSGDState:
    return powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=start)
