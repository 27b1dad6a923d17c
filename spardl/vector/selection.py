"""Which entries of a vector are kept: exact selection with a rule for ties.

A *finder* adds a gradient to a vector, lists which entries are large then, and later finds the k largest of some
ranges among those: exactly, since where too few are listed it looks at all entries.
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
from spardl.vector.layout import Part, Parts

__all__ = [
    "Adding",
    "Chosen",
    "Finder",
    "Integers",
    "Ranges",
    "block_of",
    "finder_for",
    "in_rows",
    "kth_largest",
    "largest_of_rows",
    "least_of_rows",
    "reaching",
    "runs_of",
    "top_k",
]


# A gradient is added to a vector block by block, so that who looks at its entries next finds them in the cache.


_BLOCK = 1 << 17


def block_of(values: Tensor) -> int:
    """How many entries of ``values``, shape (n,), fit into a cache; on a GPU, all, and at least 1."""
    return _BLOCK if values.device.type == "cpu" else max(1, values.numel())


class Adding:
    """Goes no further than others need it next.

    Args:
        values: shape (n,), changed in place.
        gradient: shape (n,), or ``None``: there is nothing to add.
        clear: whether the gradient becomes zero.
    """

    def __init__(self, values: Tensor, gradient: Tensor | None, clear: bool) -> None:
        self._values, self._gradient, self._clear, self._done = values, gradient, clear, 0

    def reach(self, stop: int) -> None:
        """Goes on to the position ``stop`` at least."""
        length = self._values.numel()
        while self._gradient is not None and self._done < stop:
            end = min(self._done + block_of(self._values), length)
            more = self._gradient[self._done : end]
            self._values[self._done : end].add_(more)
            if self._clear:
                more.zero_()
            self._done = end


# Magnitudes on the CPU where nothing is compiled: without its sign bit, the bits of a number grow with its magnitude.
#
# numpy compares and orders whole numbers of any size with wide instructions; torch does so neither with what reaches a
# bound, of which it counts the positions first, nor with the k-th largest.


def positions_reaching(values: Tensor, bound: float) -> Tensor:
    """Where entries reach a bound.

    Args:
        values: floating point, shape (n,), on the CPU, no NaN.
        bound: least magnitude, rounded to the type of the values.

    Returns:
        int64, shape (found,), increasing.
    """
    return torch.from_numpy(np.flatnonzero(_keys(values) >= _keys(values.new_tensor([bound]))))


def kth_largest(values: Tensor, k: int) -> Tensor:
    """The k-th largest magnitude.

    Args:
        values: floating point, shape (n,), on the CPU, no NaN.
        k: from 1 to n.

    Returns:
        A number of the same type, shape ().
    """
    place = values.numel() - k
    keys = _keys(values)
    keys.partition(place)
    return torch.from_numpy(keys[place : place + 1]).view(values.dtype)[0]


def least_of_rows(values: Tensor, wanted: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
    """The least magnitude of the largest entries of each row, and where entries reach it.

    Args:
        values: floating point, shape (r, m), on the CPU, no NaN.
        wanted: shape (r,): how many are among the largest, from 0 to m.

    Returns:
        Magnitudes, shape (r,), infinite where none is wanted; and int64 positions in the rows laid end to end, shape
        (found,), increasing.
    """
    keys, length, most = _keys(values), values.shape[1], max(1, int(wanted.max()))
    parted = keys.copy()
    parted.partition(length - most, axis=1)
    top = np.sort(parted[:, length - most :], axis=1)
    least = np.take_along_axis(top, np.minimum(most - wanted, most - 1)[:, None], axis=1)
    least[wanted == 0] = _keys(values.new_tensor([float("inf")]))
    return torch.from_numpy(least[:, 0]).view(values.dtype), torch.from_numpy(np.flatnonzero(keys >= least))


def _keys(values: Tensor) -> NDArray[Any]:
    """In memory of its own."""
    bits = values.detach().view(_BITS[values.itemsize]).numpy()
    return bits & np.iinfo(bits.dtype).max


_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


# The largest entries of thousands of short ranges: rows of a matrix, in place of a loop over them.
#
# Chunks of some thousand entries adjoin one another and are of one length, so that one call finds the least magnitude
# that each sends. Lists of what was large in the step before would gain nothing: a row stays in the cache.


# Entries of the longest row, and rows of the smallest matrix: fewer or longer ranges are looked at one by one.
_LONGEST, _FEWEST = 1 << 14, 8

Integers = NDArray[np.int64]


def runs_of(starts: Integers, stops: Integers) -> list[slice]:
    """Which of some ranges are rows of one matrix, as they adjoin, are short, and of one length.

    Args:
        starts: shape (r,), where ranges start.
        stops: shape (r,), where they stop.

    Returns:
        Slices that together are all of them, in order; one of more than one range is such a matrix.
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
    """Which of some ranges are rows of a matrix: bool, shape (r,); see ``runs_of``."""
    found = np.zeros(starts.size, bool)
    for run in runs_of(starts, stops):
        found[run] = run.stop - run.start > 1
    return found


def largest_of_rows(values: Tensor, ranges: Parts) -> tuple[Tensor, Tensor]:
    """The largest entries of each of some rows; ties: the lowest positions.

    Args:
        values: floating point, shape (n,), finite.
        ranges: rows of a matrix, r of them, as ``runs_of`` finds them; k from 0 to their length.

    Returns:
        int64 positions in the vector, shape (sum of k,), row by row, increasing in each; and of each row the smallest
        magnitude that was chosen, shape (r,), or 0 where nothing was compared.
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
    """The least magnitude that each row sends, infinite where it sends none; and where entries reach it."""
    magnitude, count = values.abs(), torch.from_numpy(wanted).to(values.device)
    top = magnitude.topk(max(1, int(wanted.max()))).values
    least = top.gather(1, (count - 1).clamp(min=0)[:, None])
    least.masked_fill_(count[:, None] == 0, float("inf"))
    return least.squeeze(1), (magnitude >= least).view(-1).nonzero().squeeze(1)


def _drop_late_row_ties(magnitude: Tensor, least: Tensor, count: Tensor) -> Tensor:
    """Keeps what is above the least magnitude of its row, and of what equals it as many, from the front, as fit."""
    above, ties = magnitude > least[:, None], magnitude == least[:, None]
    room = (count - above.sum(1))[:, None]
    return (above | (ties & (ties.cumsum(1) <= room))).view(-1).nonzero().squeeze(1)


class Ranges(NamedTuple):
    """Ranges of a vector, and from which magnitude on their entries are large.

    Attributes:
        starts: shape (r,), increasing; ranges do not overlap.
        stops: shape (r,).
        bounds: shape (r,), above 0, of the vector's type, on the CPU.
        rooms: shape (r,): how many large entries each may have; of one that has more, none is listed.
    """

    starts: Integers
    stops: Integers
    bounds: Tensor
    rooms: Integers

    def only(self, some: NDArray[np.bool_]) -> Ranges:
        """Those of which ``some``, shape (r,), is true."""
        return Ranges(self.starts[some], self.stops[some], self.bounds[torch.from_numpy(some)], self.rooms[some])


class Chosen(NamedTuple):
    """The largest entries of some ranges.

    Attributes:
        parts: int64, shape (r, 3): the ranges, and how many were wanted of each.
        positions: int64, shape (chosen,): of all ranges in their order, increasing in each.
        cuts: magnitudes, shape (r,), on the CPU: of the smallest entry that was chosen; 0 where nothing was compared.
        looked: shape (r,): entries that were compared; -1 for all of the range.
    """

    parts: Integers
    positions: Tensor
    cuts: Tensor
    looked: Integers


class Finder(ABC):
    """Lists the large entries of one vector, and finds the largest ones."""

    @abstractmethod
    def add(self, values: Tensor, gradient: Tensor | None, ranges: Ranges, *, clear: bool = False) -> Integers:
        """Adds a gradient to a vector, and lists the entries that reach their range's bound.

        Args:
            values: shape (n,), changed in place.
            gradient: shape (n,), or ``None``.
            ranges: what is listed; replaces what was listed before.
            clear: whether the gradient becomes zero, or stays as it is.

        Returns:
            Shape (r,): how many are listed; -1 if there are too many.
        """

    @abstractmethod
    def largest(self, values: Tensor, parts: Sequence[Part], touched: Sequence[Tensor]) -> Chosen:
        """The k largest entries of each of some ranges; ties: the lowest positions.

        Args:
            values: shape (n,), as for ``add``, but for the touched entries.
            parts: not empty, k from 0 to the range's length.
            touched: positions of entries that may have changed since: int64, shape (m,) each, increasing.
        """

    def reaching(self, values: Tensor, part: Part, bound: float, most: int, touched: Sequence[Tensor]) -> Tensor | None:
        """The entries of a range that reach a bound, unless they are too many.

        Args:
            values: shape (n,), as for ``largest``.
            part: the range; its k does not matter.
            bound: least magnitude.
            most: so many entries are not too many.
            touched: as for ``largest``: int64, shape (m,) each.

        Returns:
            int64 positions, shape (found,), increasing; ``None`` if there are more than ``most``.
        """
        found = reaching(values, part.start, part.stop, bound)
        return found if found.numel() <= most else None


class PortableFinder(Finder):
    """For any device and type."""

    def __init__(self) -> None:
        self._lists: dict[tuple[int, int], tuple[Tensor, float]] = {}

    def add(self, values: Tensor, gradient: Tensor | None, ranges: Ranges, *, clear: bool = False) -> Integers:
        """Lists the ranges that are no rows: rows are looked at whole."""
        self._lists = {}
        alone = ~in_rows(ranges.starts, ranges.stops)
        counts = np.full(alone.size, -1)
        counts[alone] = self._add(values, gradient, ranges.only(alone), clear)
        return counts

    def _add(self, values: Tensor, gradient: Tensor | None, ranges: Ranges, clear: bool) -> list[int]:
        """Block by block, so that what was added is compared while it is in the cache."""
        adding, counts = Adding(values, gradient, clear), []
        for start, stop, bound, room in zip(*(each.tolist() for each in ranges), strict=True):
            positions = _reaching(values, start, stop, bound, adding)
            fits = positions.numel() <= room
            counts.append(positions.numel() if fits else -1)
            if fits:
                self._lists[start, stop] = (positions, bound)
        adding.reach(values.numel())
        return counts

    def largest(self, values: Tensor, parts: Sequence[Part], touched: Sequence[Tensor]) -> Chosen:
        """Range by range, but all chunks at once."""
        ranges = Parts.of(parts)
        found = [self._of_run(values, ranges[run], touched) for run in runs_of(*ranges.columns[:2])]
        positions, cuts, looked = zip(*found, strict=True)
        return Chosen(ranges.columns.T, torch.cat(positions), torch.cat(cuts).cpu(), np.concatenate(looked))

    def reaching(self, values: Tensor, part: Part, bound: float, most: int, touched: Sequence[Tensor]) -> Tensor | None:
        """Among what is listed, if that is enough to tell."""
        listed, least = self._lists.get((part.start, part.stop), (None, math.inf))
        if listed is None or touched or (bound < least and listed.numel() <= most):
            return super().reaching(values, part, bound, most, touched)
        # All that is listed reaches a lower bound.
        found = listed[values[listed].abs() >= bound]
        return found if found.numel() <= most else None

    def listed(self, start: int, stop: int) -> Tensor:
        """The positions that the range from ``start`` to ``stop`` has listed: int64, shape (m,); KeyError if none."""
        return self._lists[start, stop][0]

    def _of_run(self, values: Tensor, run: Parts, touched: Sequence[Tensor]) -> tuple[Tensor, Tensor, Integers]:
        if len(run) > 1:
            return *largest_of_rows(values, run), np.full(len(run), -1)
        part = run[0]
        positions, looked = self._largest(values, part, touched)
        compared = 0 < part.k < part.stop - part.start
        cut = values[positions].abs().min() if compared else values.new_zeros(())
        return positions, cut[None], np.array([looked])

    def _largest(self, values: Tensor, part: Part, touched: Sequence[Tensor]) -> tuple[Tensor, int]:
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


class GpuFinder(PortableFinder):
    """For CUDA: adds and compares in one pass."""

    def _add(self, values: Tensor, gradient: Tensor | None, ranges: Ranges, clear: bool) -> list[int]:
        """In one kernel, which waits for the GPU once."""
        from spardl.vector.kernels.gpu import add_and_list  # noqa: PLC0415 - triton is there only where CUDA is

        bounds: list[float] = ranges.bounds.tolist()
        starts, stops = ranges.starts.tolist(), ranges.stops.tolist()
        positions, counts = add_and_list(values, gradient, starts, stops, bounds, int(ranges.rooms.sum()))
        if clear and gradient is not None:
            gradient.zero_()
        parts = positions.split([max(0, count) for count in counts])
        for start, stop, bound, part, count in zip(starts, stops, bounds, parts, counts, strict=True):
            if count >= 0:
                self._lists[start, stop] = (part, bound)
        return counts


class _Kind(NamedTuple):
    """How a type's magnitudes compare as integers: their bits, and these without the sign."""

    bits: torch.dtype
    mask: Any
    # numpy knows no bfloat16.
    array: torch.dtype


_KINDS: Mapping[torch.dtype, _Kind] = MappingProxyType(
    {
        torch.float32: _Kind(torch.int32, np.int32(2**31 - 1), torch.float32),
        torch.float64: _Kind(torch.int64, np.int64(2**63 - 1), torch.float64),
        torch.bfloat16: _Kind(torch.int16, np.int16(2**15 - 1), torch.uint16),
        torch.float16: _Kind(torch.int16, np.int16(2**15 - 1), torch.int16),
    }
)
_NOWHERE: Integers = np.empty(0, np.int64)


class CompiledFinder(Finder):
    """For the CPU: adds, compares and lists in one pass, without a temporary vector.

    Args:
        dtype: of the vector.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._kind = _KINDS[dtype]
        # Short integers for all but the longest vectors; another type would be compiled for again.
        self._places: NDArray[Any] = np.empty(0, np.int32)
        self._listed = torch.empty(0, dtype=dtype)
        # Of each range that was listed: where it starts and stops, where its list begins, or -1, and ends; its bound.
        self._lists: Integers = np.empty((5, 0), np.int64)

    def add(self, values: Tensor, gradient: Tensor | None, ranges: Ranges, *, clear: bool = False) -> Integers:
        """In one kernel; the lists' memory is used again from step to step."""
        from spardl.vector.kernels.selection import add_and_list  # noqa: PLC0415 - takes seconds to import

        room = int(ranges.rooms.sum())
        if self._places.size < room:
            small = values.numel() < 2**31
            self._places = np.empty(room, np.int32 if small else np.int64)
            self._listed = values.new_empty(room)
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
            ranges.rooms,
            self._places,
            self._array(self._listed),
            lists[2],
            lists[3],
        )
        return np.where(lists[2] < 0, -1, lists[3] - lists[2])

    def _array(self, values: Tensor) -> NDArray[Any]:
        return values.detach().view(self._kind.array).numpy()

    def largest(self, values: Tensor, parts: Sequence[Part], touched: Sequence[Tensor]) -> Chosen:
        """All ranges in one kernel."""
        from spardl.vector.kernels.selection import largest  # noqa: PLC0415 - takes seconds to import

        bits, ranges = self._kind.bits, Parts.of(parts)
        out = torch.empty(ranges.wanted, dtype=torch.int64)
        looked, keys = np.empty(len(parts), np.int64), torch.empty(len(parts), dtype=bits)
        largest(
            values.detach().view(bits).numpy(),
            self._kind.mask,
            ranges.columns,
            self._places,
            self._listed.view(bits).numpy(),
            self._lists,
            *_end_to_end(touched),
            out.numpy(),
            looked,
            keys.numpy(),
        )
        return Chosen(ranges.columns.T, out, keys.view(values.dtype), looked)

    def reaching(self, values: Tensor, part: Part, bound: float, most: int, touched: Sequence[Tensor]) -> Tensor | None:
        """Among what is listed, if that is enough to tell; read from the list, not from the vector."""
        from spardl.vector.kernels.selection import (  # noqa: PLC0415 - takes seconds to import
            collect,
            list_of,
        )

        first, last, least = list_of(self._lists, part.start, part.stop)
        key = int(values.new_tensor(bound).view(self._kind.bits))
        if first < 0 or touched or (key < least and last - first <= most):
            return super().reaching(values, part, bound, most, touched)
        out = torch.empty(last - first + 1, dtype=torch.int64)
        listed = self._listed[first:last].view(self._kind.bits).numpy()
        count = collect(self._places[first:last], listed, self._kind.mask, key, out.numpy())
        return out[:count] if count <= most else None


def _end_to_end(positions: Sequence[Tensor]) -> tuple[Integers, Integers]:
    """Some sequences as one, and where each of them ends."""
    if len(positions) == 1:
        return positions[0].numpy(), np.array([positions[0].numel()])
    ends = np.fromiter(accumulate(part.numel() for part in positions), np.int64, len(positions))
    return torch.cat(list(positions)).numpy() if positions else _NOWHERE, ends


def reaching(values: Tensor, start: int, stop: int, bound: float) -> Tensor:
    """The positions of a range whose entries reach a bound.

    Args:
        values: shape (n,).
        start: first position of the range.
        stop: the position after its last.
        bound: least magnitude.

    Returns:
        int64, shape (found,), increasing.
    """
    return _reaching(values, start, stop, bound, Adding(values, None, False))


def _reaching(values: Tensor, start: int, stop: int, bound: float, adding: Adding) -> Tensor:
    if compiled(values) and values.dtype in _KINDS:
        search = _search_compiled
    else:
        search = positions_reaching if values.device.type == "cpu" else _search
    block, found = block_of(values), [torch.empty(0, dtype=torch.int64, device=values.device)]
    for begin in range(start, stop, block):
        end = min(begin + block, stop)
        adding.reach(end)
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
    """The fastest one for vectors like ``values``, shape (n,)."""
    half = values.dtype == torch.float16
    if compiled(values) and values.dtype in _KINDS:
        from spardl.vector.kernels.words import adds_halves  # noqa: PLC0415 - takes seconds to import

        return CompiledFinder(values.dtype) if not half or adds_halves() else PortableFinder()
    return GpuFinder() if runs_triton(values) and values.dtype in _KINDS and not half else PortableFinder()


def top_k(values: Tensor, k: int) -> Tensor:
    """The positions of the k entries of largest magnitude.

    Ties go to the lowest index, so equal inputs give equal selections on every worker and device.

    Args:
        values: floating point, shape (n,), finite.
        k: how many; at most 0 selects nothing, at least n selects everything.

    Returns:
        int64, shape (min(max(k, 0), n),), strictly increasing.
    """
    length = values.numel()
    return finder_for(values).largest(values, [Part(0, length, min(max(k, 0), length))], []).positions


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
    """Keeps every candidate above the threshold and as many of the equal ones, from the front, as fit."""
    room = k - int(above.sum())
    return candidates[above | (torch.cumsum(~above, 0) <= room)]
