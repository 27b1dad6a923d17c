"""Integration with Hugging Face transformers: a callback that attaches a method to a ``Trainer``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from spardl.basics.errors import ConfigError
from spardl.hooks.adapters.states import distributed, load_state, method_of, save_state
from spardl.hooks.hook import Hook, attach
from spardl.method.method import Method
from spardl.method.moving import resolve_momentum
from spardl.method.names import MethodName
from spardl.schedules.apply_update import unwrap

__all__ = ["SpardlCallback", "attach_trainer"]


class SpardlCallback(TrainerCallback):
    """Callback that :func:`attach_trainer` adds to a trainer.

    Args:
        trainer: Trainer of the model.
        method: Name of a method, or a :class:`spardl.Method`.
        fresh: Whether residuals start at zero if a checkpoint has no state of the workers; otherwise loading raises an
            error.
        options: Options of :func:`spardl.attach` and of the method.

    Attributes:
        handle: Handle of the model; ``None`` before training begins.
    """

    def __init__(
        self,
        trainer: Trainer,
        method: str | Method,
        fresh: bool,
        options: dict[str, Any],
    ) -> None:
        self.handle: Hook | None = None
        # Model and optimizer of the handle, and the trainer's own limit while the handle clips instead.
        self._attached: tuple[nn.Module, torch.optim.Optimizer | None] | None = None
        self._clip_norm: float | None = None
        self._trainer, self._method, self._options = trainer, method, options
        self._fresh = fresh
        self._resumed: str | None = None
        self._train = trainer.train
        trainer.train = self._train_and_restore  # type: ignore[method-assign]

    def _train_and_restore(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        # Callbacks do not get the path of the checkpoint.
        named = not isinstance(resume_from_checkpoint, bool | None)
        self._resumed = str(resume_from_checkpoint) if named else None
        try:
            return self._train(resume_from_checkpoint, *args, **kwargs)
        finally:
            self._restore()

    def _restore(self) -> None:
        """Restores the trainer's own gradient clipping, also after an exception or a retry with smaller batches."""
        if self._clip_norm is not None:
            self._trainer.args.max_grad_norm, self._clip_norm = self._clip_norm, None
        vars(self._trainer).pop("_get_grad_norm", None)

    def _gradient_norm(self, *_: Any, **__: Any) -> float | None:
        # After the backward pass, `.grad` holds averaged updates, so the trainer would log the norm of those.
        return self.handle.gradient_norm if self.handle else None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Attaches the method after the trainer has wrapped the model and loaded its checkpoint."""
        if state.is_hyper_param_search:
            raise ConfigError("attach_trainer() does not work in hyperparameter_search(); call train() for each trial")
        self._restore()  # auto_find_batch_size begins again after a failure
        model = distributed(self._trainer.model_wrapped, "torchrun --nproc-per-node N")
        optimizer = unwrap(self._trainer.optimizer)
        if self.handle is not None and self._attached != (model, optimizer):
            self.handle.detach()
            self.handle = None
        moved = self._update_options(optimizer, args)
        if self.handle is None:
            options = {"scaler": self._trainer.accelerator.scaler, **moved, **self._options}
            self.handle = attach(model, self._method, **options)
            self._attached = model, optimizer
        if moved:
            self._clip_norm, args.max_grad_norm = args.max_grad_norm, 0.0
            if hasattr(self._trainer, "_get_grad_norm"):
                vars(self._trainer)["_get_grad_norm"] = self._gradient_norm
        if state.global_step:
            folder = Path(self._resumed or _checkpoint(args, state))
            load_state(self.handle, folder, step=state.global_step, fresh=self._fresh)

    def _update_options(self, optimizer: torch.optim.Optimizer | None, args: TrainingArguments) -> dict[str, Any]:
        """Returns optimizer and gradient limit for a method that averages updates; nothing for other methods."""
        if not resolve_momentum(method_of(self._method, self._options), optimizer).momentum.moved:
            return {}
        return {"optimizer": optimizer, "clip_norm": args.max_grad_norm or None}

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Applies pending updates, and turns the trainer's own gradient clipping on again."""
        if self.handle is not None:
            self.handle.flush()
        self._restore()

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Saves this worker's state to the folder of the checkpoint that the trainer has written."""
        if self.handle is not None and not args.save_only_model:
            save_state(self.handle, _checkpoint(args, state), step=state.global_step)


def attach_trainer(
    trainer: Trainer,
    method: MethodName | str | Method = "spardl",
    *,
    fresh: bool = False,
    **options: Any,
) -> SpardlCallback:
    """Makes a ``Trainer`` average its gradients with a method of this library.

    Call it once, on all workers, before ``trainer.train()``. Most sparse methods average updates of the trainer's
    optimizer (SGD, Adam or AdamW of torch), whose moments each worker keeps. They clip each worker's own gradient to
    ``max_grad_norm`` and log its norm as ``grad_norm``. ``recipe="published"`` averages gradients and leaves clipping
    to the trainer. With ``fp16``, residuals follow the trainer's ``GradScaler``. Checkpoints contain the state of each
    worker, and ``resume_from_checkpoint`` restores it.

    Args:
        trainer: Trainer of the model.
        method: Name of a method (see ``spardl.method_names()``), or a :class:`spardl.Method`.
        fresh: Whether residuals start at zero if a checkpoint has no state of the workers; otherwise loading raises an
            error.
        **options: Options of :func:`spardl.attach` and of the method, for example ``density=0.01``.

    Returns:
        The callback, whose ``handle`` provides ``stats`` and more once training has begun.

    Raises:
        ConfigError: When training begins, if the model is not a DDP, or the method or an option is unknown or does not
            support the number of workers or the optimizer.
        CheckpointError: When training resumes, if the checkpoint has no state of this worker.
    """
    callback = SpardlCallback(trainer, method, fresh, options)
    trainer.add_callback(callback)
    return callback


def _checkpoint(args: TrainingArguments, state: TrainerState) -> Path:
    """Returns the folder in which the trainer saves a checkpoint of this step."""
    return Path(str(args.output_dir)) / f"checkpoint-{state.global_step}"
