"""The dense vector that one synchronization works on, and can undo.

A sparse all-reduce adds what arrives to a worker's own vector and takes out what it sends. Global residual
collection (Zhao et al. 2024) afterwards wants the *original* value wherever an index did not reach the final
result. Instead of a copy of the whole vector, this class remembers the old values of the few positions that
were touched: O(k) memory instead of O(n).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from spardl.vector import entries
from spardl.vector.bounds import Bound, cut, fits
from spardl.vector.candidates import Candidates
from spardl.vector.layout import Part
from spardl.vector.norms import largest
from spardl.vector.packing import NIBBLE
from spardl.vector.sparse import SparseVector
from spardl.vector.wire import EXACT, Wire

__all__ = ["Accumulator", "Select"]


class Accumulator:
    """A dense vector with a log of its changes.

    Args:
        values: shape (n,): gradient plus residual. It is changed in place.
        candidates: what is known of the vector's largest entries, if it added the gradient.
        wire: how values travel. What rounding takes from them stays in the vector.
        bound: of the vector's magnitudes. Who writes larger ones to ``values`` tells it.
        room: where a dense sum may be written, of the vector's shape and type; ``None``: who needs such memory has it.
        step: of the slots of messages, see ``Slot``.

    Attributes:
        form: of messages that hold some of its entries.
        overflowed: whether a sum with what arrived had to be cut.
    """

    def __init__(
        self,
        values: Tensor,
        candidates: Candidates | None = None,
        wire: Wire = EXACT,
        bound: Bound | None = None,
        room: Tensor | None = None,
        step: int = NIBBLE,
    ) -> None:
        self.values = values
        self.form = wire.form(values.dtype, step)
        self.room = room
        self.wire = wire
        self.bound = bound or Bound()
        self.overflowed = False
        self._settled = False
        # What entries can be by now.
        self._reach = self.bound.value
        self._candidates = candidates or Candidates()
        self._before: list[tuple[Tensor, Tensor]] = []
        self._taken: list[Tensor] = []
        self._errors: list[tuple[Tensor, Tensor]] = []
        # Where entries changed since: ranges, and increasing positions in them.
        self._touched: list[tuple[int, int, Tensor]] = []

    def largest(self, parts: Sequence[Part]) -> Tensor:
        """The k largest entries of each of some ranges; ties: the lowest positions.

        Args:
            parts: the ranges, none of which overlap, and their k.

        Returns:
            int64 positions, shape (sum of k,): range by range, increasing in each.
        """
        touched = [
            positions
            for start, stop, positions in self._touched
            if any(start < part.stop and part.start < stop for part in parts)
        ]
        return self._candidates.largest(self.values, parts, touched)

    def take(self, parts: Sequence[Part], select: Select) -> SparseVector:
        """Cuts the entries that ``select`` picks out of some ranges, which adjoin one another.

        Args:
            parts: each begins where the one before ends, or at 0 after the end of the vector.
            select: picks the entries.

        Returns:
            The ranges end to end. What was picked is zero in this vector from now on.
        """
        positions, start = select(self, parts), parts[0].start
        indices = positions - start
        if parts[-1].start < start:
            indices = torch.where(indices < 0, indices + self.values.numel(), indices)
        taken = SparseVector(indices, self._cut(positions), sum(part.stop - part.start for part in parts))
        self._touch(start, positions, taken)
        return taken

    def take_at(self, positions: Tensor) -> Tensor:
        """Cuts out the entries at some positions.

        Args:
            positions: int64, shape (m,), strictly increasing.

        Returns:
            Their values, shape (m,), as receivers will see them.
        """
        self._touched.append((0, self.values.numel(), positions))
        return self._cut(positions)

    def _cut(self, positions: Tensor) -> Tensor:
        values = entries.cut(self.values, positions)
        self._taken.append(positions)
        self._before.append((positions, values))
        sent = self.wire.rounded(values)
        if sent is not values:
            error = _difference(values, sent)
            self._errors.append((positions, error))
            entries.put(self.values, positions, error)
        return sent

    def rounded(self, start: int, block: SparseVector, holders: int = 1) -> SparseVector:
        """A sum that is about to be sent, as receivers will see it; this worker's share of the rest goes to the vector.

        Args:
            start: first position of the block.
            block: the sum.
            holders: workers that round the same sum.

        Returns:
            What receivers will see.
        """
        sent = self.wire.rounded(block.values)
        if sent is block.values:
            return block
        error = _difference(block.values, sent) / holders
        self.add(start, SparseVector(block.indices, error, block.length))
        self._errors.append((block.indices + start, error))
        return SparseVector(block.indices, sent, block.length)

    def add(self, start: int, block: SparseVector) -> None:
        """Adds a sparse block.

        Args:
            start: its first position; it may go on at 0 after the vector's end.
            block: what is added.
        """
        where, length = block.indices + start, self.values.numel()
        if start + block.length > length:
            where = torch.where(where < length, where, where - length)
        self._before.append((where, entries.add(self.values, where, block.values)))
        self._reach += largest([block.values])
        if not fits(self._reach, self.values.dtype):
            self._cut_at(where)
        self._touch(start, where, block)

    def _cut_at(self, positions: Tensor) -> None:
        sums = entries.gather(self.values, positions)
        if not math.isfinite(largest([sums])):
            self.overflowed = True
            entries.put(self.values, positions, cut(sums))

    def _touch(self, start: int, positions: Tensor, block: SparseVector) -> None:
        """Notes positions that increase, but for the step from the vector's end to its beginning."""
        length = self.values.numel()
        stop = start + block.length
        if stop <= length:
            self._touched.append((start, stop, positions))
            return
        last = int(torch.searchsorted(block.indices, length - start))
        self._touched += [(start, length, positions[:last]), (0, stop - length, positions[last:])]

    def taken(self) -> Tensor:
        """All positions that were cut out: int64, shape (m,), strictly increasing."""
        if not self._taken:
            return torch.empty(0, dtype=torch.int64, device=self.values.device)
        positions: Tensor = torch.cat(self._taken).unique(sorted=True)
        return positions

    def restore(self) -> None:
        """Puts every touched position back to the value it had at first."""
        for where, old in reversed(self._before):
            entries.put(self.values, where, old)
        self._before.clear()

    def add_errors(self, final: Tensor) -> None:
        """Adds what rounding took from the entries at some positions.

        Args:
            final: int64, shape (m,), strictly increasing.
        """
        for positions, error in self._errors:
            kept = torch.isin(positions, final, assume_unique=True)
            rest = cut(self.values[positions[kept]] + error[kept])
            self.values[positions[kept]] = rest
            self.bound.include(largest([rest]))

    def forget_overflows(self) -> None:
        """Clears entries that are not finite, after every entry has changed: they are in the result already.

        Once: a program that is through with the vector can do it while messages are under way, or say that there are
        none by ``settle``.
        """
        if self._settled:
            return
        self._settled = True
        self.bound.value = largest([self.values])
        if not math.isfinite(self.bound.value):
            self.values.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
            self.bound.value = largest([self.values])

    def settle(self, magnitude: float) -> None:
        """Is told that no entry is above the largest before, but for new ones, of a finite ``magnitude`` at most."""
        self._settled = True
        # They may have been rounded up.
        self.bound.value *= 1 + 4 * torch.finfo(self.values.dtype).eps
        self.bound.include(magnitude)


def _difference(values: Tensor, rounded: Tensor) -> Tensor:
    # An infinity leaves no rest, nor do those that it takes with it.
    return torch.where(values.isfinite() & rounded.isfinite(), values - rounded, 0)


Select: TypeAlias = Callable[[Accumulator, Sequence[Part]], Tensor]
"""``select(accumulated, parts)``: what to keep of some ranges: int64 positions, range by range, increasing in each."""
