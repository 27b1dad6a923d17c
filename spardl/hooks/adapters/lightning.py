"""Integration with Lightning: a strategy that combines DDP with a method of this library."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch.nn.parallel import DistributedDataParallel

from spardl.basics.errors import ConfigError
from spardl.hooks.adapters.states import distributed, load_state, method_of, save_state, state_file
from spardl.hooks.hook import Hook, attach
from spardl.method.method import Method
from spardl.method.moving import resolve_momentum
from spardl.method.names import MethodName
from spardl.schedules import Dear
from spardl.schedules.apply_update import unwrap

__all__ = ["SpardlStrategy"]


class SpardlStrategy(DDPStrategy):
    """DDP strategy that averages gradients with a method: ``Trainer(strategy=SpardlStrategy("spardl"))``.

    Most sparse methods average updates of the module's optimizer (a single SGD, Adam or AdamW), whose moments each
    worker keeps, as with ``optimizer=`` of :func:`spardl.attach`. Then pass ``clip_norm`` here instead of the trainer's
    ``gradient_clip_val``. ``recipe="published"`` averages gradients and leaves optimizers and clipping to Lightning.
    The state of each worker is saved next to every checkpoint, in a folder ``CHECKPOINT.spardl``.

    Args:
        method: Name of a method (see ``spardl.method_names()``), or a :class:`spardl.Method`.
        ddp: Options of Lightning's ``DDPStrategy``, for example ``{"find_unused_parameters": True}``.
        fresh: Whether residuals start at zero if a checkpoint has no state of the workers; otherwise loading raises an
            error.
        **options: Options of :func:`spardl.attach` and of the method, for example ``density=0.01``.

    Attributes:
        handle: Handle of the model; ``None`` before training begins.

    Raises:
        ConfigError: If ``schedule="dear"`` is passed. When training begins, if the method or an option is unknown, if
            the method does not support the number of workers, the optimizers or the trainer's clipping, or if
            checkpoints are not written to a local folder.
        CheckpointError: When training resumes, if the checkpoint has no state of this worker.
    """

    def __init__(
        self,
        method: MethodName | str | Method = "spardl",
        *,
        ddp: Mapping[str, Any] | None = None,
        fresh: bool = False,
        **options: Any,
    ) -> None:
        if isinstance(schedule := options.get("schedule"), Dear) or schedule == Dear.name:
            raise ConfigError(
                "schedule=dear updates in the next forward pass, but Lightning runs forward and backward passes inside "
                "optimizer.step(); use schedule=wfbp"
            )
        super().__init__(**(ddp or {}))
        self.handle: Hook | None = None
        self._method, self._fresh, self._options = method, fresh, options
        # Checkpoint and step to load once the model is wrapped.
        self._resume: tuple[str | Path, int] | None = None

    def configure_ddp(self) -> None:
        """Wraps the model in DDP for training."""
        super().configure_ddp()
        if self.handle is not None:  # from an earlier fit()
            self.handle.detach()
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        for folder in (
            trainer.default_root_dir,
            *(getattr(each, "dirpath", None) for each in trainer.checkpoint_callbacks),
        ):
            _state_folder(folder or ".")  # raises an error before training if this is not a local path

    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        """Creates the optimizers, and attaches the method to the model."""
        super().setup_optimizers(trainer)
        scaler = getattr(self.precision_plugin, "scaler", None)
        assert self.model is not None
        options = {"scaler": scaler, "optimizer": self._optimizer(trainer), **self._options}
        self.handle = attach(distributed(self.model, "devices=N"), self._method, **options)
        if self._resume is not None:
            self._load(*self._resume)
            self._resume = None

    def _optimizer(self, trainer: pl.Trainer) -> torch.optim.Optimizer | None:
        """Returns the only optimizer; ``None`` if there are several, each of which applies averaged gradients.

        Raises:
            ConfigError: If the method averages updates, but there are several optimizers or the trainer clips.
        """
        optimizers = [unwrap(each) for each in self.optimizers]
        method = method_of(self._method, self._options)
        moved = any(resolve_momentum(method, each).momentum.moved for each in optimizers)
        if moved and len(optimizers) > 1:
            raise ConfigError(
                "with Lightning, this method averages the updates of one optimizer, but configure_optimizers() returned"
                f' {len(optimizers)}; use a method that averages gradients (SpardlStrategy("int8"), or '
                'recipe="published"), or a loop without Lightning: spardl.attach(ddp_model, optimizer=[muon, adamw])'
            )
        if moved and trainer.gradient_clip_val:
            raise ConfigError(
                f"Trainer(gradient_clip_val={trainer.gradient_clip_val}) would clip updates instead of gradients, "
                "because this method averages updates; remove it and pass "
                f"clip_norm={trainer.gradient_clip_val} to SpardlStrategy, which clips each worker's gradient, or pass "
                'recipe="published" to average gradients'
            )
        return optimizers[0] if len(optimizers) == 1 else None

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """Writes a checkpoint, and each worker's state next to it."""
        super().save_checkpoint(checkpoint, filepath, storage_options)
        if self.handle is not None and "optimizer_states" in checkpoint:
            save_state(self.handle, _state_folder(filepath), step=checkpoint["global_step"])

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Reads a checkpoint, and loads this worker's state now or as soon as the model is wrapped."""
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        assert self.lightning_module is not None
        if self.lightning_module.trainer.state.fn == TrainerFn.FITTING and "global_step" in checkpoint:
            # A callback may reload during training, as the learning-rate finder does.
            if isinstance(self.model, DistributedDataParallel):
                self._load(checkpoint_path, checkpoint["global_step"])
            else:
                self._resume = checkpoint_path, checkpoint["global_step"]
        return checkpoint

    def _load(self, checkpoint: str | Path, step: int) -> None:
        assert self.handle is not None
        folder = _state_folder(checkpoint)
        if Path(checkpoint).is_symlink():  # states are next to its target
            folder = _state_folder(os.path.realpath(checkpoint))
        load_state(self.handle, folder, step=step, fresh=self._fresh)

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Removes a checkpoint and this worker's state."""
        super().remove_checkpoint(filepath)
        folder = _state_folder(filepath)
        state_file(folder).unlink(missing_ok=True)
        with suppress(OSError):  # succeeds on the last worker only
            folder.rmdir()


def _state_folder(checkpoint: str | Path) -> Path:
    if "://" in str(checkpoint):
        raise ConfigError(f"{checkpoint} is not a local path, as SpardlStrategy needs; set dirpath to a local folder")
    return Path(f"{checkpoint}.spardl")
