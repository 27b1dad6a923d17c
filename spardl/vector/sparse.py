"""Sparse vectors with sorted indices, and access to single entries of dense vectors.

``SparseVector`` is the form in which sparse gradients are summed, clipped and re-selected. In functions on dense
vectors, ``values`` has shape (n,), and ``positions`` has shape (k,) and holds distinct int64 indices in ``[0, n)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from spardl.vector.bits import INTEGERS
from spardl.vector.kernels import MOST_PER_PROGRAM, compiled, runs_triton
from spardl.vector.norms import Magnitudes, clip_overflow, host_reads, largest_magnitude
from spardl.vector.selection import top_k, top_k_unread

__all__ = [
    "SparseVector",
    "Sum",
    "add",
    "concatenate",
    "cut",
    "cut_to_bfloat16",
    "gather",
    "increasing",
    "is_within",
    "merge",
    "merge_padded",
    "put",
    "split",
    "top_padded",
    "undo",
    "within",
]


# Integer types for raw copies of entries: numpy has no bfloat16.


def gather(values: Tensor, positions: Tensor) -> Tensor:
    """Returns the entries of ``values`` at ``positions``, shape (k,), in new memory."""
    if not compiled(values):
        return values[positions]
    from spardl.vector.kernels import entries  # noqa: PLC0415 - takes seconds to import

    out = values.new_empty(positions.numel())
    entries.gather(_raw(values), positions.numpy(), _raw(out))
    return out


def put(values: Tensor, positions: Tensor, new: Tensor) -> None:
    """Overwrites the entries of ``values`` at ``positions`` with ``new``, shape (k,), of the same dtype."""
    if not compiled(values):
        values[positions] = new
        return
    from spardl.vector.kernels import entries  # noqa: PLC0415

    entries.put(_raw(values), positions.numpy(), _raw(new))


def undo(values: Tensor, changes: Sequence[tuple[Tensor, Tensor]], kept: Tensor) -> float:
    """Undoes changes to a vector, the last one first, except at the kept positions.

    Args:
        values: Vector of shape (n,), modified in place.
        changes: For each change, its positions, and the entries before it, shape (k,), in the vector's dtype. This is
            fastest if the positions consist of few increasing sequences.
        kept: int64 positions of shape (l,), strictly increasing, that are not reverted.

    Returns:
        The largest magnitude of the kept entries, or only of those that had changed; NaN if one is NaN. On a GPU, where
        the host would have to wait for this, non-finite kept entries become zero and 0 is returned.
    """
    if not compiled(values):
        stays = values[kept]
        for positions, before in reversed(changes):
            values[positions] = before
        if not host_reads(values):
            # The caller would clear overflow after reading the magnitude, so clear it here without a wait.
            values[kept] = stays.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
            return 0.0
        values[kept] = stays
        return largest_magnitude([stays])
    from spardl.vector.kernels import entries  # noqa: PLC0415

    raw, own, magnitudes = _raw(values), kept.numpy(), Magnitudes.of(values.dtype)
    mask, most = magnitudes.mask, 0
    for positions, before in reversed(changes):
        most = max(most, entries.put_others(raw, mask, positions.numpy(), _raw(before), own))
    return magnitudes.number_of(most)


def cut(values: Tensor, positions: Tensor) -> Tensor:
    """Returns the entries of ``values`` at ``positions``, shape (k,), and sets them to zero in ``values``."""
    if not compiled(values):
        out = values[positions]
        values[positions] = 0
        return out
    from spardl.vector.kernels import entries  # noqa: PLC0415

    out = values.new_empty(positions.numel())
    entries.cut(_raw(values), positions.numpy(), _raw(out))
    return out


def cut_to_bfloat16(values: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rounds float32 entries to bfloat16 and keeps the rounding errors in the vector; requires compiled kernels.

    Returns:
        Three tensors of shape (k,): the original entries, the entries rounded like ``Wire.rounded``, and the rounding
        errors that have replaced them in the vector.
    """
    from spardl.vector.kernels import entries  # noqa: PLC0415

    before, sent, errors = (values.new_empty(positions.numel()) for _ in range(3))
    entries.cut_to_bfloat16(values.detach().numpy(), positions.numpy(), before.numpy(), sent.numpy(), errors.numpy())
    return before, sent, errors


def add(values: Tensor, positions: Tensor, amounts: Tensor) -> tuple[Tensor, float]:
    """Adds ``amounts``, shape (k,), of the same dtype, to the entries of ``values`` at ``positions``.

    Returns:
        The previous entries, shape (k,), and the largest magnitude of the amounts (NaN if one is NaN).
    """
    # numba cannot add 16-bit floats.
    if not compiled(values) or values.itemsize == 2:
        before = values[positions]
        values[positions] = before + amounts
        return before, largest_magnitude([amounts])
    from spardl.vector.kernels import entries  # noqa: PLC0415

    before = values.new_empty(positions.numel())
    peak = entries.add(values.detach().numpy(), positions.numpy(), amounts.numpy(), before.numpy())
    return before, float(peak)


def _raw(values: Tensor) -> Any:
    return values.detach().view(INTEGERS[values.itemsize]).numpy()


# Operations on increasing positions.


def increasing(positions: Tensor) -> bool:
    """Returns whether ``positions``, int64, shape (m,), are strictly increasing."""
    return bool((positions[1:] > positions[:-1]).all())


def within(positions: Tensor, others: Tensor) -> Tensor:
    """Finds those positions that also occur in a second list.

    Args:
        positions: Distinct int64 positions of shape (m,); fastest if they consist of few increasing sequences.
        others: int64 positions of shape (l,), strictly increasing.

    Returns:
        Indices into ``positions`` of those found: int64 tensor of shape (found,), strictly increasing.
    """
    if not compiled(positions):
        return torch.isin(positions, others, assume_unique=True).nonzero().squeeze(1)
    from spardl.vector.kernels import entries as kernels  # noqa: PLC0415 - takes seconds to import

    out = torch.empty_like(positions)
    return out[: kernels.within(positions.numpy(), others.numpy(), out.numpy())]


def is_within(positions: Tensor, others: Tensor) -> Tensor:
    """Determines for each position whether it occurs in a second list; the host does not wait for a GPU.

    Args:
        positions: int64 positions of shape (m,), in any order.
        others: int64 positions of shape (l,), increasing, possibly repeated.

    Returns:
        Bool tensor of shape (m,).
    """
    if not others.numel():
        return torch.zeros_like(positions, dtype=torch.bool)
    places = torch.searchsorted(others, positions).clamp_(max=others.numel() - 1)
    return others[places] == positions


def split(tensor: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """Splits a tensor into selected and other entries.

    Args:
        tensor: Tensor of shape (m,).
        places: int64 indices of shape (l,), strictly increasing, in ``[0, m)``.

    Returns:
        The entries at these indices, shape (l,), and all others in order, shape (m - l,).
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
    # Only 2-byte types need a raw view: numpy has no bfloat16, and indices and floats keep their type.
    same = tensor.detach()
    return (same.view(torch.int16) if same.itemsize == 2 else same).numpy()


_COMPILED_TYPES = (torch.float32, torch.float64)
# Kernels search each index in every vector; torch is faster for more vectors.
_MOST_ADDED = 8


@dataclass(frozen=True, slots=True)
class SparseVector:
    """A vector that stores only some of its entries; all others are zero.

    Attributes:
        indices: int64 tensor of shape (count,), strictly increasing, in ``[0, length)``. Every operation keeps this
            order, because an intersection of unsorted indices would be silently wrong.
        values: Tensor of shape (count,), on the same device. A stored value may be zero.
        length: Length of the dense vector, in entries.
    """

    indices: Tensor
    values: Tensor
    length: int

    def __len__(self) -> int:
        return self.indices.numel()

    def top(self, k: int) -> tuple[SparseVector, SparseVector]:
        """Splits the vector into two: the ``k`` entries of largest magnitude (ties: lowest index), and all others."""
        if k >= len(self):
            return self, self.at(self.indices[:0])
        places = top_k(self.values, k)
        (kept, others), (values, rest) = split(self.indices, places), split(self.values, places)
        return SparseVector(kept, values, self.length), SparseVector(others, rest, self.length)

    def largest(self, k: int) -> SparseVector:
        """Returns the ``k`` entries of largest magnitude (ties: lowest index)."""
        return self if k >= len(self) else self.at(top_k(self.values, k))

    def at(self, places: Tensor) -> SparseVector:
        """Returns the stored entries at some ``places`` in ``indices``: int64, shape (m,), increasing."""
        return SparseVector(self.indices[places], self.values[places], self.length)

    def divided(self, divisor: float) -> SparseVector:
        """Returns the vector divided by a number, ``divisor``; the vector itself if that is 1."""
        return self if divisor == 1 else SparseVector(self.indices, self.values / divisor, self.length)

    def dense(self) -> Tensor:
        """Returns the vector as a new dense tensor, shape (length,)."""
        out = torch.zeros(self.length, dtype=self.values.dtype, device=self.values.device)
        out[self.indices] = self.values
        return out


Sum: TypeAlias = SparseVector | Tensor
"""Sum over all workers: sparse, or dense of shape (n,)."""


def merge(vectors: Sequence[SparseVector]) -> SparseVector:
    """Sums vectors of the same length, in the given order.

    Each entry is summed from +0 and from the first vector to the last, without atomic additions, so the result has the
    same bits on any device. A sum is never -0; a sum that overflows becomes the largest finite number of its dtype.

    Args:
        vectors: Finite vectors, at least one.

    Returns:
        The sum, on the union of the indices.
    """
    values = vectors[0].values
    if _adds_on_gpu(vectors):
        padded = _merge_on_gpu(vectors)
        return padded.at(_first_of_each(padded.indices))
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


# Fixed sizes for GPUs. The size of a union depends on values, so the host would have to wait for it. A padded vector
# instead repeats some entries, with equal index and value. Reading or writing an entry twice changes nothing.


def merge_padded(vectors: Sequence[SparseVector]) -> SparseVector:
    """Sums vectors like ``merge``, without reading the size of the union from a GPU.

    Args:
        vectors: Finite vectors of the same length, at least one, without repeated entries.

    Returns:
        The sum as a *padded* vector, which has as many entries as all vectors together: an index that occurs in several
        vectors is repeated, each time with its sum.
    """
    if _adds_on_gpu(vectors):
        return _merge_on_gpu(vectors)
    indices = torch.cat([vector.indices for vector in vectors]).sort().values
    sums = vectors[0].values.new_zeros(indices.numel())
    # The first of equal indices collects the sum, in the order of the vectors.
    for vector in vectors:
        sums[torch.searchsorted(indices, vector.indices)] += vector.values
    values = sums[torch.searchsorted(indices, indices)]
    return SparseVector(indices, clip_overflow(values), vectors[0].length)


def _first_of_each(indices: Tensor) -> Tensor:
    """Places of the indices that do not repeat the one before them; reads their number."""
    first = torch.ones_like(indices, dtype=torch.bool)
    torch.ne(indices[1:], indices[:-1], out=first[1:])
    return first.nonzero().squeeze(1)


def _adds_on_gpu(vectors: Sequence[SparseVector]) -> bool:
    """Whether kernels add vectors: they compute in float32, and search each index in every vector."""
    values = vectors[0].values
    return runs_triton(values) and values.itemsize <= 4 and len(vectors) <= _MOST_ADDED


def _merge_on_gpu(vectors: Sequence[SparseVector]) -> SparseVector:
    from spardl.vector.kernels import gpu_merge  # noqa: PLC0415 - triton is installed only with CUDA

    indices, values = (torch.cat([getattr(vector, part) for vector in vectors]) for part in ("indices", "values"))
    return SparseVector(*gpu_merge.merge(indices, values, tuple(map(len, vectors))), vectors[0].length)


def top_padded(merged: SparseVector, k: int) -> tuple[SparseVector, SparseVector]:
    """Splits a padded sum of two vectors into the k entries of largest magnitude and all others.

    Args:
        merged: Result of ``merge_padded`` for two vectors, with at least k different indices.
        k: Number of entries to keep.

    Returns:
        The k entries of largest magnitude (ties: lowest index), without repetitions, and all others. If one of the
        others repeats a kept entry, its value is -0, which changes no sum.
    """
    indices, values = merged.indices, merged.values
    if _adds_on_gpu([merged]) and k and indices.numel() <= MOST_PER_PROGRAM:
        from spardl.vector.kernels import gpu, gpu_merge, gpu_select  # noqa: PLC0415

        table = gpu_select.table_of_all(indices.numel(), k, indices.device, gpu.stream_of(indices.device))
        places = gpu_select.select_from_all(gpu_merge.magnitudes(indices, values), k, table)
        parts = gpu_merge.split(indices, values, places)
        return SparseVector(*parts[:2], merged.length), SparseVector(*parts[2:], merged.length)
    repeated = torch.zeros_like(indices, dtype=torch.bool)
    torch.eq(indices[1:], indices[:-1], out=repeated[1:])
    places = top_k_unread(torch.where(repeated, -1, values.abs()), k)
    kept = torch.zeros_like(repeated).index_fill_(0, places, True)
    others = torch.nonzero_static(~kept, size=indices.numel() - k).squeeze(1)
    # An index occurs at most twice, so a repeated entry follows the one that was compared.
    kept[1:] |= kept[:-1] & repeated[1:]
    rest = torch.where(kept[others], -0.0, values[others])
    return merged.at(places), SparseVector(indices[others], rest, merged.length)


def concatenate(blocks: Sequence[SparseVector]) -> SparseVector:
    """Concatenates sparse vectors to a longer one, in which each vector starts where the previous one ends."""
    starts = [0]
    for block in blocks:
        starts.append(starts[-1] + block.length)
    indices = torch.cat([block.indices + start for block, start in zip(blocks, starts, strict=False)])
    return SparseVector(indices, torch.cat([block.values for block in blocks]), starts[-1])
