"""Two lines for a loop with torch's DistributedDataParallel."""

from __future__ import annotations

from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel

from spardl.basics.errors import ConfigError
from spardl.hooks.choosing import choose_method
from spardl.hooks.hook import Hook, hook
from spardl.method.method import Method
from spardl.method.names import MethodName
from spardl.schedules import Schedule

__all__ = ["attach"]


def attach(
    ddp: DistributedDataParallel,
    method: MethodName | str | Method = "spardl",
    *,
    bucket_mb: float | None = None,
    timeout: float = 1800.0,
    scaler: GradScaler | None = None,
    schedule: str | Schedule = "wfbp",
    optimizer: torch.optim.Optimizer | None = None,
    clip_norm: float | None = None,
    **options: Any,
) -> Hook:
    """Lets DDP average its gradients with a method of this library, from the next backward pass on.

    All workers must call it, with the same arguments; again after ``detach``, to go on with another method.

    Args:
        ddp: the model; nothing else in the training loop changes.
        method: a name (``spardl.method_names()``), or a :class:`Method`.
        bucket_mb: most megabytes (2^20 bytes) that are averaged together; ``None``: 25, for dense sums DDP's buckets.
        timeout: seconds after which a silent worker counts as lost.
        scaler: the ``GradScaler`` that scales the loss, if there is one: residuals then follow its scale, and a step
            in which some worker's gradient overflowed is skipped by all, without loss.
        schedule: ``"wfbp"`` (groups of ``bucket_mb``), ``"mg_wfbp"`` or ``"layer_fusion"`` (groups as measured in the
            first steps), ``"dear"`` (sends during the next forward pass as well), or a schedule: ``spardl.Wfbp(50)``.
        optimizer: of the model, SGD, Adam or AdamW: most sparse methods then average its updates instead of gradients.
            Each worker keeps moments of its own, taken over from a trained optimizer, and ``step()`` only applies
            averages. With ``"dear"`` it orders an
            update that the next forward pass makes: read weights after ``handle.flush()``; state_dicts do that.
        clip_norm: largest 2-norm of each worker's own gradient then; with ``"dear"`` otherwise that of the average.
        **options: of the method, for instance ``density=0.01``, ``teams=2``; see :class:`Recipe`.

    Returns:
        The hook's state: ``state_dict``, ``load_state_dict``, ``stats``, ``reset``, ``discard``, ``detach``.

    Raises:
        ConfigError: if the method or an option is unknown, or does not fit so many workers, or ``ddp`` is no DDP, has
            a hook already, or sparse or complex gradients; in the first step, on all workers, if they were not given
            the same.

    Example:
        >>> ddp_model = nn.parallel.DistributedDataParallel(nn.Linear(100, 10))
        >>> handle = spardl.attach(ddp_model, "spardl", density=0.01)
        >>> ddp_model(torch.randn(5, 100)).sum().backward()
        >>> gradient = torch.cat([parameter.grad.flatten() for parameter in ddp_model.parameters()])
        >>> print(f"{gradient.count_nonzero()} of {len(gradient)} entries are averages; the rest is in the residual")
        10 of 1010 entries are averages; the rest is in the residual
        >>> state = handle.state_dict()
        >>> print(f"step {handle.stats().steps}; to be saved: {', '.join(state)}")
        step 1; to be saved: owner, names, partition, groups, usage, kept, factor, skipped
    """
    if registered := _registered(ddp):
        registered.check_detached()
    chosen = choose_method(method, options, schedule)
    made = Hook(ddp, chosen, bucket_mb, timeout, scaler, schedule, optimizer, clip_norm)
    if registered:
        registered.follow(made)
    else:
        _register(ddp, made)
    return made


def _register(ddp: DistributedDataParallel, made: Hook) -> None:
    try:
        ddp.register_comm_hook(made, hook)
    except RuntimeError as error:
        made.detach()
        raise ConfigError("this model has a communication hook, which torch cannot unregister; wrap it anew") from error


def _registered(ddp: DistributedDataParallel) -> Hook | None:
    """The hook of this library that a model has, if it has one."""
    hooks = getattr(ddp, "_comm_hooks", [])
    return next((state for function, state in hooks if function is hook and isinstance(state, Hook)), None)
