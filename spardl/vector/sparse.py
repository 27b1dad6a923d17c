"""Sorted sparse vectors: the one form in which sparse gradients are added, cut and re-selected."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from spardl.vector.bounds import clip_overflow
from spardl.vector.kernels import compiled
from spardl.vector.positions import split
from spardl.vector.selection import top_k

__all__ = ["SparseVector", "Sum", "concatenate", "merge"]

_COMPILED_TYPES = (torch.float32, torch.float64)


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
        """Splits into the ``k`` entries of largest magnitude (ties: lowest index) and the others."""
        if k >= len(self):
            return self, self.at(self.indices[:0])
        places = top_k(self.values, k)
        (kept, others), (values, rest) = split(self.indices, places), split(self.values, places)
        return SparseVector(kept, values, self.length), SparseVector(others, rest, self.length)

    def largest(self, k: int) -> SparseVector:
        """The ``k`` entries of largest magnitude (ties: lowest index)."""
        return self if k >= len(self) else self.at(top_k(self.values, k))

    def at(self, places: Tensor) -> SparseVector:
        """Some of the entries that are stored, by their ``places``: int64, shape (m,), increasing."""
        return SparseVector(self.indices[places], self.values[places], self.length)

    def divided(self, divisor: float) -> SparseVector:
        """The vector divided by a number, ``divisor``."""
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

    Each index is added up from +0 and the first vector to the last, so the result is the same to the last bit
    wherever the same sequence is merged, on any device (no atomic additions). A sum is never -0; one that overflows is
    the largest number of its type.

    Args:
        vectors: at least one vector, all finite.

    Returns:
        Their sum, on the union of their indices.
    """
    values = vectors[0].values
    add = _merge_compiled if compiled(values) and values.dtype in _COMPILED_TYPES else _merge
    total = add(vectors)
    clip_overflow(total.values)
    return total


def _merge_compiled(vectors: Sequence[SparseVector]) -> SparseVector:
    from spardl.vector.kernels import merging  # noqa: PLC0415

    total = sum(len(vector) for vector in vectors)
    indices, values = torch.empty(total, dtype=torch.int64), vectors[0].values.new_empty(total)
    out = indices.numpy(), values.numpy()
    if len(vectors) == 2:
        one, other = ((vector.indices.numpy(), vector.values.numpy()) for vector in vectors)
        count = merging.add_two(*one, *other, *out)
    else:
        ends = np.cumsum([len(vector) for vector in vectors])
        joined = (torch.cat([getattr(vector, part) for vector in vectors]).numpy() for part in ("indices", "values"))
        count = merging.add_all(*joined, ends, *out)
    return SparseVector(indices[:count], values[:count], vectors[0].length)


def _merge(vectors: Sequence[SparseVector]) -> SparseVector:
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
