"""Integration with Hugging Face Accelerate: attaches a method to a model prepared by ``accelerator.prepare``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from accelerate import Accelerator
from torch import nn

from spardl.basics.errors import ConfigError
from spardl.hooks import hook
from spardl.hooks.adapters.states import distributed, load_state, method_of, save_state
from spardl.hooks.hook import Hook
from spardl.method.method import Method
from spardl.method.momentum import AutoMomentum
from spardl.method.moving import Optimizers, optimizers_of
from spardl.method.names import MethodName
from spardl.schedules.apply_update import unwrap

__all__ = ["attach"]


def attach(
    accelerator: Accelerator,
    model: nn.Module,
    method: MethodName | str | Method | None = None,
    *,
    optimizer: Optimizers = None,
    fresh: bool = False,
    **options: Any,
) -> Hook:
    """Makes a prepared model average its gradients with a method of this library.

    Call it once, on all workers, after ``accelerator.prepare``. With mixed precision, residuals follow the
    accelerator's ``GradScaler``. ``accelerator.save_state`` and ``load_state`` include the state of each worker.

    Args:
        accelerator: Accelerator that prepared the model.
        model: Prepared model, a ``DistributedDataParallel``.
        method: Name of a method (see ``spardl.method_names()``), or a :class:`spardl.Method`; ``None`` means
            ``"spardl"``, or ``"onebit"`` if ``optimizer`` contains Muon.
        optimizer: Prepared optimizer of the model, or several, as for :func:`spardl.attach`. Most sparse methods need
            it, except with ``recipe="published"``. Pass ``clip_norm`` here instead of calling
            ``accelerator.clip_grad_norm_``.
        fresh: Whether residuals start at zero if ``load_state`` finds no saved state; otherwise it raises an error.
        **options: Options of :func:`spardl.attach` and of the method, for example ``density=0.01``.

    Returns:
        The handle, with ``state_dict``, ``load_state_dict``, ``stats`` and ``detach``.

    Raises:
        ConfigError: If the model is not a DDP, or the method or an option is unknown, does not support the number of
            workers or needs the optimizer.
        CheckpointError: In ``load_state``, if it finds no state of this worker.
    """
    wrapped = distributed(model, "accelerate launch, or torchrun")
    # Without an optimizer, the default method is "spardl".
    named = "spardl" if method is None else method
    if optimizer is None and isinstance(method_of(named, options).momentum, AutoMomentum):
        raise ConfigError(
            "attach() needs the optimizer, because this method averages its updates; add optimizer=optimizer (as "
            'returned by accelerator.prepare()), or recipe="published" to average gradients'
        )
    unwrapped = [unwrap(each) for each in optimizers_of(optimizer)]
    handle = hook.attach(wrapped, method, scaler=accelerator.scaler, optimizer=unwrapped or None, **options)
    # Identifies the model: the accelerator may wrap or unwrap it later.
    first = next(model.parameters())

    def prefixes(models: list[nn.Module]) -> list[str]:
        # The accelerator lists models without their wrappers, so they are recognized by their parameters. The list is
        # empty for a model that free_memory() has removed, which is in no checkpoint.
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
