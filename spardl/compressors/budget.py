"""Density and scope: how many entries sparsifiers send, and which entries compete with each other.

Entries compete if a compressor compares their magnitudes to decide which of them it sends. The density may start higher
and decrease exponentially, as in the warm-up of Deep Gradient Compression (Lin et al., ICLR 2018, section 3.4).
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

from spardl.basics.checks import check_choice, check_integer, is_number
from spardl.basics.errors import ConfigError
from spardl.compressors.base import SparseCompressor
from spardl.protocol.programs import Context, State
from spardl.vector.accumulator import Accumulator, Select
from spardl.vector.layout import Layout, Range, Ranges
from spardl.vector.packing import NIBBLE

__all__ = ["AUTO", "CHUNK", "SCOPES", "Budget", "BudgetedCompressor", "Piece", "Pieces", "PiecewiseCompressor", "Scope"]

CHUNK = 4096
"""Number of entries per chunk, as in SparseLoCo (Sarfi et al., arXiv 2508.15706)."""
AUTO = "auto"
"""Default scope, resolved from the other settings."""


class Scope(NamedTuple):
    """Division of the vector into parts whose entries compete with each other.

    Attributes:
        cut: Function that divides a layout into ranges, in order; its second argument is the number of entries per
            bucket.
        index_step: Granularity of index sizes in messages: the number of low bits (Elias-Fano coding) is a multiple of
            it. Chunks use 1, which gives the smallest messages: 64 of 4,096 entries take 8 bits per index.
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
    """Number of entries to send (as a share of the gradient), and which entries compete with each other.

    Args:
        density: Share of entries to send, k / n, in (0, 1]; lower is more aggressive.
        scope: Entries that compete with each other: those of the whole ``model``, of each ``layer`` (tensor), of each
            ``bucket`` of adjacent tensors, or of each ``chunk`` of 4,096 entries. At least one entry of each such part
            is sent. ``auto`` means ``model``, with one exception: it means ``chunk`` if ``TopK`` compresses updates of
            Adam, AdamW or Muon (``momentum=auto``) and the density is at least one entry per chunk.
        bucket_entries: Number of entries per bucket; used only with ``scope=bucket``.
        warmup_steps: Number of synchronizations in which the density decreases exponentially to its final value.
        warmup_density: Density k / n in the first of these synchronizations.

    Attributes:
        chunks_updates: Whether ``scope=auto`` can mean chunks for this compressor.

    Raises:
        ConfigError: If a value is out of range.

    Example:
        >>> budget = spardl.compressors.TopK(density=0.01, warmup_steps=4)
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
            if not is_number(float, value) or not 0 < value <= 1:
                raise ConfigError(
                    f"compressor.{name} must be above 0 and at most 1, got {value!r}; 0.01 keeps 1% of the entries"
                )
        check_choice("compressor.scope", self.scope, SCOPES)
        check_integer("compressor.bucket_entries", self.bucket_entries, least=1)
        check_integer("compressor.warmup_steps", self.warmup_steps, least=0)

    @classmethod
    def takes_chunks(cls, scope: Any, density: Any) -> bool:
        """Returns whether ``scope=auto`` means chunks if updates of Adam, AdamW or Muon are compressed.

        Args:
            scope: Scope of the budget, not yet validated.
            density: Density of the budget, k / n, not yet validated.

        Returns:
            True if the scope is ``auto``, chunks suit this compressor, and each chunk sends at least one entry.
        """
        # Each chunk sends at least one entry, so lower densities would be exceeded.
        return cls.chunks_updates and scope == AUTO and is_number(float, density) and density * CHUNK >= 1

    def density_at(self, step: int) -> float:
        """Returns the density k / n at ``step``: a geometric sequence from ``warmup_density`` to ``density``."""
        if step >= self.warmup_steps:
            return self.density
        return float(self.warmup_density * (self.density / self.warmup_density) ** (step / self.warmup_steps))

    def parts(self, context: Context) -> list[Range]:
        """Returns the parts (layers, buckets, ...) of the vector in ``context``, each with its k (entries to send)."""
        return list(_budgets(*self._key(context)))

    def pieces(self, blocks: Sequence[Range], context: Context) -> Pieces:
        """Divides ``blocks`` of the vector in ``context`` where a part (layer, bucket, ...) begins.

        Returns the pieces that send at least one entry.
        """
        key = self._key(context)
        if len(_budgets(*key)) == 1:
            whole = Ranges.of(blocks).sending
            return Pieces([0] * len(whole), whole)
        found = [_pieces(*key, block) for block in blocks]
        if len(found) == 1:
            return found[0]
        columns = [np.empty((3, 0), np.int64), *(each.ranges.columns for each in found)]
        return Pieces([number for each in found for number in each.numbers], Ranges(np.concatenate(columns, axis=1)))

    def _key(self, context: Context) -> tuple[str, Layout, int, float]:
        return self.scope, context.layout, self.bucket_entries, self.density_at(context.step)


@lru_cache(maxsize=16)
def _budgets(scope: str, layout: Layout, bucket_entries: int, density: float) -> tuple[Range, ...]:
    # Cached: there can be thousands of parts, and every step needs them several times.
    ranges = SCOPES[scope].cut(layout, bucket_entries)
    return tuple(Range(start, stop, _share(density, stop - start)) for start, stop in ranges if stop > start)


def _share(density: float, length: int) -> int:
    return min(length, max(1, round(density * length)))


class BudgetedCompressor(Budget, SparseCompressor):
    """Base class of sparse compressors that select entries within each part (layer, bucket, ...) of the vector."""

    @property
    def index_step(self) -> int:
        """Granularity of index sizes in messages, a number of bits that the scope determines."""
        return SCOPES[self.scope].index_step

    @abstractmethod
    def choose_all(self, accumulated: Accumulator, pieces: Pieces, context: Context, state: State) -> list[Tensor]:
        """Selects entries of each given piece of the vector.

        Args:
            accumulated: Gradient plus residual.
            pieces: Pieces (parts, or intersections of parts with a block), and the number of entries to send of each.
            context: Context of this synchronization.
            state: State of this worker.

        Returns:
            For each piece, increasing int64 positions in the whole vector, shape (m,), with m at most or about k, as
            ``output`` states.
        """

    def selector(self, context: Context, state: State) -> Select:
        """Returns a function that divides given ranges where a part begins, and selects entries of each piece."""

        def select(accumulated: Accumulator, parts: Sequence[Range]) -> Tensor:
            chosen = self.choose_all(accumulated, self.pieces(parts, context), context, state)
            if len(chosen) == 1:
                return chosen[0]
            nothing = torch.empty(0, dtype=torch.int64, device=accumulated.values.device)
            return torch.cat(chosen) if chosen else nothing

        return select


class PiecewiseCompressor(BudgetedCompressor):
    """Base class of sparse compressors that select entries of one piece at a time."""

    @abstractmethod
    def choose(self, values: Tensor, k: int, part: int, context: Context, state: State) -> Tensor:
        """Selects entries of one piece.

        Args:
            values: Entries of the piece, shape (m,), m >= 1. A piece is a part, or the intersection of a part with a
                block.
            k: Number of entries to select, at least 1 and at most m.
            part: Number of the part, from 0.
            context: Context of this synchronization.
            state: State of this worker.

        Returns:
            int64 positions in ``values``, shape (count,), strictly increasing.
        """

    def choose_all(self, accumulated: Accumulator, pieces: Pieces, context: Context, state: State) -> list[Tensor]:
        """Calls ``choose`` for each piece, and returns its positions in the whole vector."""
        values = accumulated.values
        return [
            self.choose(values[piece.start : piece.stop], piece.k, piece.part, context, state) + piece.start
            for piece in pieces
        ]


class Piece(NamedTuple):
    """Intersection of a part (layer, bucket, ...) with a block, a range from which a communicator selects separately.

    Attributes:
        part: Number of the part, from 0.
        start: First position of the piece.
        stop: Position after the last one.
        k: Number of entries to send of the piece.
    """

    part: int
    start: int
    stop: int
    k: int


class Pieces(Sequence[Piece]):
    """Sequence of pieces that send entries; stored as columns, not as objects.

    Args:
        numbers: Number of the part that each piece belongs to, counted from 0.
        ranges: Ranges of the pieces, and the number of entries to send of each.
    """

    def __init__(self, numbers: Sequence[int], ranges: Ranges) -> None:
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
    # Share of the part's budget, in proportion to the length.
    wanted: float


@lru_cache(maxsize=128)
def _pieces(scope: str, layout: Layout, bucket_entries: int, density: float, block: Range) -> Pieces:
    """Returns the intersections of all parts with a block, and their shares of the block's budget."""
    found = []
    for number, part in enumerate(_budgets(scope, layout, bucket_entries, density)):
        low, high = max(part.start, block.start), min(part.stop, block.stop)
        if low < high:
            found.append(_Overlap(number, low, high, part.k * (high - low) / (part.stop - part.start)))
    shares = zip(found, _shares(found, block.k), strict=True)
    sending = [(each.part, Range(each.start, each.stop, share)) for each, share in shares if share]
    return Pieces([number for number, _ in sending], Ranges.of([part for _, part in sending]))


def _shares(overlaps: Sequence[_Overlap], k: int) -> Iterator[int]:
    """Distributes k entries (or all, if there are fewer); a whole part gets its budget if k is the sum of budgets."""
    total, available = sum(each.wanted for each in overlaps), sum(each.stop - each.start for each in overlaps)
    left, due = min(k, available), 0.0
    wanted = left
    for each in overlaps:
        available -= each.stop - each.start
        due += each.wanted
        ideal = round(wanted * due / total) - (wanted - left)
        # At least the number that later pieces cannot hold, so that exactly k entries are distributed.
        share = min(each.stop - each.start, max(ideal, left - available, 0))
        left -= share
        yield share
