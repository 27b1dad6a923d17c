"""Portable selection in torch and numpy: lazy addition, magnitudes as integers, many short ranges as matrix rows."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spardl.vector.bits import INTEGERS
from spardl.vector.layout import Ranges

__all__ = [
    "Integers",
    "LazyAddition",
    "block_of",
    "in_rows",
    "kth_largest",
    "largest_of_rows",
    "least_of_rows",
    "positions_reaching",
    "runs_of",
]

# Gradients are added block by block, so that the next read of the entries hits the cache.


_BLOCK = 1 << 17


def block_of(values: Tensor) -> int:
    """Returns how many entries of ``values``, shape (n,), to process at a time: a cache block, or all on a GPU."""
    return _BLOCK if values.device.type == "cpu" else max(1, values.numel())


class LazyAddition:
    """Adds a gradient to a vector block by block, always as far as the caller needs the sums.

    Args:
        values: Vector of shape (n,), modified in place.
        gradient: Gradient of shape (n,), or ``None`` if there is nothing to add.
        clear: Whether to set the gradient to zero.
    """

    def __init__(self, values: Tensor, gradient: Tensor | None, clear: bool) -> None:
        self._values, self._gradient, self._clear, self._done = values, gradient, clear, 0

    def advance(self, stop: int) -> None:
        """Adds the gradient to all positions below ``stop`` that still lack it, and to the rest of the last block."""
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
        bound: Smallest magnitude to find, rounded to the dtype of the values.

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
        The magnitude as a scalar tensor of the same dtype.
    """
    place = values.numel() - k
    keys = _keys(values)
    keys.partition(place)
    return torch.from_numpy(keys[place : place + 1]).view(values.dtype)[0]


def least_of_rows(values: Tensor, wanted: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
    """Finds the k-th largest magnitude of each row, and the entries that reach it.

    Args:
        values: Floating-point CPU tensor of shape (r, m), without NaN.
        wanted: k of each row, from 0 to m; shape (r,).

    Returns:
        The magnitudes, shape (r,), infinite for rows with k = 0; and the int64 positions of all entries that reach
        them, counted through the concatenated rows, shape (found,), increasing.
    """
    keys, length, most = _keys(values), values.shape[1], max(1, int(wanted.max()))
    parted = keys.copy()
    parted.partition(length - most, axis=1)
    top = np.sort(parted[:, length - most :], axis=1)
    least = np.take_along_axis(top, np.minimum(most - wanted, most - 1)[:, None], axis=1)
    least[wanted == 0] = _keys(values.new_tensor([float("inf")]))
    return torch.from_numpy(least[:, 0]).view(values.dtype), torch.from_numpy(np.flatnonzero(keys >= least))


def _keys(values: Tensor) -> NDArray[Any]:
    """Returns the magnitudes as integers, in new memory."""
    bits = values.detach().view(INTEGERS[values.itemsize]).numpy()
    return bits & np.iinfo(bits.dtype).max


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
        Slices of the sequence of ranges that together cover it in order. A slice of several ranges is such a matrix;
        each other range is one slice.
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
    """Returns whether each range is a row of a matrix, as defined by ``runs_of``: bool, shape (r,)."""
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
        magnitude of each row, shape (r,), which is 0 if nothing was compared.
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
