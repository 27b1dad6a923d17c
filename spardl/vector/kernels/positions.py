"""Increasing positions in compiled form: which of them others have, and what is at some places and at all others."""

from __future__ import annotations

from typing import Any

import numpy as np

from spardl.vector.kernels import njit

__all__ = ["among", "split", "within"]


# Positions that are marked at a time, a byte each: they fit into a first-level cache.
_WIDTH = 1 << 15


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
    marks = np.zeros(_WIDTH, np.uint8)
    begin, number = 0, np.uint8(0)
    while begin < positions.size:
        end = begin + 1
        while end < positions.size and positions[end - 1] < positions[end]:
            end += 1
        number = _among_run(positions[begin:end], others, marks, number, found[begin:end])
        begin = end


@njit(nogil=True, cache=True, error_model="numpy")
def _among_run(positions: Any, others: Any, marks: Any, number: Any, found: Any) -> Any:
    """The same of one run, window by window: each look is for itself, where a merge must wait for the one before.

    Marks of a window are its number, which is never 0, so that those of the window before need not be removed; returned
    is the last one.
    """
    while positions.size:
        number = np.uint8(number + 1)
        if not number:
            marks[:] = 0
            number = np.uint8(1)
        first = positions[0]
        others = others[np.searchsorted(others, first) :]
        inside = np.searchsorted(others[:_WIDTH], first + _WIDTH)
        for place in range(inside):
            marks[np.uint64(others[place] - first)] = number
        many = np.searchsorted(positions[:_WIDTH], first + _WIDTH)
        for place in range(many):
            found[place] = marks[np.uint64(positions[place] - first)] == number
        others, positions, found = others[inside:], positions[many:], found[many:]
    return number


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
