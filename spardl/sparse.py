"""Sorted sparse vectors: the one form in which sparse gradients are added, cut and re-selected."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from spardl.selection import top_k

__all__ = ["SparseVector", "Sum", "concatenate", "merge"]


@dataclass(frozen=True, slots=True)
class SparseVector:
    """A vector of which only some entries are stored.

    Attributes:
        indices: int64, shape (count,), strictly increasing, in ``[0, length)``. Every operation keeps
            this order, because an intersection over unsorted indices is silently wrong.
        values: shape (count,), same device. A stored value may be zero.
        length: length of the dense vector that this one stands for.
    """

    indices: Tensor
    values: Tensor
    length: int

    def __len__(self) -> int:
        return self.indices.numel()

    def top(self, k: int) -> tuple[SparseVector, SparseVector]:
        """Splits into the k entries of largest magnitude (ties: lowest index) and the others."""
        kept = torch.zeros(len(self), dtype=torch.bool, device=self.indices.device)
        kept[top_k(self.values, k)] = True
        return self._where(kept), self._where(~kept)

    def _where(self, mask: Tensor) -> SparseVector:
        return SparseVector(self.indices[mask], self.values[mask], self.length)

    def divided(self, divisor: float) -> SparseVector:
        """The vector divided by a number."""
        return SparseVector(self.indices, self.values / divisor, self.length)

    def dense(self) -> Tensor:
        """The dense vector, shape (length,)."""
        out = torch.zeros(self.length, dtype=self.values.dtype, device=self.values.device)
        out[self.indices] = self.values
        return out


Sum: TypeAlias = SparseVector | Tensor
"""A sum over all workers: on a sorted set of indices, or dense with shape (n,)."""


def merge(vectors: Sequence[SparseVector]) -> SparseVector:
    """Adds vectors of one length, in the order given.

    Each index is added up from the first vector to the last, so the result is the same to the last bit
    wherever the same sequence is merged, on any device (no atomic additions).

    Args:
        vectors: at least one vector.

    Returns:
        Their sum, on the union of their indices.
    """
    union = torch.cat([vector.indices for vector in vectors]).unique(sorted=True)
    values = torch.zeros(union.numel(), dtype=vectors[0].values.dtype, device=union.device)
    for vector in vectors:
        values[torch.searchsorted(union, vector.indices)] += vector.values
    return SparseVector(union, values, vectors[0].length)


def concatenate(blocks: Sequence[SparseVector]) -> SparseVector:
    """Puts vectors end to end: block i starts where block i-1 ends."""
    starts = [0]
    for block in blocks:
        starts.append(starts[-1] + block.length)
    indices = torch.cat([block.indices + start for block, start in zip(blocks, starts, strict=False)])
    return SparseVector(indices, torch.cat([block.values for block in blocks]), starts[-1])
