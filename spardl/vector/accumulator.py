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

from spardl.vector import sparse
from spardl.vector.candidates import Candidates
from spardl.vector.kernels import compiled
from spardl.vector.layout import Part, Parts
from spardl.vector.norms import Bound, clip_overflow, fits, largest
from spardl.vector.packing import NIBBLE
from spardl.vector.sparse import SparseVector, increasing, split, within
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
        # Whether something was cut out after something was added.
        self._cut_late = False
        self._errors: list[tuple[Tensor, Tensor]] = []
        # Where entries changed since: ranges, and increasing positions in them.
        self._touched: list[tuple[int, int, Tensor]] = []

    def largest(self, parts: Sequence[Part], spare: float = 1.0) -> Tensor:
        """The k largest entries of each of some ranges; ties: the lowest positions.

        Args:
            parts: the ranges, none of which overlap, and their k.
            spare: the next step looks for them among some more than so many times k entries, at least 1.

        Returns:
            int64 positions, shape (sum of k,): range by range, increasing in each.
        """
        return self._candidates.largest(self.values, parts, self._changed(parts), spare)

    def reaching(self, part: Part, bound: float, most: int) -> Tensor | None:
        """The entries of a range that reach a bound, unless they are too many.

        Args:
            part: the range; its k does not matter.
            bound: least magnitude.
            most: so many entries are not too many.

        Returns:
            int64 positions, shape (found,), increasing; ``None`` if there are more than ``most``.
        """
        return self._candidates.reaching(self.values, part, bound, most, self._changed([part]))

    def _changed(self, parts: Sequence[Part]) -> list[Tensor]:
        """Where entries may have changed since they were listed: what touched one of some ranges."""
        spans, found = Parts.of(parts).spans, []
        for start, stop, positions in self._touched:
            for begin, end in spans:
                if start < end and begin < stop:
                    found.append(positions)
                    break
        return found

    def take(self, parts: Sequence[Part], select: Select) -> SparseVector:
        """Cuts the entries that ``select`` picks out of some ranges, which adjoin one another.

        Args:
            parts: each begins where the one before ends, or at 0 after the end of the vector.
            select: picks the entries.

        Returns:
            The ranges end to end. What was picked is zero in this vector from now on.
        """
        ranges = Parts.of(parts)
        positions, start, length = select(self, ranges), ranges.start, ranges.length
        indices = positions - start if start else positions
        if start + length > self.values.numel():
            indices = torch.where(indices < 0, indices + self.values.numel(), indices)
        taken = SparseVector(indices, self._cut(positions), length)
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
        self._cut_late = self._cut_late or len(self._before) > len(self._taken)
        values, sent, error = self._cut_rounded(positions)
        self._taken.append(positions)
        self._before.append((positions, values))
        if error is not None:
            self._errors.append((positions, error))
        return sent

    def _cut_rounded(self, positions: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """What was at some positions, what is sent of it, and the difference, which stays there if there can be one."""
        own = self.values.dtype
        if not self.wire.rounds(own):
            values = sparse.cut(self.values, positions)
            return values, values, None
        if compiled(self.values) and own is torch.float32 and self.wire.dtype(own) is torch.bfloat16:
            return sparse.cut_to_bfloat16(self.values, positions)
        values = sparse.gather(self.values, positions)
        sent = self.wire.rounded(values)
        error = _difference(values, sent)
        sparse.put(self.values, positions, error)
        return values, sent, error

    def rounded(self, start: int, block: SparseVector, holders: int = 1) -> SparseVector:
        """A sum that is about to be sent, as receivers will see it; this worker's share of the rest goes to the vector.

        Args:
            start: first position of the block.
            block: the sum.
            holders: workers that round the same sum.

        Returns:
            What receivers will see.
        """
        if not self.wire.rounds(block.values.dtype):
            return block
        sent = self.wire.rounded(block.values)
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
        where, length = block.indices + start if start else block.indices, self.values.numel()
        if start + block.length > length:
            where = torch.where(where < length, where, where - length)
        before, peak = sparse.add(self.values, where, block.values)
        self._before.append((where, before))
        self._reach += peak
        if not fits(self._reach, self.values.dtype):
            self._cut_at(where)
        self._touch(start, where, block)

    def _cut_at(self, positions: Tensor) -> None:
        sums = sparse.gather(self.values, positions)
        if not math.isfinite(largest([sums])):
            self.overflowed = True
            sparse.put(self.values, positions, clip_overflow(sums))

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
        positions = self._taken[0] if len(self._taken) == 1 else torch.cat(self._taken)
        # To sort what was cut out once, of one range, would take longer than all else here.
        return positions if increasing(positions) else positions.unique(sorted=True)

    def restore(self) -> None:
        """Puts every touched position back to the value it had at first."""
        for where, old in reversed(self._before):
            sparse.put(self.values, where, old)
        self._before.clear()

    def restore_others(self, final: Tensor) -> None:
        """Puts every touched position back but those of a result, where everything stays; but no overflow.

        Args:
            final: int64, shape (m,), strictly increasing: the indices of the final result.
        """
        peak = sparse.undo(self.values, self._before, final)
        self._before.clear()
        if not math.isfinite(peak):
            # Sums of finite numbers can overflow on the way; the overflow is in the result already.
            kept = sparse.gather(self.values, final)
            kept = torch.where(kept.isfinite(), kept, 0)
            sparse.put(self.values, final, kept)
            peak = largest([kept])
        self.bound.include(peak)

    def restore_but(self, final: Tensor, *, whole: bool) -> None:
        """Puts every touched position back, but makes zero what was cut out and is settled; ``add_errors`` follows.

        Args:
            final: int64, shape (m,), strictly increasing: the indices of the final result.
            whole: whether all that was cut out is settled, or only what is in the result.
        """
        cuts = len(self._taken)
        if self._cut_late or (self._errors and cuts > 1):
            self.restore()
            settled = self.taken() if whole else self.taken()[within(self.taken(), final)]
            sparse.put(self.values, settled, self.values.new_zeros(settled.numel()))
            return
        # What was cut out is zero, or what rounding took, once all that came later is undone: not written twice.
        for where, old in reversed(self._before[cuts:]):
            sparse.put(self.values, where, old)
        if self._errors or not whole:
            for where, old in reversed(self._before[:cuts]):
                places = within(where, final)
                others = split(where, places)[1]
                new = old.new_zeros(others.numel()) if whole else split(old, places)[1]
                sparse.put(self.values, others, new)
        del self._errors[:cuts]
        self._before.clear()

    def add_errors(self, final: Tensor) -> None:
        """Adds what rounding took from the entries at some positions.

        Args:
            final: int64, shape (m,), strictly increasing.
        """
        for positions, error in self._errors:
            places = within(positions, final)
            kept = positions[places]
            rest = clip_overflow(sparse.gather(self.values, kept) + error[places])
            sparse.put(self.values, kept, rest)
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
    rest = values - rounded
    if values.device.type == "cpu" and math.isfinite(largest([rest])):
        return rest
    # An infinity leaves no rest, nor do those that it takes with it.
    return torch.where(values.isfinite() & rounded.isfinite(), rest, 0)


Select: TypeAlias = Callable[[Accumulator, Sequence[Part]], Tensor]
"""``select(accumulated, parts)``: what to keep of some ranges: int64 positions, range by range, increasing in each."""
