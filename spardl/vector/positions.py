"""Increasing positions: which of them others have, and what is at some places and at all others."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from spardl.vector.kernels import compiled

__all__ = ["increasing", "split", "within"]


def increasing(positions: Tensor) -> bool:
    """Whether each of ``positions``, int64, shape (m,), is above the one before."""
    return bool((positions[1:] > positions[:-1]).all())


def within(positions: Tensor, others: Tensor) -> Tensor:
    """At which places of some positions there are some of others.

    Args:
        positions: int64, shape (m,), no two equal; fastest if they increase, or fall only a few times.
        others: int64, shape (l,), strictly increasing.

    Returns:
        int64, shape (found,), strictly increasing: places from 0 to m - 1.
    """
    if not compiled(positions):
        return torch.isin(positions, others, assume_unique=True).nonzero().squeeze(1)
    from spardl.vector.kernels import positions as kernels  # noqa: PLC0415 - takes seconds to import

    out = torch.empty_like(positions)
    return out[: kernels.within(positions.numpy(), others.numpy(), out.numpy())]


def split(tensor: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """Cuts a tensor in two.

    Args:
        tensor: shape (m,).
        places: int64, shape (l,), strictly increasing, in ``[0, m)``.

    Returns:
        What is at these places, shape (l,), and what is at all others, shape (m - l,), in their order.
    """
    if not compiled(tensor):
        others = torch.ones(tensor.numel(), dtype=torch.bool, device=tensor.device)
        others[places] = False
        return tensor[places], tensor[others]
    from spardl.vector.kernels import positions as kernels  # noqa: PLC0415

    count = places.numel()
    chosen, others = tensor.new_empty(count), tensor.new_empty(tensor.numel() - count)
    kernels.split(_raw(tensor), places.numpy(), _raw(chosen), _raw(others))
    return chosen, others


def _raw(tensor: Tensor) -> Any:
    # Copied as they are; numpy has no bfloat16.
    same = tensor.detach()
    return (same.view(torch.int16) if same.itemsize == 2 else same).numpy()
