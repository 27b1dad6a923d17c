"""Which part of a flat gradient belongs to which tensor of the model."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

__all__ = ["Layout", "Part"]


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


@dataclass(frozen=True)
class Layout:
    """Tensors laid end to end in one vector.

    Args:
        shapes: of the tensors, in the order of the vector.
        cut_from: entries of the tensors that these are pieces of; empty if they are whole.
    """

    shapes: tuple[tuple[int, ...], ...]
    cut_from: tuple[int, ...] = ()

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
