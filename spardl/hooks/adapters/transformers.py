"""The ``Trainer`` of Hugging Face's transformers."""

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
from spardl.method.moving import definite
from spardl.method.names import MethodName
from spardl.schedules.plain import unwrapped

__all__ = ["SpardlCallback", "attach_trainer"]


class SpardlCallback(TrainerCallback):
    """What :func:`attach_trainer` adds to a trainer.

    Args:
        trainer: of the model.
        method: a name, or a :class:`spardl.Method`.
        fresh: whether residuals begin at zero where the checkpoint has none, instead of an error.
        options: of :func:`spardl.attach`, and of the method.

    Attributes:
        handle: of the model that is trained; ``None`` before training begins.
    """

    def __init__(
        self,
        trainer: Trainer,
        method: str | Method,
        fresh: bool,
        options: dict[str, Any],
    ) -> None:
        self.handle: Hook | None = None
        # What the handle is of, and what the trainer no longer clips by.
        self._attached: tuple[nn.Module, torch.optim.Optimizer | None] | None = None
        self._clip_norm: float | None = None
        self._trainer, self._method, self._options = trainer, method, options
        self._fresh = fresh
        self._resumed: str | None = None
        self._train = trainer.train
        trainer.train = self._note_where  # type: ignore[method-assign]

    def _note_where(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        # The trainer tells no callback from where it goes on.
        named = not isinstance(resume_from_checkpoint, bool | None)
        self._resumed = str(resume_from_checkpoint) if named else None
        try:
            return self._train(resume_from_checkpoint, *args, **kwargs)
        finally:
            self._restore()

    def _restore(self) -> None:
        """Gives the trainer its own limit and norm back, also after an exception or a retry with smaller batches."""
        if self._clip_norm is not None:
            self._trainer.args.max_grad_norm, self._clip_norm = self._clip_norm, None
        vars(self._trainer).pop("_get_grad_norm", None)

    def _gradient_norm(self, *_: Any, **__: Any) -> float | None:
        # After the backward pass, `.grad` holds averaged updates, whose norm tells nothing about gradients.
        return self.handle.gradient_norm if self.handle else None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The trainer has wrapped the model, and loaded a checkpoint if there is one."""
        if state.is_hyper_param_search:
            raise ConfigError("attach_trainer() does not work in hyperparameter_search(): call train() for each trial")
        self._restore()  # auto_find_batch_size begins again after a failure
        model = distributed(self._trainer.model_wrapped, "torchrun --nproc-per-node N")
        optimizer = unwrapped(self._trainer.optimizer)
        if self.handle is not None and self._attached != (model, optimizer):
            self.handle.detach()
            self.handle = None
        moved = self._moved(optimizer, args)
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

    def _moved(self, optimizer: torch.optim.Optimizer | None, args: TrainingArguments) -> dict[str, Any]:
        """The optimizer, and the limit on gradients, for a method that takes them over; else nothing."""
        if not definite(method_of(self._method, self._options), optimizer).momentum.moved:
            return {}
        return {"optimizer": optimizer, "clip_norm": args.max_grad_norm or None}

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The last step has updated the weights, under whatever schedule; the trainer's own limit is as it was."""
        if self.handle is not None:
            self.handle.flush()
        self._restore()

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """The trainer has written a checkpoint."""
        if self.handle is not None and not args.save_only_model:
            save_state(self.handle, _checkpoint(args, state), step=state.global_step)


def attach_trainer(
    trainer: Trainer,
    method: MethodName | str | Method = "spardl",
    *,
    fresh: bool = False,
    **options: Any,
) -> SpardlCallback:
    """Lets a ``Trainer`` average its gradients with a method of this library.

    Call it once, on all workers, before ``trainer.train()``. Most sparse methods then average updates of the trainer's
    optimizer (SGD, Adam or AdamW of torch), whose moments each worker keeps, and limit each worker's own gradient to
    ``max_grad_norm``, and log the norm of that gradient as ``grad_norm``; ``recipe="published"`` leaves all that to the
    trainer. With ``fp16``, residuals follow the trainer's
    ``GradScaler``. Checkpoints have each worker's state, and ``resume_from_checkpoint`` goes on with it.

    Args:
        trainer: of the model.
        method: a name (``spardl.method_names()``), or a :class:`spardl.Method`.
        fresh: whether residuals begin at zero where the checkpoint has none, instead of an error.
        **options: of :func:`spardl.attach`, and of the method, for instance ``density=0.01``.

    Returns:
        The callback; its ``handle`` has ``stats`` and so on, once training has begun.

    Raises:
        ConfigError: when training begins, if the model is not distributed by DDP, the method or an option is unknown,
            or does not fit so many workers, or the optimizer's state cannot be moved.
        CheckpointError: when training goes on, if the checkpoint has no state of this worker.
    """
    callback = SpardlCallback(trainer, method, fresh, options)
    trainer.add_callback(callback)
    return callback


def _checkpoint(args: TrainingArguments, state: TrainerState) -> Path:
    """Where the trainer keeps what it has at this step."""
    return Path(str(args.output_dir)) / f"checkpoint-{state.global_step}"
