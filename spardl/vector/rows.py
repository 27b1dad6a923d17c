"""The largest entries of thousands of short ranges: rows of a matrix, in place of a loop over them.

Chunks of some thousand entries adjoin one another and are of one length, so that one call finds the least magnitude
that each sends. Lists of what was large in the step before would gain nothing: a row stays in the cache.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spardl.vector import magnitudes
from spardl.vector.adding import block_of
from spardl.vector.layout import Parts

__all__ = ["Integers", "in_rows", "largest_of_rows", "runs_of"]

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
    least = magnitudes.least_of_rows if values.device.type == "cpu" else _least_of_rows
    cuts, reaching = least(values, wanted)
    count = torch.from_numpy(wanted).to(values.device)
    if reaching.numel() != int(wanted.sum()):
        reaching = _drop_late_ties(values.abs(), cuts, count)
    return reaching, torch.where((count > 0) & (count < values.shape[1]), cuts, cuts.new_zeros(()))


def _least_of_rows(values: Tensor, wanted: Integers) -> tuple[Tensor, Tensor]:
    """The least magnitude that each row sends, infinite where it sends none; and where entries reach it."""
    magnitude, count = values.abs(), torch.from_numpy(wanted).to(values.device)
    top = magnitude.topk(max(1, int(wanted.max()))).values
    least = top.gather(1, (count - 1).clamp(min=0)[:, None])
    least.masked_fill_(count[:, None] == 0, float("inf"))
    return least.squeeze(1), (magnitude >= least).view(-1).nonzero().squeeze(1)


def _drop_late_ties(magnitude: Tensor, least: Tensor, count: Tensor) -> Tensor:
    """Keeps what is above the least magnitude of its row, and of what equals it as many, from the front, as fit."""
    above, ties = magnitude > least[:, None], magnitude == least[:, None]
    room = (count - above.sum(1))[:, None]
    return (above | (ties & (ties.cumsum(1) <= room))).view(-1).nonzero().squeeze(1)
