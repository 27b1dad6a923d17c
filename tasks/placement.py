"""Moves batches to the model's device and precision."""

from __future__ import annotations

from torch import Tensor, nn

from trainer.task import Batch

__all__ = ["place"]


def place(batch: Batch, model: nn.Module) -> dict[str, Tensor]:
    """Moves a batch to the model's device, and converts floating-point tensors to the dtype of its parameters.

    Args:
        batch: Tensors of any shape, by name.
        model: Module with at least one parameter, all on one device and of one dtype.

    Returns:
        Moved tensors by name; integer tensors (tokens, labels) keep their dtype.
    """
    like = next(model.parameters())
    return {
        name: tensor.to(like.device, like.dtype if tensor.is_floating_point() else tensor.dtype)
        for name, tensor in batch.items()
    }
