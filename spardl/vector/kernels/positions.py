"""Increasing positions in compiled form: which of them others have, and what is at some places and at all others."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

__all__ = ["among", "split", "within"]


# Positions that are marked at a time, a byte each: half of a first-level cache.
_WIDTH = 1 << 14


@njit(nogil=True, cache=True, error_model="numpy")
def within(positions: Any, others: Any, out: Any) -> int:
    """Writes at which places of ``positions`` there are some of ``others``.

    Args:
        positions: int64, some increasing runs end to end.
        others: int64, strictly increasing.
        out: int64, as long as ``positions``: gets the places.

    Returns:
        How many there are.
    """
    found = np.empty(positions.size, np.bool_)
    among(positions, others, found)
    count = 0
    for place in range(positions.size):
        # Written always and counted only if it counts: which it is cannot be foreseen.
        out[count] = place
        count += np.int64(found[place])
    return count


@njit(nogil=True, cache=True, error_model="numpy")
def among(positions: Any, others: Any, found: Any) -> None:
    """Writes which of ``positions`` are among ``others``.

    Args:
        positions: int64, some increasing runs end to end.
        others: int64, strictly increasing.
        found: bool, as long as ``positions``; to write.
    """
    marks = np.zeros(_WIDTH, np.bool_)
    begin = 0
    while begin < positions.size:
        end = begin + 1
        while end < positions.size and positions[end - 1] < positions[end]:
            end += 1
        _among_run(positions[begin:end], others, marks, found[begin:end])
        begin = end


@njit(nogil=True, cache=True, error_model="numpy")
def _among_run(positions: Any, others: Any, marks: Any, found: Any) -> None:
    """The same of one run, window by window: each look is for itself, where a merge must wait for the one before."""
    here, there = 0, np.searchsorted(others, positions[0])
    while here < positions.size:
        first = positions[here]
        while there < others.size and others[there] < first:
            there += 1
        begin = there
        while there < others.size and others[there] < first + _WIDTH:
            marks[np.uint64(others[there] - first)] = True
            there += 1
        while here < positions.size and positions[here] < first + _WIDTH:
            found[here] = marks[np.uint64(positions[here] - first)]
            here += 1
        for index in range(begin, there):
            marks[np.uint64(others[index] - first)] = False


@njit(nogil=True, cache=True, error_model="numpy")
def split(array: Any, places: Any, chosen: Any, others: Any) -> None:
    """Cuts an array in two.

    Args:
        array: shape (m,).
        places: int64, strictly increasing.
        chosen: gets what is at these places.
        others: gets what is at all others.
    """
    begin = 0
    for index in range(places.size):
        place = places[index]
        chosen[index] = array[place]
        for between in range(begin, place):
            others[between - index] = array[between]
        begin = place + 1
    for between in range(begin, array.size):
        others[between - places.size] = array[between]
