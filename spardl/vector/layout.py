"""Which part of a flat gradient belongs to which tensor of the model."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain, pairwise
from typing import NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

__all__ = ["Layout", "Part", "Parts"]


class Part(NamedTuple):
    """A range of a vector with a budget of its own.

    Attributes:
        start: first position.
        stop: the position after the last.
        k: entries to send of it.
    """

    start: int
    stop: int
    k: int


class Parts(Sequence[Part]):
    """Ranges as columns of numbers, none of which is changed: what is done to each is done to all at once.

    Args:
        columns: int64, shape (3, r), each row contiguous: where ranges start, where they stop, and their k.
    """

    def __init__(self, columns: NDArray[np.int64]) -> None:
        self.columns = columns

    @classmethod
    def of(cls, parts: Sequence[Part]) -> Parts:
        """The same ``parts`` in this form."""
        if isinstance(parts, Parts):
            return parts
        # Of thousands of parts, numpy is slower to find out that each has three numbers.
        table = np.fromiter(chain.from_iterable(parts), np.int64, 3 * len(parts)).reshape(-1, 3)
        return cls(np.ascontiguousarray(table.T))

    def __len__(self) -> int:
        return int(self.columns.shape[1])

    @overload
    def __getitem__(self, place: int) -> Part: ...

    @overload
    def __getitem__(self, place: slice) -> Parts: ...

    def __getitem__(self, place: int | slice) -> Part | Parts:
        return Parts(self.columns[:, place]) if isinstance(place, slice) else Part(*self.columns[:, place].tolist())

    def __iter__(self) -> Iterator[Part]:
        return map(Part._make, zip(*self.columns.tolist(), strict=True))

    @cached_property
    def start(self) -> int:
        """The first position of the first one."""
        return int(self.columns[0, 0])

    @cached_property
    def length(self) -> int:
        """Entries of all ranges together."""
        starts, stops, _ = self.columns
        return int(stops.sum() - starts.sum())

    @cached_property
    def wanted(self) -> int:
        """Entries that are wanted of all ranges together: the sum of all k."""
        return int(self.columns[2].sum())

    @cached_property
    def sending(self) -> Parts:
        """Those of which entries are sent, no more than they have."""
        starts, stops, wanted = self.columns
        sent = np.minimum(wanted, stops - starts)
        if np.array_equal(sent, wanted) and sent.all():
            return self
        return Parts(np.stack([each[sent > 0] for each in (starts, stops, sent)]))

    @cached_property
    def spans(self) -> list[tuple[int, int]]:
        """What they cover: ranges that adjoin are one."""
        starts, stops, _ = self.columns
        breaks = np.flatnonzero(starts[1:] != stops[:-1])
        firsts, lasts = np.append(0, breaks + 1), np.append(breaks, len(self) - 1)
        return list(zip(starts[firsts].tolist(), stops[lasts].tolist(), strict=True)) if len(self) else []


@dataclass(frozen=True)
class Layout:
    """Tensors laid end to end in one vector.

    Args:
        shapes: of the tensors, in the order of the vector.
        cut_from: entries of the tensors that these are pieces of; empty if they are whole.
    """

    shapes: tuple[tuple[int, ...], ...]
    cut_from: tuple[int, ...] = ()

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Asked for in every step, to look up what depends on the layout."""
        return hash((self.shapes, self.cut_from))

    @classmethod
    def of(cls, shapes: Iterable[Sequence[int]]) -> Layout:
        """The layout of tensors with these ``shapes``."""
        return cls(tuple(tuple(shape) for shape in shapes))

    @classmethod
    def flat(cls, length: int) -> Layout:
        """One vector of ``length`` entries, of unknown parts."""
        return cls(((length,),))

    @cached_property
    def length(self) -> int:
        """Entries of the whole vector."""
        return sum(map(math.prod, self.shapes))

    @cached_property
    def tensors(self) -> list[tuple[int, int]]:
        """The range of each tensor."""
        return list(pairwise(accumulate(map(math.prod, self.shapes), initial=0)))

    @property
    def wholes(self) -> tuple[int, ...]:
        """Entries of the tensors that these are pieces of."""
        return self.cut_from or tuple(map(math.prod, self.shapes))

    def part(self, start: int, stop: int) -> Layout:
        """The layout of a range. The piece of a tensor that it cuts is a vector, of a matrix a column.

        Args:
            start: position of its first entry.
            stop: position after its last one.

        Returns:
            With a tensor for each piece.
        """
        shapes, wholes = [], []
        for shape, (low, high), whole in zip(self.shapes, self.tensors, self.wholes, strict=True):
            inside = min(high, stop) - max(low, start)
            if inside > 0:
                shapes.append(shape if inside == high - low else (inside, *(1,) * (len(shape) > 1)))
                wholes.append(whole)
        return Layout(tuple(shapes), tuple(wholes))

    def buckets(self, entries: int) -> list[tuple[int, int]]:
        """Ranges of neighbouring tensors, closed as soon as they hold so many ``entries``; a tensor is never cut."""
        found: list[tuple[int, int]] = []
        begin = 0
        for _, end in self.tensors:
            if end - begin >= entries:
                found.append((begin, end))
                begin = end
        if begin < self.length:
            found.append((begin, self.length))
        return found
