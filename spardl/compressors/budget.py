"""How many entries are sent, and of which parts of the gradient: what all sparsifiers with a density share.

The density may start higher and fall exponentially, as in the warm-up of Deep Gradient Compression (Lin et al.,
ICLR 2018, section 3.4).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, overload

import numpy as np
import torch
from torch import Tensor

from spardl.basics.checks import check_choice, check_whole, is_a
from spardl.basics.errors import ConfigError
from spardl.compressors.base import SparseCompressor
from spardl.protocol.programs import Context, State
from spardl.vector.accumulator import Accumulator, Select
from spardl.vector.layout import Layout, Part, Parts
from spardl.vector.packing import NIBBLE

__all__ = ["AUTO", "CHUNK", "SCOPES", "Budget", "BudgetedCompressor", "Piece", "Pieces", "PiecewiseCompressor", "Scope"]

CHUNK = 4096
"""Entries of a chunk, as in SparseLoCo (Sarfi et al., arXiv 2508.15706)."""
AUTO = "auto"
"""The scope that was not chosen."""


class Scope(NamedTuple):
    """What is compared with what.

    Attributes:
        cut: ranges of a layout's vector, in order; told how many entries a bucket has.
        index_step: bits that the low ones of an index are a multiple of, see ``Slot``. For chunks, which are coded for
            the smallest message, 64 of 4,096 entries take 8 bits an index.
    """

    cut: Callable[[Layout, int], list[tuple[int, int]]]
    index_step: int = NIBBLE


_WHOLE = Scope(lambda layout, entries: [(0, layout.length)])
SCOPES: Mapping[str, Scope] = MappingProxyType(
    {
        AUTO: _WHOLE,
        "model": _WHOLE,
        "layer": Scope(lambda layout, entries: layout.tensors),
        "bucket": Scope(lambda layout, entries: layout.buckets(entries)),
        "chunk": Scope(
            lambda layout, entries: [
                (start, min(start + CHUNK, layout.length)) for start in range(0, layout.length, CHUNK)
            ],
            index_step=1,
        ),
    }
)


@dataclass(frozen=True)
class Budget:
    """How many entries of which parts.

    Args:
        density: k / n, the share of entries that is sent, in (0, 1]; lower is more aggressive.
        scope: what is compared with what: the whole ``model``, or each ``layer`` (tensor), ``bucket`` of neighbouring
            tensors or ``chunk`` of 4,096 entries alone. Each part gets at least one entry. ``auto``: the whole model;
            but for ``TopK`` each chunk, where the updates of Adam or AdamW are compressed (``momentum=auto``), unless
            the density is below one entry of a chunk.
        bucket_entries: size of a bucket, in entries; used by ``scope=bucket`` only.
        warmup_steps: synchronizations in which the density falls exponentially to its final value.
        warmup_density: k / n at the first of them.

    Attributes:
        chunks_updates: whether ``auto`` can stand for chunks.

    Raises:
        ConfigError: if a value is out of range.

    Example:
        >>> budget = spardl.TopK(density=0.01, warmup_steps=4)
        >>> [round(budget.density_at(step), 3) for step in range(6)]
        [0.25, 0.112, 0.05, 0.022, 0.01, 0.01]
    """

    chunks_updates: ClassVar[bool] = False

    density: float = 0.01
    scope: str = "auto"
    bucket_entries: int = 1 << 20
    warmup_steps: int = 0
    warmup_density: float = 0.25

    def __post_init__(self) -> None:
        for name in ("density", "warmup_density"):
            value = getattr(self, name)
            if not is_a(float, value) or not 0 < value <= 1:
                raise ConfigError(
                    f"compressor.{name} must be above 0 and at most 1, got {value!r}; 0.01 keeps 1% of the entries"
                )
        check_choice("compressor.scope", self.scope, SCOPES)
        check_whole("compressor.bucket_entries", self.bucket_entries, least=1)
        check_whole("compressor.warmup_steps", self.warmup_steps, least=0)

    @classmethod
    def takes_chunks(cls, scope: Any, density: Any) -> bool:
        """Looks up what an open scope comes to.

        Args:
            scope: of such a budget.
            density: of the same; neither has been checked.

        Returns:
            Whether the scope stands for chunks where Adam's updates are compressed.
        """
        return cls.chunks_updates and scope == AUTO and is_a(float, density) and density * CHUNK >= 1

    def density_at(self, step: int) -> float:
        """The density, k / n, at ``step``: a geometric sequence from ``warmup_density`` to ``density``."""
        if step >= self.warmup_steps:
            return self.density
        return float(self.warmup_density * (self.density / self.warmup_density) ** (step / self.warmup_steps))

    def parts(self, context: Context) -> list[Part]:
        """The parts of the vector in ``context`` and their budgets, in order; parts without entries are left out."""
        return list(_budgets(*self._key(context)))

    def pieces(self, blocks: Sequence[Part], context: Context) -> Pieces:
        """What of the vector in ``context`` lies in some ``blocks``, in their order, but where nothing is sent."""
        key = self._key(context)
        if len(_budgets(*key)) == 1:
            whole = Parts.of(blocks).sending
            return Pieces([0] * len(whole), whole)
        found = [_pieces(*key, block) for block in blocks]
        if len(found) == 1:
            return found[0]
        columns = [np.empty((3, 0), np.int64), *(each.ranges.columns for each in found)]
        return Pieces([number for each in found for number in each.numbers], Parts(np.concatenate(columns, axis=1)))

    def _key(self, context: Context) -> tuple[str, Layout, int, float]:
        return self.scope, context.layout, self.bucket_entries, self.density_at(context.step)


@lru_cache(maxsize=16)
def _budgets(scope: str, layout: Layout, bucket_entries: int, density: float) -> tuple[Part, ...]:
    """There can be thousands, and every step asks for them several times."""
    ranges = SCOPES[scope].cut(layout, bucket_entries)
    return tuple(Part(start, stop, _share(density, stop - start)) for start, stop in ranges if stop > start)


def _share(density: float, length: int) -> int:
    return min(length, max(1, round(density * length)))


class BudgetedCompressor(Budget, SparseCompressor):
    """A sparse compressor whose choice is made in each part of a budget alone."""

    @property
    def index_step(self) -> int:
        """Bits that the low ones of an index are a multiple of: as the scope has it."""
        return SCOPES[self.scope].index_step

    @abstractmethod
    def choose_all(self, accumulated: Accumulator, pieces: Pieces, context: Context, state: State) -> list[Tensor]:
        """Picks the entries to keep of some pieces.

        Args:
            accumulated: gradient plus residual.
            pieces: where, and how many.
            context: of this synchronization.
            state: this worker's.

        Returns:
            For each piece int64 positions in the whole vector, shape (m,) with m <= k or about k as ``output`` says,
            increasing.
        """

    def selector(self, context: Context, state: State) -> Select:
        """Cuts blocks at the borders of the parts, and chooses in each piece."""

        def select(accumulated: Accumulator, parts: Sequence[Part]) -> Tensor:
            chosen = self.choose_all(accumulated, self.pieces(parts, context), context, state)
            if len(chosen) == 1:
                return chosen[0]
            nothing = torch.empty(0, dtype=torch.int64, device=accumulated.values.device)
            return torch.cat(chosen) if chosen else nothing

        return select


class PiecewiseCompressor(BudgetedCompressor):
    """One that looks at a piece at a time."""

    @abstractmethod
    def choose(self, values: Tensor, k: int, part: int, context: Context, state: State) -> Tensor:
        """Picks the entries to keep of one piece.

        Args:
            values: shape (m,), m >= 1: a part, or the piece of it that lies in one block.
            k: entries wanted, at least 1 and at most m.
            part: number of the part.
            context: of this synchronization.
            state: this worker's.

        Returns:
            int64, shape (count,): strictly increasing positions in ``values``.
        """

    def choose_all(self, accumulated: Accumulator, pieces: Pieces, context: Context, state: State) -> list[Tensor]:
        """Piece by piece."""
        values = accumulated.values
        return [
            self.choose(values[piece.start : piece.stop], piece.k, piece.part, context, state) + piece.start
            for piece in pieces
        ]


class Piece(NamedTuple):
    """What of a part lies in one block.

    Attributes:
        part: number of the part.
        start: first position.
        stop: the position after the last.
        k: entries to send of it.
    """

    part: int
    start: int
    stop: int
    k: int


class Pieces(Sequence[Piece]):
    """Pieces in columns; of each, entries are sent.

    Args:
        numbers: of the parts.
        ranges: where they lie, and how many entries are sent of each.
    """

    def __init__(self, numbers: Sequence[int], ranges: Parts) -> None:
        self.numbers, self.ranges = numbers, ranges

    def __len__(self) -> int:
        return len(self.numbers)

    @overload
    def __getitem__(self, place: int) -> Piece: ...

    @overload
    def __getitem__(self, place: slice) -> Pieces: ...

    def __getitem__(self, place: int | slice) -> Piece | Pieces:
        if isinstance(place, slice):
            return Pieces(self.numbers[place], self.ranges[place])
        return Piece(self.numbers[place], *self.ranges[place])

    def __iter__(self) -> Iterator[Piece]:
        return (Piece(number, *part) for number, part in zip(self.numbers, self.ranges, strict=True))


class _Overlap(NamedTuple):
    part: int
    start: int
    stop: int
    # The part's budget, in proportion.
    wanted: float


@lru_cache(maxsize=128)
def _pieces(scope: str, layout: Layout, bucket_entries: int, density: float, block: Part) -> Pieces:
    """The pieces of all parts in a block, with their shares of the block's budget; there can be thousands."""
    found = []
    for number, part in enumerate(_budgets(scope, layout, bucket_entries, density)):
        low, high = max(part.start, block.start), min(part.stop, block.stop)
        if low < high:
            found.append(_Overlap(number, low, high, part.k * (high - low) / (part.stop - part.start)))
    shares = zip(found, _shares(found, block.k), strict=True)
    sending = [(each.part, Part(each.start, each.stop, share)) for each, share in shares if share]
    return Pieces([number for number, _ in sending], Parts.of([part for _, part in sending]))


def _shares(overlaps: Sequence[_Overlap], k: int) -> Iterator[int]:
    """Deals k entries out, or all there are; to whole parts their budgets, if k is the sum of these."""
    total, room = sum(each.wanted for each in overlaps), sum(each.stop - each.start for each in overlaps)
    left, due = min(k, room), 0.0
    wanted = left
    for each in overlaps:
        room -= each.stop - each.start
        due += each.wanted
        ideal = round(wanted * due / total) - (wanted - left)
        share = min(each.stop - each.start, max(ideal, left - room, 0))
        left -= share
        yield share
