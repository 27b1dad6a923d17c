"""Exact selection of the largest entries of a vector, with a rule for ties.

A *finder* adds a gradient to a vector and lists the entries that are large afterwards, that is, whose magnitude reaches
a bound. On a GPU, it may set bits (*marks*) instead of writing a list. Later, it finds the k largest entries of some
ranges in these lists. The result is exact: if a list is too short, the finder compares all entries. Entries that have
changed since they were listed (*touched* entries) are compared in any case. Of entries with equal magnitude, those at
the lowest positions are selected.
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

from spardl.vector.bits import integers_on
from spardl.vector.kernels import MOST_PER_PROGRAM, compiled, runs_triton
from spardl.vector.layout import Range, Ranges
from spardl.vector.norms import host_reads
from spardl.vector.rows import (
    Integers,
    LazyAddition,
    block_of,
    in_rows,
    kth_largest,
    largest_of_rows,
    positions_reaching,
    runs_of,
)

__all__ = [
    "Chosen",
    "Finder",
    "Integers",
    "ListingRanges",
    "UnreadFinder",
    "finder_for",
    "reaching",
    "top_k",
    "top_k_unread",
]


class ListingRanges(NamedTuple):
    """Ranges of a vector, with the bound of each: entries whose magnitude reaches it are listed.

    Attributes:
        starts: Starts of the ranges, shape (r,), increasing; ranges do not overlap.
        stops: Ends of the ranges, shape (r,).
        bounds: CPU tensor of shape (r,) in the vector's dtype: smallest magnitudes to list, above 0.
        capacities: Maximum length of each range's list, shape (r,); a longer list is dropped.
    """

    starts: Integers
    stops: Integers
    bounds: Tensor
    capacities: Integers

    def only(self, some: NDArray[np.bool_]) -> ListingRanges:
        """Returns the ranges for which ``some``, a bool array of shape (r,), is true."""
        return ListingRanges(
            self.starts[some], self.stops[some], self.bounds[torch.from_numpy(some)], self.capacities[some]
        )


class Chosen(NamedTuple):
    """Positions of the largest entries of some ranges, and statistics of the search.

    Attributes:
        parts: int64 array of shape (r, 3): start, stop and number of entries wanted (k) of each range.
        positions: int64 tensor of shape (chosen,): range by range, increasing within each.
        cuts: CPU tensor of shape (r,): smallest selected magnitude of each range; 0 if unknown, because nothing was
            compared or the host does not read it.
        looked: Number of entries compared per range, shape (r,); -1 if the whole range was compared or the number is
            unknown.
    """

    parts: Integers
    positions: Tensor
    cuts: Tensor
    looked: Integers


class Finder(ABC):
    """Base class of finders: adds a gradient to a vector, lists large entries, and finds the largest ones."""

    @abstractmethod
    def add(self, values: Tensor, gradient: Tensor | None, ranges: ListingRanges, *, clear: bool = False) -> Integers:
        """Adds a gradient to a vector, and lists the entries that reach their range's bound.

        Args:
            values: Vector of shape (n,), modified in place.
            gradient: Gradient of shape (n,), or ``None`` if there is nothing to add.
            ranges: Ranges whose entries are listed; earlier lists are dropped.
            clear: Whether to set the gradient to zero.

        Returns:
            Number of listed entries per range, shape (r,); -1 if the range has no list, for example because it was too
            long.
        """

    @abstractmethod
    def largest(self, values: Tensor, parts: Sequence[Range], touched: Sequence[Tensor]) -> Chosen:
        """Finds the k largest entries of each range; ties go to the lowest positions.

        Args:
            values: Vector of shape (n,), unchanged since ``add`` except for the touched entries.
            parts: At least one range, with k from 0 to the range's length.
            touched: int64 positions of entries that may have changed since ``add``, shape (m,) each, increasing.
        """

    @property
    def marks(self) -> Tensor | None:
        """Bitmap, int32, shape (m,), in which to mark changed entries; ``None`` to pass them to ``largest`` instead."""
        return None

    def flag(self, device: torch.device) -> Tensor:
        """Returns a true bool tensor of shape () on ``device``, which a kernel sets to false if a condition fails."""
        return torch.ones((), dtype=torch.bool, device=device)

    def check_next(self, gradient: Tensor) -> Tensor | None:
        """Checks ``gradient``, shape (n,), so that the next ``add`` depends on the result; may do nothing.

        Returns:
            Bool tensor of shape (2,), as from ``Candidates.check_next``; ``None`` if nothing was checked.
        """
        return None

    def reaching(
        self, values: Tensor, part: Range, bound: float, most: int, touched: Sequence[Tensor]
    ) -> Tensor | None:
        """Finds the entries of a range whose magnitude is at least a bound, up to a limit.

        Args:
            values: Vector of shape (n,), as for ``largest``.
            part: Range to search; its k is ignored.
            bound: Smallest magnitude of the entries to find.
            most: Maximum number of entries to return.
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
        """Adds the gradient, and lists entries of those ranges that are not rows of a matrix (see ``runs_of``).

        Rows, which are short, are compared whole in ``largest``.
        """
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
        """Selects entries range by range, but those of all rows of a matrix at once."""
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
        """Returns the listed positions of the range [start, stop): int64, shape (m,).

        Raises:
            KeyError: If the range has no list.
        """
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
    """Returns whether ``values``, shape (n,), are on a GPU and so few that all are compared, without lists."""
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
    """Returns the largest entries of the rows of a matrix; ties go to the lowest positions."""
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
    """Finder for CUDA: one kernel adds the gradient and compares the sums; the host waits for the counts."""

    def _add(self, values: Tensor, gradient: Tensor | None, ranges: ListingRanges, clear: bool) -> list[int]:
        # The host synchronizes with the GPU once, for the counts.
        from spardl.vector.kernels.gpu import add_and_list  # noqa: PLC0415 - triton is installed only with CUDA

        dense = None if gradient is None else gradient.contiguous()
        bounds: list[float] = ranges.bounds.tolist()
        starts, stops = ranges.starts.tolist(), ranges.stops.tolist()
        positions, counts = add_and_list(values, dense, starts, stops, bounds, int(ranges.capacities.sum()))
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
    """Finder for the CPU: adds, compares and lists in one compiled pass, without a temporary vector.

    Args:
        dtype: Dtype of the vector.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._kind = _KINDS[dtype]
        # int32 for all but the longest vectors; another integer type would trigger another compilation.
        self._places: NDArray[Any] = np.empty(0, np.int32)
        self._listed = torch.empty(0, dtype=dtype)
        # One column per listed range: its start and stop, start (or -1) and end of its list, and its bound as integer.
        self._lists: Integers = np.empty((5, 0), np.int64)

    def add(self, values: Tensor, gradient: Tensor | None, ranges: ListingRanges, *, clear: bool = False) -> Integers:
        """Adds the gradient and lists entries in one kernel; reuses the memory of the lists from step to step."""
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
        """Searches the list of the range if it suffices, without reading the vector; otherwise the whole range."""
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
        bound: Smallest magnitude of the entries to find.

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


# Selection on a GPU with Triton: the host reads no value, and bounds are reused from step to step.


# Capacity of the list of a range: a multiple of k, plus a constant for small ranges; as in ``candidates``.
_CAPACITY, _EXTRA = 4, 64
# Flags for the rest of a step, which are allocated with those of the gradient.
_SPARE = 14
# Tables that are kept; schedules of the density need new ones in every step.
_MOST_TABLES = 16


class UnreadFinder(PortableFinder):
    """Finder for CUDA and vectors of less than 2^31 entries: the host reads no value, so it never waits for the GPU."""

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
        """Adds the gradient and marks the entries that reach the bounds kept on the device since the last step.

        Ignores ``ranges``, and returns -1 for each of them.
        """
        from spardl.vector.kernels import gpu_select  # noqa: PLC0415 - triton is installed only with CUDA

        self._prepare(values)
        # The kernels read adjacent entries; a gradient may be a view with strides.
        dense = None if gradient is None else gradient.contiguous()
        gpu_select.add_and_mark(values, dense, self._flags, self._edges, self._bounds, self._words, len(self._marked))
        self._flags = None
        if clear and gradient is not None:
            gradient.zero_()
        return np.full(ranges.starts.size, -1)

    @property
    def marks(self) -> Tensor | None:
        """Bitmap of the marked entries, int32, shape (m,); ``None`` if no range has marks in this step."""
        return self._words if self._marked else None

    def check_next(self, gradient: Tensor) -> Tensor | None:
        """Checks ``gradient``, shape (n,), for the next ``add``; returns bools of shape (2,) as in ``Candidates``."""
        from spardl.vector.kernels import gpu_select  # noqa: PLC0415 - triton is installed only with CUDA

        flags = gpu_select.finite_flags(gradient.contiguous(), _SPARE)
        self._flags, *self._spare = flags.split([2, *[1] * _SPARE])
        return self._flags

    def flag(self, device: torch.device) -> Tensor:
        """Returns a true bool tensor of shape (): one that ``check_next`` allocated, if any is left, or a new one."""
        return self._spare.pop().view(()) if self._spare else super().flag(device)

    def _prepare(self, values: Tensor) -> None:
        from spardl.vector.kernels import gpu_select  # noqa: PLC0415

        device, marked = values.device, sorted(self._selected)
        # Of overlapping ranges, which do not occur so far, none is marked.
        if any(one[1] > two[0] for one, two in pairwise(marked)):
            marked = []
        if marked and not self._words.numel():
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
        # One program selects in each range, and compares all of its entries if a bound was wrong.
        if (ranges.columns[1] - ranges.columns[0]).max() > MOST_PER_PROGRAM:
            return _largest_unread(values, ranges)
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
        table = integers_on(device, rows)
        if self._added:
            if len(self._tables) >= _MOST_TABLES:
                del self._tables[next(iter(self._tables))]
            self._tables[parts] = table
        return table


def finder_for(values: Tensor) -> Finder:
    """Creates the fastest finder for vectors of the dtype, device and length of ``values``, shape (n,)."""
    # Compiled addition of float16 needs processor support.
    half = values.dtype == torch.float16
    if compiled(values) and values.dtype in _KINDS:
        from spardl.vector.kernels.words import adds_halves  # noqa: PLC0415 - takes seconds to import

        return CompiledFinder(values.dtype) if not half or adds_halves() else PortableFinder()
    if not runs_triton(values) or values.dtype not in _KINDS:
        return PortableFinder()
    if values.itemsize > 4 or values.numel() >= 2**31:
        return GpuFinder()
    return UnreadFinder()


def top_k(values: Tensor, k: int) -> Tensor:
    """Finds the positions of the k entries of largest magnitude.

    Ties go to the lowest index, so equal inputs give equal selections on every worker and device.

    Args:
        values: Finite floating-point tensor of shape (n,).
        k: Number of entries to select; at most 0 selects nothing, at least n selects everything.

    Returns:
        int64 positions of shape (min(max(k, 0), n),), strictly increasing.
    """
    length = values.numel()
    return finder_for(values).largest(values, [Range(0, length, min(max(k, 0), length))], []).positions


def top_k_unread(magnitude: Tensor, k: int) -> Tensor:
    """Finds the positions of the k largest magnitudes so that the host does not wait for a GPU; ties: lowest index.

    Args:
        magnitude: Magnitudes, shape (n,), without NaN.
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
