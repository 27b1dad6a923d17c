"""Layout of a flat gradient: which range belongs to which tensor of the model."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain, pairwise
from typing import NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

__all__ = ["Layout", "Range", "Ranges"]


class Range(NamedTuple):
    """A range of a vector, and the number of entries to send from it.

    Attributes:
        start: First position of the range.
        stop: Position after the last one.
        k: Number of entries to send.
    """

    start: int
    stop: int
    k: int


class Ranges(Sequence[Range]):
    """Immutable sequence of ranges, stored as columns so that operations are vectorized over all ranges.

    Args:
        columns: int64 array of shape (3, r) with contiguous rows: starts, stops and k of the r ranges.
    """

    def __init__(self, columns: NDArray[np.int64]) -> None:
        self.columns = columns

    @classmethod
    def of(cls, parts: Sequence[Range]) -> Ranges:
        """Converts a sequence of ranges, ``parts``, to a ``Ranges``; returns it unchanged if it already is one."""
        if isinstance(parts, Ranges):
            return parts
        # fromiter: for thousands of ranges, np.array spends more time on checking that each has three numbers.
        table = np.fromiter(chain.from_iterable(parts), np.int64, 3 * len(parts)).reshape(-1, 3)
        return cls(np.ascontiguousarray(table.T))

    def __len__(self) -> int:
        return int(self.columns.shape[1])

    @overload
    def __getitem__(self, place: int) -> Range: ...

    @overload
    def __getitem__(self, place: slice) -> Ranges: ...

    def __getitem__(self, place: int | slice) -> Range | Ranges:
        return Ranges(self.columns[:, place]) if isinstance(place, slice) else Range(*self.columns[:, place].tolist())

    def __iter__(self) -> Iterator[Range]:
        return map(Range._make, zip(*self.columns.tolist(), strict=True))

    @cached_property
    def start(self) -> int:
        """First position of the first range."""
        return int(self.columns[0, 0])

    @cached_property
    def length(self) -> int:
        """Total number of entries in the ranges."""
        starts, stops, _ = self.columns
        return int(stops.sum() - starts.sum())

    @cached_property
    def wanted(self) -> int:
        """Total number of entries to send: the sum of all k."""
        return int(self.columns[2].sum())

    @cached_property
    def sending(self) -> Ranges:
        """The ranges from which entries are sent (k above 0), with k limited to the length of the range."""
        starts, stops, wanted = self.columns
        sent = np.minimum(wanted, stops - starts)
        if np.array_equal(sent, wanted) and sent.all():
            return self
        return Ranges(np.stack([each[sent > 0] for each in (starts, stops, sent)]))

    @cached_property
    def spans(self) -> list[tuple[int, int]]:
        """Intervals (start, stop) that the ranges cover; adjacent ranges are merged."""
        starts, stops, _ = self.columns
        breaks = np.flatnonzero(starts[1:] != stops[:-1])
        firsts, lasts = np.append(0, breaks + 1), np.append(breaks, len(self) - 1)
        return list(zip(starts[firsts].tolist(), stops[lasts].tolist(), strict=True)) if len(self) else []


@dataclass(frozen=True)
class Layout:
    """Shapes of tensors that are concatenated into one vector.

    Args:
        shapes: Shapes of the tensors, in the order of the vector.
        cut_from: For each tensor, the number of entries of the tensor that it was cut from (its own number if it is
            whole); empty if all tensors are whole.
    """

    shapes: tuple[tuple[int, ...], ...]
    cut_from: tuple[int, ...] = ()

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        # Cached: caches are looked up by layout in every step.
        return hash((self.shapes, self.cut_from))

    @classmethod
    def of(cls, shapes: Iterable[Sequence[int]]) -> Layout:
        """Returns the layout of tensors with the given ``shapes``."""
        return cls(tuple(tuple(shape) for shape in shapes))

    @classmethod
    def flat(cls, length: int) -> Layout:
        """Returns the layout of a vector that consists of a single tensor with ``length`` entries."""
        return cls(((length,),))

    @cached_property
    def length(self) -> int:
        """Number of entries of the vector."""
        return sum(map(math.prod, self.shapes))

    @cached_property
    def tensors(self) -> list[tuple[int, int]]:
        """Range (start, stop) of each tensor in the vector."""
        return list(pairwise(accumulate(map(math.prod, self.shapes), initial=0)))

    @property
    def wholes(self) -> tuple[int, ...]:
        """For each tensor, the number of entries of the tensor that it was cut from (its own number if it is whole)."""
        return self.cut_from or tuple(map(math.prod, self.shapes))

    def part(self, start: int, stop: int) -> Layout:
        """Returns the layout of a range of the vector.

        Tensors inside the range keep their shapes. The covered entries of other tensors become a vector, or one column
        if the tensor has two or more dimensions.

        Args:
            start: Position of the first entry.
            stop: Position after the last entry.

        Returns:
            A layout with one tensor for each tensor that the range covers at least partly.
        """
        shapes, wholes = [], []
        for shape, (low, high), whole in zip(self.shapes, self.tensors, self.wholes, strict=True):
            inside = min(high, stop) - max(low, start)
            if inside > 0:
                shapes.append(shape if inside == high - low else (inside, *(1,) * (len(shape) > 1)))
                wholes.append(whole)
        return Layout(tuple(shapes), tuple(wholes))

    def buckets(self, entries: int) -> list[tuple[int, int]]:
        """Divides the vector into ranges of whole tensors, each of at least ``entries`` entries except the last one."""
        found: list[tuple[int, int]] = []
        begin = 0
        for _, end in self.tensors:
            if end - begin >= entries:
                found.append((begin, end))
                begin = end
        if begin < self.length:
            found.append((begin, self.length))
        return found
