"""Sorted sparse vectors, and access to single entries of dense ones.

``SparseVector`` is the form in which sparse gradients are added, clipped and re-selected. In functions on dense
vectors, ``values`` has shape (n,), and ``positions`` has shape (k,) and holds distinct int64 indices in ``[0, n)``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from spardl.vector.kernels import compiled
from spardl.vector.norms import Magnitudes, clip_overflow, largest
from spardl.vector.selection import top_k

__all__ = [
    "SparseVector",
    "Sum",
    "add",
    "concatenate",
    "cut",
    "cut_to_bfloat16",
    "gather",
    "increasing",
    "merge",
    "put",
    "split",
    "undo",
    "within",
]


# Single entries of a dense vector: read, replace, remove, add.


_BITS: Mapping[int, torch.dtype] = MappingProxyType({2: torch.int16, 4: torch.int32, 8: torch.int64})


def gather(values: Tensor, positions: Tensor) -> Tensor:
    """The entries, shape (k,)."""
    if not compiled(values):
        return values[positions]
    from spardl.vector.kernels import entries  # noqa: PLC0415 - takes seconds to import

    out = values.new_empty(positions.numel())
    entries.gather(_raw(values), positions.numpy(), _raw(out))
    return out


def put(values: Tensor, positions: Tensor, new: Tensor) -> None:
    """Replaces the entries by others, shape (k,), of the same type."""
    if not compiled(values):
        values[positions] = new
        return
    from spardl.vector.kernels import entries  # noqa: PLC0415

    entries.put(_raw(values), positions.numpy(), _raw(new))


def undo(values: Tensor, changes: Sequence[tuple[Tensor, Tensor]], kept: Tensor) -> float:
    """Takes changes back, the last one first, but for some positions, where everything stays.

    Args:
        values: the vector.
        changes: the positions of each, fastest if they increase, or fall only a few times; and what was there before,
            shape (k,), of the vector's type.
        kept: int64, shape (l,), strictly increasing: positions that stay.

    Returns:
        The largest magnitude of what stayed: of all that had changed, at least; NaN if there is one.
    """
    if not compiled(values):
        stays = values[kept]
        for positions, before in reversed(changes):
            values[positions] = before
        values[kept] = stays
        return largest([stays])
    from spardl.vector.kernels import entries  # noqa: PLC0415

    raw, own, magnitudes = _raw(values), kept.numpy(), Magnitudes.of(values.dtype)
    mask, most = magnitudes.mask, 0
    for positions, before in reversed(changes):
        most = max(most, entries.put_others(raw, mask, positions.numpy(), _raw(before), own))
    return magnitudes.number_of(most)


def cut(values: Tensor, positions: Tensor) -> Tensor:
    """The entries, shape (k,), which become zero."""
    if not compiled(values):
        out = values[positions]
        values[positions] = 0
        return out
    from spardl.vector.kernels import entries  # noqa: PLC0415

    out = values.new_empty(positions.numel())
    entries.cut(_raw(values), positions.numpy(), _raw(out))
    return out


def cut_to_bfloat16(values: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Leaves of float32 entries what bfloat16 lacks of them; only where kernels are ``compiled``.

    Returns:
        The entries, what bfloat16 makes of them, as ``Wire.rounded`` does, and the difference, which they become.
    """
    from spardl.vector.kernels import entries  # noqa: PLC0415

    before, sent, errors = (values.new_empty(positions.numel()) for _ in range(3))
    entries.cut_to_bfloat16(values.detach().numpy(), positions.numpy(), before.numpy(), sent.numpy(), errors.numpy())
    return before, sent, errors


def add(values: Tensor, positions: Tensor, amounts: Tensor) -> tuple[Tensor, float]:
    """Adds amounts, shape (k,), of the same type, to the entries.

    Returns:
        What they were before, shape (k,), and the largest magnitude of the amounts; NaN if there is one.
    """
    if not compiled(values) or values.itemsize == 2:
        before = values[positions]
        values[positions] = before + amounts
        return before, largest([amounts])
    from spardl.vector.kernels import entries  # noqa: PLC0415

    before = values.new_empty(positions.numel())
    peak = entries.add(values.detach().numpy(), positions.numpy(), amounts.numpy(), before.numpy())
    return before, float(peak)


def _raw(values: Tensor) -> Any:
    # Copied as they are: numpy has no bfloat16.
    return values.detach().view(_BITS[values.itemsize]).numpy()


# Increasing positions: which of them others have, and what is at some places and at all others.


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
    from spardl.vector.kernels import entries as kernels  # noqa: PLC0415 - takes seconds to import

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
    from spardl.vector.kernels import entries as kernels  # noqa: PLC0415

    count = places.numel()
    chosen, others = tensor.new_empty(count), tensor.new_empty(tensor.numel() - count)
    kernels.split(_raw_bits(tensor), places.numpy(), _raw_bits(chosen), _raw_bits(others))
    return chosen, others


def _raw_bits(tensor: Tensor) -> Any:
    # Copied as they are; numpy has no bfloat16.
    same = tensor.detach()
    return (same.view(torch.int16) if same.itemsize == 2 else same).numpy()


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
    from spardl.vector.kernels import entries  # noqa: PLC0415

    total = sum(len(vector) for vector in vectors)
    indices, values = torch.empty(total, dtype=torch.int64), vectors[0].values.new_empty(total)
    out = indices.numpy(), values.numpy()
    if len(vectors) == 2:
        one, other = ((vector.indices.numpy(), vector.values.numpy()) for vector in vectors)
        count = entries.add_two(*one, *other, *out)
    else:
        ends = np.cumsum([len(vector) for vector in vectors])
        joined = (torch.cat([getattr(vector, part) for vector in vectors]).numpy() for part in ("indices", "values"))
        count = entries.add_all(*joined, ends, *out)
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
