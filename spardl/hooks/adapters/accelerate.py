"""Hugging Face Accelerate: a method for a model that ``accelerator.prepare`` has wrapped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from spardl.basics.errors import ConfigError
from spardl.hooks import hook
from spardl.hooks.adapters.states import distributed, load_state, method_of, save_state
from spardl.hooks.hook import Hook
from spardl.method.method import Method
from spardl.method.momentum import AutoMomentum
from spardl.method.names import MethodName
from spardl.schedules.plain import unwrapped

__all__ = ["attach"]


def attach(
    accelerator: Accelerator,
    model: nn.Module,
    method: MethodName | str | Method = "spardl",
    *,
    optimizer: torch.optim.Optimizer | None = None,
    fresh: bool = False,
    **options: Any,
) -> Hook:
    """Lets a prepared model average its gradients with a method of this library.

    Call it once, on all workers, after ``accelerator.prepare``. With mixed precision, residuals follow the
    accelerator's ``GradScaler``. ``accelerator.save_state`` and ``load_state`` save and load each worker's state, too.

    Args:
        accelerator: that prepared the model.
        model: as prepared: a ``DistributedDataParallel``.
        method: a name (``spardl.method_names()``), or a :class:`spardl.Method`.
        optimizer: of the model, as prepared: see :func:`spardl.attach`. Give ``clip_norm`` here then, in place of
            ``accelerator.clip_grad_norm_``. Most sparse methods need it, except with ``recipe="published"``.
        fresh: whether residuals begin at zero where ``load_state`` finds none, instead of an error.
        **options: of :func:`spardl.attach`, and of the method, for instance ``density=0.01``.

    Returns:
        The hook's state: ``state_dict``, ``load_state_dict``, ``stats``, ``detach``.

    Raises:
        ConfigError: if the model is not distributed by DDP, the method or an option is unknown, or does not fit so many
            workers, or needs the optimizer.
        CheckpointError: in ``load_state``, if it finds no state of this worker.
    """
    wrapped = distributed(model, "accelerate launch, or torchrun")
    if optimizer is None and isinstance(method_of(method, options).momentum, AutoMomentum):
        raise ConfigError(
            "this method averages the optimizer's updates, and attach() was not given the optimizer; add "
            'optimizer=optimizer (as accelerator.prepare() returned it), or recipe="published" to average gradients'
        )
    handle = hook.attach(wrapped, method, scaler=accelerator.scaler, optimizer=unwrapped(optimizer), **options)
    first = next(model.parameters())

    def prefixes(models: list[nn.Module]) -> list[str]:
        # The accelerator lists models as they were before it wrapped them; their parameters are the same. One that it
        # has forgotten is in none of its checkpoints.
        return [f"spardl-{number}" for number, each in enumerate(models) if next(each.parameters()) is first]

    def save(models: list[nn.Module], weights: object, folder: str) -> None:
        for prefix in prefixes(models):
            save_state(handle, Path(folder), prefix)

    def load(models: list[nn.Module], folder: str) -> None:
        for prefix in prefixes(models):
            load_state(handle, Path(folder), prefix, fresh=fresh)

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
    return handle
