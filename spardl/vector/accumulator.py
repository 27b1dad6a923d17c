"""The dense vector that one synchronization works on, with a log that can undo its changes.

A sparse all-reduce adds received entries to a worker's vector and removes (*takes*) the entries that it sends. Global
residual collection (Zhao et al. 2024) then needs the *original* value of each index that is not in the final result.
Instead of copying the vector, the accumulator logs the old values of modified entries, which takes O(k) instead of O(n)
memory. An entry that was taken is *settled* if it has reached the result and therefore leaves the residual.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from spardl.vector import sparse
from spardl.vector.candidates import Candidates
from spardl.vector.kernels import compiled, runs_triton
from spardl.vector.layout import Range, Ranges
from spardl.vector.norms import Bound, clip_overflow, fits, host_reads, largest_magnitude, peak_of
from spardl.vector.packing import NIBBLE
from spardl.vector.sparse import SparseVector, increasing, is_within, split, within
from spardl.vector.wire import EXACT, Wire

__all__ = ["Accumulator", "Select"]


class Accumulator:
    """A dense vector with a log of its changes.

    Args:
        values: Vector of shape (n,), gradient plus residual; modified in place.
        candidates: Finds the largest entries among those that it listed when the gradient was added.
        wire: Number format of values in messages. The errors of rounding to it remain in the vector.
        bound: Upper bound of the magnitudes in the vector; update it after writing larger entries to ``values``.
        sum_buffer: Buffer for a dense sum, of the vector's shape and dtype; ``None`` to allocate one when needed.
        step: The number of low bits per index in messages is a multiple of this number (see ``Slot``).

    Attributes:
        form: Format of messages that hold entries of the vector.
        overflowed: Whether a sum with received entries overflowed and was clipped; see ``finite`` for a GPU.
        finite: On a GPU, one bool tensor of shape () per call of ``add``: whether its sums were finite.
    """

    def __init__(
        self,
        values: Tensor,
        candidates: Candidates | None = None,
        wire: Wire = EXACT,
        bound: Bound | None = None,
        sum_buffer: Tensor | None = None,
        step: int = NIBBLE,
    ) -> None:
        self.values = values
        self.form = wire.form(values.dtype, step)
        self.sum_buffer = sum_buffer
        self.wire = wire
        self.bound = bound or Bound()
        self.overflowed = False
        self.finite: list[Tensor] = []
        self._settled = False
        # Upper bound of the magnitudes after additions.
        self._largest_possible = self.bound.value
        self._candidates = candidates or Candidates()
        self._log: list[tuple[Tensor, Tensor]] = []
        self._taken: list[Tensor] = []
        # Whether entries were taken after a block was added.
        self._taken_late = False
        self._errors: list[tuple[Tensor, Tensor]] = []
        # Changes since the candidates were listed: a range, and increasing positions in it.
        self._changes: list[tuple[int, int, Tensor]] = []

    def largest(self, parts: Sequence[Range], spare: float = 1.0) -> Tensor:
        """Finds the k largest entries of each range; ties go to the lowest positions.

        Args:
            parts: Disjoint ranges, each with its k.
            spare: Factor, at least 1; the next step lists about ``spare`` times k candidates.

        Returns:
            int64 positions of shape (sum of k,): range by range, increasing within each.
        """
        return self._candidates.largest(self.values, parts, _changed(self._changes, parts), spare)

    def reaching(self, part: Range, bound: float, most: int) -> Tensor | None:
        """Finds the entries of a range whose magnitude is at least a bound, up to a limit.

        Args:
            part: Range to search; its k is ignored.
            bound: Smallest magnitude of the entries to find.
            most: Maximum number of entries to return.

        Returns:
            int64 positions of shape (found,), increasing; ``None`` if there are more than ``most``.
        """
        return self._candidates.reaching(self.values, part, bound, most, _changed(self._changes, [part]))

    def take(self, parts: Sequence[Range], select: Select) -> SparseVector:
        """Selects entries of adjacent ranges, and removes them from the vector.

        Args:
            parts: Ranges, each of which starts where the previous one ends, or at 0 if that is the end of the vector.
            select: Function of this object and the ranges that returns the positions of the entries to take.

        Returns:
            The selected entries as one sparse vector, whose length is that of all ranges together.
        """
        ranges = Ranges.of(parts)
        positions, start, length = select(self, ranges), ranges.start, ranges.length
        if runs_triton(self.values) and not self.wire.rounds(self.values.dtype):
            return self._take_on_gpu(positions, start, length)
        indices = positions - start if start else positions
        if start + length > self.values.numel():
            # Entries after the wrap-around have lower positions than the start.
            indices = torch.where(indices < 0, indices + self.values.numel(), indices)
        taken = SparseVector(indices, self._cut(positions), length)
        self._note_change(start, positions, taken)
        return taken

    def _take_on_gpu(self, positions: Tensor, start: int, length: int) -> SparseVector:
        from spardl.vector.kernels import gpu_entries  # noqa: PLC0415 - triton is installed only with CUDA

        taken = SparseVector(*gpu_entries.cut(self.values, positions, start), length)
        self._note_cut(positions, taken.values, None)
        # Marked entries stay candidates, and a zero is never missed.
        if self._candidates.marks is None:
            self._note_change(start, positions, taken)
        return taken

    def take_at(self, positions: Tensor) -> Tensor:
        """Removes the entries at given positions from the vector.

        Args:
            positions: int64 positions of shape (m,), strictly increasing.

        Returns:
            Removed values, shape (m,), rounded to the wire format.
        """
        self._changes.append((0, self.values.numel(), positions))
        return self._cut(positions)

    def _cut(self, positions: Tensor) -> Tensor:
        values, sent, error = _cut_rounded(self.values, positions, self.wire)
        self._note_cut(positions, values, error)
        return sent

    def _note_cut(self, positions: Tensor, values: Tensor, error: Tensor | None) -> None:
        self._taken_late = self._taken_late or len(self._log) > len(self._taken)
        self._taken.append(positions)
        self._log.append((positions, values))
        if error is not None:
            self._errors.append((positions, error))

    def rounded(self, start: int, block: SparseVector, holders: int = 1) -> SparseVector:
        """Rounds a partial sum to the wire format, and keeps this worker's share of the rounding errors in the vector.

        Args:
            start: First position of the block.
            block: Partial sum to send.
            holders: Number of workers that round the same sum and share its errors.

        Returns:
            The rounded sum, which receivers decode exactly.
        """
        if not self.wire.rounds(block.values.dtype):
            return block
        sent = self.wire.rounded(block.values)
        error = _difference(block.values, sent) / holders
        self.add(start, SparseVector(block.indices, error, block.length))
        self._errors.append((block.indices + start, error))
        return SparseVector(block.indices, sent, block.length)

    def add(self, start: int, block: SparseVector) -> None:
        """Adds a sparse block to the vector.

        Args:
            start: Position of the block's first entry; the block may wrap around the end of the vector.
            block: Sparse block to add.
        """
        if runs_triton(self.values) and self.values.itemsize <= 4:
            self._add_on_gpu(start, block)
            return
        where, length = block.indices + start if start else block.indices, self.values.numel()
        if start + block.length > length:
            # The block wraps around the end of the vector.
            where = torch.where(where < length, where, where - length)
        if not host_reads(self.values):
            self._add_unread(where, block.values)
            self._note_change(start, where, block)
            return
        before, peak = sparse.add(self.values, where, block.values)
        self._log.append((where, before))
        self._largest_possible += peak
        if not fits(self._largest_possible, self.values.dtype):
            self._cut_at(where)
        self._note_change(start, where, block)

    def _add_unread(self, positions: Tensor, amounts: Tensor) -> None:
        # Sums are clipped whether they need it or not: the host would have to wait for their magnitudes.
        before = self.values[positions]
        sums = before + amounts
        self.values[positions] = sums.nan_to_num(nan=0.0)
        self._log.append((positions, before))
        self.finite.append(peak_of(sums) < math.inf)

    def _add_on_gpu(self, start: int, block: SparseVector) -> None:
        from spardl.vector.kernels import gpu_entries  # noqa: PLC0415

        finite, words = self._candidates.flag(self.values), self._candidates.marks
        where, before = gpu_entries.add(self.values, block.indices, block.values, start, finite, words)
        self._log.append((where, before))
        self.finite.append(finite)
        if words is None:
            self._note_change(start, where, block)

    def _cut_at(self, positions: Tensor) -> None:
        sums = sparse.gather(self.values, positions)
        if not math.isfinite(largest_magnitude([sums])):
            self.overflowed = True
            sparse.put(self.values, positions, clip_overflow(sums))

    def _note_change(self, start: int, positions: Tensor, block: SparseVector) -> None:
        """Logs changed positions, which increase except where the block wraps around the end of the vector."""
        length = self.values.numel()
        stop = start + block.length
        if stop <= length:
            self._changes.append((start, stop, positions))
            return
        if not host_reads(self.values):
            # Readers drop the positions outside of their range; the place of the border is known on the device only.
            self._changes += [(start, length, positions), (0, stop - length, positions)]
            return
        last = int(torch.searchsorted(block.indices, length - start))
        self._changes += [(start, length, positions[:last]), (0, stop - length, positions[last:])]

    def taken(self) -> Tensor:
        """Returns the positions of all entries selected so far: int64, shape (m,), strictly increasing."""
        if not self._taken:
            return torch.empty(0, dtype=torch.int64, device=self.values.device)
        positions = self._taken[0] if len(self._taken) == 1 else torch.cat(self._taken)
        # Usually entries are taken once from one range and already sorted; sorting would dominate this method.
        return positions if increasing(positions) else positions.unique(sorted=True)

    def restore(self) -> None:
        """Restores the original value of every changed entry."""
        for where, old in reversed(self._log):
            sparse.put(self.values, where, old)
        self._log.clear()

    def restore_others(self, final: Tensor) -> None:
        """Restores the original values except at the positions of the final result; non-finite entries there become 0.

        Args:
            final: int64 indices of the final result, shape (m,), strictly increasing.
        """
        peak = sparse.undo(self.values, self._log, final)
        self._log.clear()
        if not host_reads(self.values):
            return
        if not math.isfinite(peak):
            # Partial sums of finite numbers can overflow; the final result already accounts for that.
            kept = sparse.gather(self.values, final)
            kept = torch.where(kept.isfinite(), kept, 0)
            sparse.put(self.values, final, kept)
            peak = largest_magnitude([kept])
        self.bound.include(peak)

    def restore_unsettled(self, final: Tensor, *, whole: bool) -> None:
        """Restores the original values, but sets settled entries to zero. Call ``add_errors`` next.

        Args:
            final: int64 indices of the final result, shape (m,), strictly increasing.
            whole: Whether all taken entries are settled; otherwise only those whose positions are in the final result.
        """
        cuts = len(self._taken)
        # Taken entries may hold other values than zero and their own error, so start from the original values.
        if self._taken_late or (self._errors and cuts > 1):
            self.restore()
            settled = self.taken() if whole else self.taken()[within(self.taken(), final)]
            sparse.put(self.values, settled, self.values.new_zeros(settled.numel()))
            return
        # Once later changes are undone, taken entries hold zero or their rounding error already: no second write.
        for where, old in reversed(self._log[cuts:]):
            sparse.put(self.values, where, old)
        if self._errors or not whole:
            for where, old in reversed(self._log[:cuts]):
                _restore_unsettled(self.values, where, old, final, whole=whole)
        del self._errors[:cuts]
        self._log.clear()

    def add_errors(self, final: Tensor) -> None:
        """Adds the rounding errors of sent entries to the vector, at those positions that are in the final result.

        Args:
            final: int64 positions of the final result, shape (m,), strictly increasing.
        """
        for positions, error in self._errors:
            places = within(positions, final)
            kept = positions[places]
            rest = clip_overflow(sparse.gather(self.values, kept) + error[places])
            sparse.put(self.values, kept, rest)
            if host_reads(rest):
                self.bound.include(largest_magnitude([rest]))

    def forget_overflows(self) -> None:
        """Sets non-finite entries to zero; later calls do nothing.

        The final result already contains the overflow. A program can call this while it waits for its last messages, or
        call ``settle`` instead if it knows that all entries are finite.
        """
        if self._settled:
            return
        self._settled = True
        if not host_reads(self.values):
            self.values.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
            return
        self.bound.value = largest_magnitude([self.values])
        if not math.isfinite(self.bound.value):
            self.values.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
            self.bound.value = largest_magnitude([self.values])

    def settle(self, magnitude: float) -> None:
        """Declares that all entries are finite: at most the bound or, if written since, at most ``magnitude``."""
        self._settled = True
        # Rounding may have increased magnitudes slightly.
        self.bound.value *= 1 + 4 * torch.finfo(self.values.dtype).eps
        self.bound.include(magnitude)


def _changed(changes: Sequence[tuple[int, int, Tensor]], parts: Sequence[Range]) -> list[Tensor]:
    """Returns the positions in the given ranges that may have changed since candidates were listed."""
    spans, found = Ranges.of(parts).spans, []
    for start, stop, positions in changes:
        for begin, end in spans:
            if start < end and begin < stop:
                found.append(positions)
                break
    return found


def _cut_rounded(values: Tensor, positions: Tensor, wire: Wire) -> tuple[Tensor, Tensor, Tensor | None]:
    """Removes entries; returns the original values, the rounded ones to send, and the errors kept, if any."""
    own = values.dtype
    if not wire.rounds(own):
        taken = sparse.cut(values, positions)
        return taken, taken, None
    if compiled(values) and own is torch.float32 and wire.dtype(own) is torch.bfloat16:
        return sparse.cut_to_bfloat16(values, positions)
    before = sparse.gather(values, positions)
    sent = wire.rounded(before)
    error = _difference(before, sent)
    sparse.put(values, positions, error)
    return before, sent, error


def _restore_unsettled(values: Tensor, where: Tensor, old: Tensor, final: Tensor, *, whole: bool) -> None:
    """Restores taken entries that are not in the final result, or sets them to zero if all taken ones are settled."""
    if runs_triton(values):
        from spardl.vector.kernels import gpu_merge  # noqa: PLC0415

        gpu_merge.write_others(values, where, None if whole else old, final)
        return
    if not host_reads(values):
        new = torch.where(is_within(where, final), sparse.gather(values, where), 0 if whole else old)
        sparse.put(values, where, new)
        return
    places = within(where, final)
    others = split(where, places)[1]
    sparse.put(values, others, old.new_zeros(others.numel()) if whole else split(old, places)[1])


def _difference(values: Tensor, rounded: Tensor) -> Tensor:
    rest = values - rounded
    if values.device.type == "cpu" and math.isfinite(largest_magnitude([rest])):
        return rest
    # An infinity, or a value that rounding made infinite, leaves no residual.
    return torch.where(values.isfinite() & rounded.isfinite(), rest, 0)


Select: TypeAlias = Callable[[Accumulator, Sequence[Range]], Tensor]
"""``select(accumulator, parts)``: int64 positions to send, range by range, increasing within each."""
