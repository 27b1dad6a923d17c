"""Which entries of a vector are kept: exact selection with a rule for ties."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["top_k"]


def top_k(values: Tensor, k: int) -> Tensor:
    """The positions of the k entries of largest magnitude.

    Ties go to the lowest index, so equal inputs give equal selections on every worker and device.

    Args:
        values: floating point, shape (n,), finite.
        k: how many; at most 0 selects nothing, at least n selects everything.

    Returns:
        int64, shape (min(max(k, 0), n),), strictly increasing.
    """
    length = values.numel()
    if k >= length:
        return torch.arange(length, device=values.device)
    if k <= 0:
        return torch.empty(0, dtype=torch.int64, device=values.device)
    magnitude = values.abs()
    threshold = magnitude.kthvalue(length - k + 1).values
    candidates = (magnitude >= threshold).nonzero().squeeze(1)
    if candidates.numel() == k:
        return candidates
    return _drop_late_ties(candidates, magnitude[candidates] > threshold, k)


def _drop_late_ties(candidates: Tensor, above: Tensor, k: int) -> Tensor:
    """Keeps every candidate above the threshold and as many of the equal ones, from the front, as fit."""
    room = k - int(above.sum())
    return candidates[above | (torch.cumsum(~above, 0) <= room)]
