"""Selection on a GPU with Triton: the host reads no value, and bounds are reused from step to step."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from spardl.vector.layout import Range, Ranges
from spardl.vector.selection import Chosen, Integers, ListingRanges, PortableFinder

__all__ = ["UnreadFinder"]

# Capacity of the list of a range: a multiple of k, plus a constant for small ranges; as in ``candidates``.
_CAPACITY, _EXTRA = 4, 64
# Flags for the rest of a step, which are allocated with those of the gradient.
_SPARE = 14
# Without marks, one program compares all entries of a range; torch is faster for longer ranges.
_LONGEST = 1 << 20


class UnreadFinder(PortableFinder):
    """Finder for CUDA and vectors of less than 2^31 entries."""

    def __init__(self) -> None:
        super().__init__()
        # Ranges whose entries are marked in this step, and the ranges selected in it, which are marked in the next one.
        self._marked: list[tuple[int, int]] = []
        self._selected: set[tuple[int, int]] = set()
        self._words = self._edges = self._bounds = self._following = self._memo = self._scratch = torch.empty(0)
        self._tables: dict[tuple[Range, ...], Tensor] = {}
        self._added = False
        self._flags: Tensor | None = None
        self._spare: list[Tensor] = []

    def add(self, values: Tensor, gradient: Tensor | None, ranges: ListingRanges, *, clear: bool = False) -> Integers:
        """Adds the gradient and marks entries; ``ranges`` are ignored, since the bounds are on the device."""
        from spardl.vector.kernels import gpu_select  # noqa: PLC0415 - triton is installed only with CUDA

        self._prepare(values)
        gpu_select.add_and_mark(values, gradient, self._flags, self._edges, self._bounds, self._words)
        self._flags = None
        if clear and gradient is not None:
            gradient.zero_()
        return np.full(ranges.starts.size, -1)

    @property
    def marks(self) -> Tensor | None:
        """Bitmap of the marked entries, int32, shape (m,)."""
        return self._words if self._marked else None

    def check_next(self, gradient: Tensor) -> Tensor | None:
        """Makes the next ``add`` depend on ``gradient``, shape (n,): bool, shape (2,)."""
        from spardl.vector.kernels import gpu_select  # noqa: PLC0415 - triton is installed only with CUDA

        self._flags, *self._spare = gpu_select.finite_flags(gradient, _SPARE).split([2, *[1] * _SPARE])
        return self._flags

    def flag(self, device: torch.device) -> Tensor:
        """A spare flag if there is one: bool, shape ()."""
        return self._spare.pop().view(()) if self._spare else super().flag(device)

    def _prepare(self, values: Tensor) -> None:
        from spardl.vector.kernels import gpu_select  # noqa: PLC0415

        device, marked = values.device, sorted(self._selected)
        # Of overlapping ranges, which do not occur so far, none is marked.
        if any(one[1] > two[0] for one, two in pairwise(marked)):
            marked = []
        if not self._added:
            self._words = gpu_select.words_of(values.numel(), device)
        if not self._added or marked != self._marked:
            self._marked, self._tables = marked, {}
            self._edges = gpu_select.edges_of(marked, device)
            self._bounds, self._following = (
                torch.full((len(marked) + 1,), gpu_select.NO_BOUND, dtype=torch.int32, device=device) for _ in range(2)
            )
            self._memo = torch.zeros(len(marked) + 1, 2, dtype=torch.int32, device=device)
        else:
            self._bounds, self._following = self._following, self._bounds
        self._selected, self._added = set(), True

    def largest(self, values: Tensor, parts: Sequence[Range], touched: Sequence[Tensor]) -> Chosen:
        """Selects the entries of all ranges in one launch."""
        ranges = Ranges.of(parts)
        if not self._added and max(part.stop - part.start for part in parts) > _LONGEST:
            return super().largest(values, parts, touched)
        from spardl.vector.kernels import gpu_select  # noqa: PLC0415

        for positions in touched if self._marked else ():
            gpu_select.mark(positions, self._words)
        self._selected.update((part.start, part.stop) for part in parts if 0 < part.k < part.stop - part.start)
        positions = torch.empty(ranges.wanted, dtype=torch.int64, device=values.device)
        table = self._table(tuple(parts), values.device)
        memo = self._memo, self._scratch
        gpu_select.select(values, table, self._words, self._bounds, self._following, *memo, positions)
        return Chosen(
            ranges.columns.T, positions, torch.zeros(len(ranges), dtype=values.dtype), np.full(len(ranges), -1)
        )

    def _table(self, parts: tuple[Range, ...], device: torch.device) -> Tensor:
        if (found := self._tables.get(parts)) is not None:
            return found
        numbers = {pair: number for number, pair in enumerate(self._marked)}
        rows, offset, begin = [], 0, 0
        for start, stop, k in parts:
            room = min(_CAPACITY * k + _EXTRA, stop - start)
            rows.append((start, stop, k, offset, numbers.get((start, stop), -1), begin, room))
            offset, begin = offset + k, begin + room
        if self._scratch.numel() < begin or self._scratch.device != device:
            self._scratch = torch.empty(begin, dtype=torch.int32, device=device)
        table = torch.tensor(rows, dtype=torch.int64).to(device, non_blocking=True)
        if self._added:
            self._tables[parts] = table
        return table
