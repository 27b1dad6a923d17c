"""Exact selection of the largest entries of a vector, with a rule for ties.

A *finder* adds a gradient to a vector, lists the entries that are large afterwards, and later finds the k largest
entries of some ranges among them. The result is exact: if a list is too short, the finder compares all entries.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spardl.vector.kernels import compiled, runs_triton
from spardl.vector.layout import Range, Ranges
from spardl.vector.norms import host_reads

__all__ = [
    "Chosen",
    "Finder",
    "Integers",
    "LazyAddition",
    "ListingRanges",
    "block_of",
    "finder_for",
    "in_rows",
    "kth_largest",
    "largest_of_rows",
    "least_of_rows",
    "reaching",
    "runs_of",
    "top_k",
    "top_k_unread",
]


# Gradients are added block by block, so that the next read of the entries hits the cache.


_BLOCK = 1 << 17


def block_of(values: Tensor) -> int:
    """Number of entries of ``values``, shape (n,), that fit in the cache; all entries on a GPU, at least 1."""
    return _BLOCK if values.device.type == "cpu" else max(1, values.numel())


class LazyAddition:
    """Lazy addition of a gradient, as far as positions are needed.

    Args:
        values: Vector of shape (n,), modified in place.
        gradient: Gradient of shape (n,), or ``None`` if there is nothing to add.
        clear: Whether to set the gradient to zero.
    """

    def __init__(self, values: Tensor, gradient: Tensor | None, clear: bool) -> None:
        self._values, self._gradient, self._clear, self._done = values, gradient, clear, 0

    def advance(self, stop: int) -> None:
        """Adds the gradient at least up to the position ``stop``."""
        length = self._values.numel()
        while self._gradient is not None and self._done < stop:
            end = min(self._done + block_of(self._values), length)
            more = self._gradient[self._done : end]
            self._values[self._done : end].add_(more)
            if self._clear:
                more.zero_()
            self._done = end


# Portable comparisons on the CPU: the bits of a floating-point number without its sign bit increase with its magnitude.
#
# numpy compares and partitions integers of any size with vector instructions. torch does not: it counts the positions
# that reach a bound first, and its k-th value is slow.


def positions_reaching(values: Tensor, bound: float) -> Tensor:
    """Finds the entries whose magnitude is at least a bound.

    Args:
        values: Floating-point CPU tensor of shape (n,), without NaN.
        bound: Least magnitude, rounded to the dtype of the values.

    Returns:
        int64 positions of shape (found,), increasing.
    """
    return torch.from_numpy(np.flatnonzero(_keys(values) >= _keys(values.new_tensor([bound]))))


def kth_largest(values: Tensor, k: int) -> Tensor:
    """Finds the k-th largest magnitude.

    Args:
        values: Floating-point CPU tensor of shape (n,), without NaN.
        k: Rank of the magnitude, from 1 to n.

    Returns:
        A scalar tensor of the same dtype.
    """
    place = values.numel() - k
    keys = _keys(values)
    keys.partition(place)
    return torch.from_numpy(keys[place : place + 1]).view(values.dtype)[0]


def least_of_rows(values: Tensor, wanted: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
    """Finds the smallest of the largest magnitudes of each row, and the entries that reach it.

    Args:
        values: Floating-point CPU tensor of shape (r, m), without NaN.
        wanted: Number of largest entries per row, shape (r,), from 0 to m.

    Returns:
        Magnitudes, shape (r,), infinite for rows without wanted entries; and int64 positions in the concatenated rows,
        shape (found,), increasing.
    """
    keys, length, most = _keys(values), values.shape[1], max(1, int(wanted.max()))
    parted = keys.copy()
    parted.partition(length - most, axis=1)
    top = np.sort(parted[:, length - most :], axis=1)
    least = np.take_along_axis(top, np.minimum(most - wanted, most - 1)[:, None], axis=1)
    least[wanted == 0] = _keys(values.new_tensor([float("inf")]))
    return torch.from_numpy(least[:, 0]).view(values.dtype), torch.from_numpy(np.flatnonzero(keys >= least))


def _keys(values: Tensor) -> NDArray[Any]:
    """Magnitudes as integers, in new memory."""
    bits = values.detach().view(_BITS[values.itemsize]).numpy()
    return bits & np.iinfo(bits.dtype).max


_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


# The largest entries of many short ranges: rows of a matrix instead of a loop over ranges.
#
# Chunks of a few thousand entries are adjacent and of equal length, so one call finds the threshold of all of them.
# Candidate lists would not help: a row stays in the cache.


# Maximum row length, and minimum number of rows: other ranges are handled one by one.
_LONGEST, _FEWEST = 1 << 14, 8

Integers = NDArray[np.int64]


def runs_of(starts: Integers, stops: Integers) -> list[slice]:
    """Groups ranges into runs that are rows of a matrix: adjacent, short and of equal length.

    Args:
        starts: Starts of the ranges, shape (r,).
        stops: Ends of the ranges, shape (r,).

    Returns:
        Slices that together cover all ranges in order; each slice of several ranges is such a matrix.
    """
    if not starts.size:
        return []
    lengths = stops - starts
    joined = (starts[1:] == stops[:-1]) & (lengths[1:] == lengths[:-1]) & (lengths[1:] > 0) & (lengths[1:] <= _LONGEST)
    edges = np.concatenate([[0], np.flatnonzero(~joined) + 1, [starts.size]])
    few = np.diff(edges) < _FEWEST
    alone = np.flatnonzero(np.repeat(few, np.diff(edges)))
    return [slice(*edge) for edge in pairwise(np.union1d(edges, np.append(alone, alone + 1)).tolist())]


def in_rows(starts: Integers, stops: Integers) -> NDArray[np.bool_]:
    """Whether each range is a row of a matrix according to ``runs_of``: bool, shape (r,)."""
    found = np.zeros(starts.size, bool)
    for run in runs_of(starts, stops):
        found[run] = run.stop - run.start > 1
    return found


def largest_of_rows(values: Tensor, ranges: Ranges) -> tuple[Tensor, Tensor]:
    """Finds the largest entries of each row; ties go to the lowest positions.

    Args:
        values: Finite floating-point tensor of shape (n,).
        ranges: The r rows of a matrix, as found by ``runs_of``; k from 0 to their length.

    Returns:
        int64 positions in the vector, shape (sum of k,), row by row, increasing within each; and the smallest selected
        magnitude of each row, shape (r,), or 0 where nothing was compared.
    """
    matrix = values[ranges.start : ranges.start + ranges.length].view(len(ranges), -1)
    length, wanted = matrix.shape[1], ranges.columns[2]
    rows, found, cuts = max(1, block_of(values) // length), [], []
    for first in range(0, len(matrix), rows):
        positions, cut = _of_block(matrix[first : first + rows], wanted[first : first + rows])
        found.append(positions + (ranges.start + first * length))
        cuts.append(cut)
    return torch.cat(found), torch.cat(cuts)


def _of_block(values: Tensor, wanted: Integers) -> tuple[Tensor, Tensor]:
    least = least_of_rows if values.device.type == "cpu" else _least_of_rows
    cuts, reaching = least(values, wanted)
    count = torch.from_numpy(wanted).to(values.device)
    if reaching.numel() != int(wanted.sum()):
        reaching = _drop_late_row_ties(values.abs(), cuts, count)
    return reaching, torch.where((count > 0) & (count < values.shape[1]), cuts, cuts.new_zeros(()))


def _least_of_rows(values: Tensor, wanted: Integers) -> tuple[Tensor, Tensor]:
    """Threshold of each row, infinite if nothing is wanted, and positions of the entries that reach it."""
    magnitude, count = values.abs(), torch.from_numpy(wanted).to(values.device)
    top = magnitude.topk(max(1, int(wanted.max()))).values
    least = top.gather(1, (count - 1).clamp(min=0)[:, None])
    least.masked_fill_(count[:, None] == 0, float("inf"))
    return least.squeeze(1), (magnitude >= least).view(-1).nonzero().squeeze(1)


def _drop_late_row_ties(magnitude: Tensor, least: Tensor, count: Tensor) -> Tensor:
    """Keeps the entries above their row's threshold, and the first of those equal to it, as many as are wanted."""
    above, ties = magnitude > least[:, None], magnitude == least[:, None]
    remaining = (count - above.sum(1))[:, None]
    return (above | (ties & (ties.cumsum(1) <= remaining))).view(-1).nonzero().squeeze(1)


class ListingRanges(NamedTuple):
    """Ranges of a vector, and the magnitudes from which their entries are listed.

    Attributes:
        starts: Starts of the ranges, shape (r,), increasing; ranges do not overlap.
        stops: Ends of the ranges, shape (r,).
        bounds: CPU tensor of shape (r,) in the vector's dtype: least magnitudes to list, above 0.
        capacities: Maximum number of listed entries per range, shape (r,); a list with more is dropped.
    """

    starts: Integers
    stops: Integers
    bounds: Tensor
    capacities: Integers

    def only(self, some: NDArray[np.bool_]) -> ListingRanges:
        """Selects the ranges for which ``some``, shape (r,), is true."""
        return ListingRanges(
            self.starts[some], self.stops[some], self.bounds[torch.from_numpy(some)], self.capacities[some]
        )


class Chosen(NamedTuple):
    """The largest entries of some ranges.

    Attributes:
        parts: int64 array of shape (r, 3): the ranges, and the number of entries wanted from each.
        positions: int64 tensor of shape (chosen,): range by range, increasing within each.
        cuts: CPU tensor of shape (r,): smallest selected magnitude; 0 where nothing was compared.
        looked: Number of entries compared per range, shape (r,); -1 for the whole range.
    """

    parts: Integers
    positions: Tensor
    cuts: Tensor
    looked: Integers


class Finder(ABC):
    """Lists large entries of a vector, and finds its largest ones."""

    @abstractmethod
    def add(self, values: Tensor, gradient: Tensor | None, ranges: ListingRanges, *, clear: bool = False) -> Integers:
        """Adds a gradient to a vector, and lists the entries that reach their range's bound.

        Args:
            values: Vector of shape (n,), modified in place.
            gradient: Gradient of shape (n,), or ``None``.
            ranges: Ranges to list; earlier lists are dropped.
            clear: Whether to set the gradient to zero.

        Returns:
            Number of listed entries per range, shape (r,); -1 if the list overflowed.
        """

    @abstractmethod
    def largest(self, values: Tensor, parts: Sequence[Range], touched: Sequence[Tensor]) -> Chosen:
        """Finds the k largest entries of each range; ties go to the lowest positions.

        Args:
            values: Vector of shape (n,), unchanged since ``add`` except for the touched entries.
            parts: At least one range, with k from 0 to the range's length.
            touched: int64 positions that may have changed since, shape (m,) each, increasing.
        """

    @property
    def marks(self) -> Tensor | None:
        """Bitmap in which changed entries must be marked instead of passing them to ``largest``; often ``None``."""
        return None

    def flag(self, device: torch.device) -> Tensor:
        """A new condition on ``device``, initially true: bool, shape ()."""
        return torch.ones((), dtype=torch.bool, device=device)

    def check_next(self, gradient: Tensor) -> Tensor | None:
        """Makes the next ``add`` depend on ``gradient``, shape (n,), if it can; see ``Candidates.check_next``."""
        return None

    def reaching(
        self, values: Tensor, part: Range, bound: float, most: int, touched: Sequence[Tensor]
    ) -> Tensor | None:
        """Finds the entries of a range whose magnitude is at least a bound, up to a limit.

        Args:
            values: Vector of shape (n,), as for ``largest``.
            part: Range to search; its k is ignored.
            bound: Least magnitude of the entries.
            most: Maximum number of entries.
            touched: Changed positions as for ``largest``: int64, shape (m,) each.

        Returns:
            int64 positions of shape (found,), increasing; ``None`` if there are more than ``most``.
        """
        found = reaching(values, part.start, part.stop, bound)
        return found if found.numel() <= most else None


class PortableFinder(Finder):
    """Finder for any device and dtype."""

    def __init__(self) -> None:
        self._lists: dict[tuple[int, int], tuple[Tensor, float]] = {}

    def add(self, values: Tensor, gradient: Tensor | None, ranges: ListingRanges, *, clear: bool = False) -> Integers:
        """Adds the gradient, and lists the ranges that are not rows of a matrix; rows are always compared whole."""
        self._lists = {}
        if is_direct(values):
            LazyAddition(values, gradient, clear).advance(values.numel())
            return np.full(ranges.starts.size, -1)
        alone = ~in_rows(ranges.starts, ranges.stops)
        counts = np.full(alone.size, -1)
        counts[alone] = self._add(values, gradient, ranges.only(alone), clear)
        return counts

    def _add(self, values: Tensor, gradient: Tensor | None, ranges: ListingRanges, clear: bool) -> list[int]:
        # Block by block: sums are compared while they are in the cache.
        addition, counts = LazyAddition(values, gradient, clear), []
        for start, stop, bound, capacity in zip(*(each.tolist() for each in ranges), strict=True):
            positions = _reaching(values, start, stop, bound, addition)
            fits = positions.numel() <= capacity
            counts.append(positions.numel() if fits else -1)
            if fits:
                self._lists[start, stop] = (positions, bound)
        addition.advance(values.numel())
        return counts

    def largest(self, values: Tensor, parts: Sequence[Range], touched: Sequence[Tensor]) -> Chosen:
        """Selects range by range, but all rows of a matrix at once."""
        ranges = Ranges.of(parts)
        if is_direct(values):
            return _largest_unread(values, ranges)
        found = [self._of_run(values, ranges[run], touched) for run in runs_of(*ranges.columns[:2])]
        positions, cuts, looked = zip(*found, strict=True)
        return Chosen(ranges.columns.T, torch.cat(positions), torch.cat(cuts).cpu(), np.concatenate(looked))

    def reaching(
        self, values: Tensor, part: Range, bound: float, most: int, touched: Sequence[Tensor]
    ) -> Tensor | None:
        """Finds entries of at least ``bound``: in the list if it has all of them, otherwise in the whole range."""
        listed, least = self._lists.get((part.start, part.stop), (None, math.inf))
        if listed is None or touched or (bound < least and listed.numel() <= most):
            return super().reaching(values, part, bound, most, touched)
        # All listed entries reach a lower bound.
        found = listed[values[listed].abs() >= bound]
        return found if found.numel() <= most else None

    def listed(self, start: int, stop: int) -> Tensor:
        """Listed positions of the range from ``start`` to ``stop``: int64, shape (m,); KeyError without a list."""
        return self._lists[start, stop][0]

    def _of_run(self, values: Tensor, run: Ranges, touched: Sequence[Tensor]) -> tuple[Tensor, Tensor, Integers]:
        if len(run) > 1:
            return *largest_of_rows(values, run), np.full(len(run), -1)
        part = run[0]
        positions, looked = self._largest(values, part, touched)
        compared = 0 < part.k < part.stop - part.start
        cut = values[positions].abs().min() if compared else values.new_zeros(())
        return positions, cut[None], np.array([looked])

    def _largest(self, values: Tensor, part: Range, touched: Sequence[Tensor]) -> tuple[Tensor, int]:
        listed, bound = self._lists.get((part.start, part.stop), (None, 0.0))
        if listed is not None:
            inside = [other[(other >= part.start) & (other < part.stop)] for other in touched]
            changed = [other for other in inside if other.numel()]
            near = torch.cat([listed, *changed]).unique(sorted=True) if changed else listed
            magnitude = values[near].abs()
            if changed:
                reached = magnitude >= bound
                near, magnitude = near[reached], magnitude[reached]
            if near.numel() >= part.k:
                return near[_top_k(magnitude, part.k)], near.numel()
        return _top_k(values[part.start : part.stop], part.k) + part.start, -1


# From this number of entries on, lists of candidates are faster on a GPU although the host waits for their lengths: on
# an H200, ``torch.topk`` takes 21 us and a listed selection 7 us per million entries, but 1.3 ms more to start with.
_LISTED_FROM = 1 << 26


def is_direct(values: Tensor) -> bool:
    """Whether all entries of ``values``, shape (n,), are compared on the device, so that the host never waits."""
    return not host_reads(values) and values.numel() < _LISTED_FROM


def _largest_unread(values: Tensor, ranges: Ranges) -> Chosen:
    positions = []
    for run in runs_of(*ranges.columns[:2]):
        part = ranges[run]
        if len(part) > 1:
            positions.append(_rows_unread(values, part))
        else:
            start, stop, k = part[0]
            positions.append(top_k_unread(values[start:stop].abs(), k).add_(start))
    joined = torch.cat(positions) if len(positions) > 1 else positions[0]
    # Without thresholds, the next step lists no candidates.
    return Chosen(ranges.columns.T, joined, torch.zeros(len(ranges), dtype=values.dtype), np.full(len(ranges), -1))


def _rows_unread(values: Tensor, ranges: Ranges) -> Tensor:
    """Largest entries of the rows of a matrix; ties go to the lowest positions."""
    magnitude = values[ranges.start : ranges.start + ranges.length].view(len(ranges), -1).abs()
    wanted = ranges.columns[2]
    count = torch.from_numpy(wanted).to(values.device, non_blocking=True)[:, None]
    top = magnitude.topk(max(1, int(wanted.max()))).values
    least = top.gather(1, (count - 1).clamp_(min=0)).masked_fill_(count == 0, math.inf)
    above, ties = magnitude > least, magnitude == least
    first = ties.cumsum(1, dtype=torch.int32) <= count - above.sum(1, keepdim=True)
    # An infinite entry must not pass as a tie in a row that selects nothing.
    chosen = (above | (ties & first)) & (count > 0)
    return torch.nonzero_static(chosen.view(-1), size=ranges.wanted).squeeze(1).add_(ranges.start)


class GpuFinder(PortableFinder):
    """Finder for CUDA: one kernel adds and compares."""

    def _add(self, values: Tensor, gradient: Tensor | None, ranges: ListingRanges, clear: bool) -> list[int]:
        # The host synchronizes with the GPU once, for the counts.
        from spardl.vector.kernels.gpu import add_and_list  # noqa: PLC0415 - triton is installed only with CUDA

        bounds: list[float] = ranges.bounds.tolist()
        starts, stops = ranges.starts.tolist(), ranges.stops.tolist()
        positions, counts = add_and_list(values, gradient, starts, stops, bounds, int(ranges.capacities.sum()))
        # The kernel only reads the gradient.
        if clear and gradient is not None:
            gradient.zero_()
        parts = positions.split([max(0, count) for count in counts])
        for start, stop, bound, part, count in zip(starts, stops, bounds, parts, counts, strict=True):
            if count >= 0:
                self._lists[start, stop] = (part, bound)
        return counts


class _Kind(NamedTuple):
    """Integer representation of a dtype's magnitudes: integer dtype, and a mask that removes the sign."""

    bits: torch.dtype
    mask: Any
    # Dtype in which arrays are passed to kernels: numpy has no bfloat16.
    array: torch.dtype


_KINDS: Mapping[torch.dtype, _Kind] = MappingProxyType(
    {
        torch.float32: _Kind(torch.int32, np.int32(2**31 - 1), torch.float32),
        torch.float64: _Kind(torch.int64, np.int64(2**63 - 1), torch.float64),
        torch.bfloat16: _Kind(torch.int16, np.int16(2**15 - 1), torch.uint16),
        torch.float16: _Kind(torch.int16, np.int16(2**15 - 1), torch.int16),
    }
)
_NO_POSITIONS: Integers = np.empty(0, np.int64)


class CompiledFinder(Finder):
    """Finder for the CPU: one compiled pass adds, compares and lists, without a temporary vector.

    Args:
        dtype: Type of the vector.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._kind = _KINDS[dtype]
        # int32 for all but the longest vectors; another integer type would trigger another compilation.
        self._places: NDArray[Any] = np.empty(0, np.int32)
        self._listed = torch.empty(0, dtype=dtype)
        # One column per listed range: its start and stop, start (or -1) and end of its list, and its bound as integer.
        self._lists: Integers = np.empty((5, 0), np.int64)

    def add(self, values: Tensor, gradient: Tensor | None, ranges: ListingRanges, *, clear: bool = False) -> Integers:
        """Adds and lists in one kernel; reuses the lists' memory from step to step."""
        from spardl.vector.kernels.selection import add_and_list  # noqa: PLC0415 - takes seconds to import

        capacity = int(ranges.capacities.sum())
        if self._places.size < capacity:
            small = values.numel() < 2**31
            self._places = np.empty(capacity, np.int32 if small else np.int64)
            self._listed = values.new_empty(capacity)
        self._lists = lists = np.empty((5, ranges.starts.size), np.int64)
        lists[0], lists[1] = ranges.starts, ranges.stops
        lists[4] = ranges.bounds.view(self._kind.bits).numpy()
        add_and_list(
            self._array(values),
            None if gradient is None else self._array(gradient),
            clear,
            lists[0],
            lists[1],
            self._array(ranges.bounds),
            ranges.capacities,
            self._places,
            self._array(self._listed),
            lists[2],
            lists[3],
        )
        return np.where(lists[2] < 0, -1, lists[3] - lists[2])

    def _array(self, values: Tensor) -> NDArray[Any]:
        return values.detach().view(self._kind.array).numpy()

    def largest(self, values: Tensor, parts: Sequence[Range], touched: Sequence[Tensor]) -> Chosen:
        """Finds the entries of all ranges in one kernel."""
        from spardl.vector.kernels.selection import largest  # noqa: PLC0415 - takes seconds to import

        bits, ranges = self._kind.bits, Ranges.of(parts)
        out = torch.empty(ranges.wanted, dtype=torch.int64)
        looked, keys = np.empty(len(parts), np.int64), torch.empty(len(parts), dtype=bits)
        largest(
            values.detach().view(bits).numpy(),
            self._kind.mask,
            ranges.columns,
            self._places,
            self._listed.view(bits).numpy(),
            self._lists,
            *_concatenated(touched),
            out.numpy(),
            looked,
            keys.numpy(),
        )
        return Chosen(ranges.columns.T, out, keys.view(values.dtype), looked)

    def reaching(
        self, values: Tensor, part: Range, bound: float, most: int, touched: Sequence[Tensor]
    ) -> Tensor | None:
        """Searches the list if it suffices, without access to the vector; otherwise the range."""
        from spardl.vector.kernels.selection import (  # noqa: PLC0415 - takes seconds to import
            collect,
            list_of,
        )

        first, last, least = list_of(self._lists, part.start, part.stop)
        key = int(values.new_tensor(bound).view(self._kind.bits))
        if first < 0 or touched or (key < least and last - first <= most):
            return super().reaching(values, part, bound, most, touched)
        # One entry longer than the list: the kernel writes before it decides whether an entry counts.
        out = torch.empty(last - first + 1, dtype=torch.int64)
        listed = self._listed[first:last].view(self._kind.bits).numpy()
        count = collect(self._places[first:last], listed, self._kind.mask, key, out.numpy())
        return out[:count] if count <= most else None


def _concatenated(positions: Sequence[Tensor]) -> tuple[Integers, Integers]:
    """Concatenates sequences; returns the result and the end of each sequence."""
    if len(positions) == 1:
        return positions[0].numpy(), np.array([positions[0].numel()])
    ends = np.fromiter(accumulate(part.numel() for part in positions), np.int64, len(positions))
    return torch.cat(list(positions)).numpy() if positions else _NO_POSITIONS, ends


def reaching(values: Tensor, start: int, stop: int, bound: float) -> Tensor:
    """Finds the entries of a range whose magnitude is at least a bound.

    Args:
        values: Vector of shape (n,).
        start: First position of the range.
        stop: Position after the last one of the range.
        bound: Least magnitude of the entries.

    Returns:
        int64 positions of shape (found,), increasing.
    """
    return _reaching(values, start, stop, bound, LazyAddition(values, None, False))


def _reaching(values: Tensor, start: int, stop: int, bound: float, addition: LazyAddition) -> Tensor:
    if compiled(values) and values.dtype in _KINDS:
        search = _search_compiled
    else:
        search = positions_reaching if values.device.type == "cpu" else _search
    if values.device.type != "cpu":
        addition.advance(stop)
        alone = search(values[start:stop], bound)
        return alone.add_(start) if start else alone
    block, found = block_of(values), [torch.empty(0, dtype=torch.int64, device=values.device)]
    for begin in range(start, stop, block):
        end = min(begin + block, stop)
        addition.advance(end)
        found.append(search(values[begin:end], bound) + begin)
    return torch.cat(found)


def _search(values: Tensor, bound: float) -> Tensor:
    return (values.abs() >= bound).nonzero().squeeze(1)


def _search_compiled(values: Tensor, bound: float) -> Tensor:
    from spardl.vector.kernels.selection import search  # noqa: PLC0415

    kind, out = _KINDS[values.dtype], torch.empty(values.numel() + 1, dtype=torch.int64)
    key = int(values.new_tensor(bound).view(kind.bits))
    return out[: search(values.detach().view(kind.bits).numpy(), kind.mask, key, out.numpy())]


def finder_for(values: Tensor) -> Finder:
    """Fastest finder for vectors like ``values``, shape (n,)."""
    # Compiled addition of float16 needs processor support.
    half = values.dtype == torch.float16
    if compiled(values) and values.dtype in _KINDS:
        from spardl.vector.kernels.words import adds_halves  # noqa: PLC0415 - takes seconds to import

        return CompiledFinder(values.dtype) if not half or adds_halves() else PortableFinder()
    if not runs_triton(values) or values.dtype not in _KINDS:
        return PortableFinder()
    if values.itemsize > 4 or values.numel() >= 2**31:
        return GpuFinder()
    from spardl.vector.unread import UnreadFinder  # noqa: PLC0415 - it imports this module

    return UnreadFinder()


def top_k(values: Tensor, k: int) -> Tensor:
    """Finds the positions of the k entries of largest magnitude.

    Ties go to the lowest index, so equal inputs give equal selections on every worker and device.

    Args:
        values: Finite floating-point tensor of shape (n,).
        k: Number of entries; at most 0 selects nothing, at least n selects everything.

    Returns:
        int64 positions of shape (min(max(k, 0), n),), strictly increasing.
    """
    length = values.numel()
    return finder_for(values).largest(values, [Range(0, length, min(max(k, 0), length))], []).positions


def top_k_unread(magnitude: Tensor, k: int) -> Tensor:
    """Finds the positions of the k largest entries without reading a value on the host; ties go to the lowest index.

    Args:
        magnitude: Tensor of shape (n,), without NaN.
        k: Number of entries, from 0 to n.

    Returns:
        int64 positions of shape (k,), strictly increasing.
    """
    length = magnitude.numel()
    if k in (0, length):
        return torch.arange(k, device=magnitude.device)
    top = magnitude.topk(k, sorted=False)
    cut = top.values.amin()
    above = top.values > cut
    # The lowest positions that equal the threshold fill the places that are left; ``length`` marks a missing position.
    ties = torch.nonzero_static(magnitude == cut, size=k, fill_value=length).squeeze(1)
    left = torch.arange(k, device=magnitude.device) < k - above.sum()
    found = torch.cat([torch.where(above, top.indices, length), torch.where(left, ties, length)])
    return found.sort().values[:k]


def _top_k(values: Tensor, k: int) -> Tensor:
    length = values.numel()
    if k == length:
        return torch.arange(length, device=values.device)
    if not k:
        return torch.empty(0, dtype=torch.int64, device=values.device)
    magnitude = values.abs()
    threshold = _kth_largest(magnitude, k)
    candidates = (magnitude >= threshold).nonzero().squeeze(1)
    if candidates.numel() == k:
        return candidates
    return _drop_late_ties(candidates, magnitude[candidates] > threshold, k)


def _kth_largest(magnitude: Tensor, k: int) -> Tensor:
    return kth_largest(magnitude, k) if magnitude.device.type == "cpu" else _least_of_top(magnitude, k)


def _least_of_top(magnitude: Tensor, k: int) -> Tensor:
    return magnitude.topk(k, sorted=False).values.amin()


def _drop_late_ties(candidates: Tensor, above: Tensor, k: int) -> Tensor:
    """Keeps the candidates above the threshold, and the first of those equal to it, k in total."""
    remaining = k - int(above.sum())
    return candidates[above | (torch.cumsum(~above, 0) <= remaining)]
