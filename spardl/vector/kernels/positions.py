"""Increasing positions in compiled form: which of them others have, and what is at some places and at all others."""

from __future__ import annotations

from typing import Any

from numba import njit

__all__ = ["split", "within"]


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
    count = begin = 0
    while begin < positions.size:
        end = begin + 1
        while end < positions.size and positions[end - 1] < positions[end]:
            end += 1
        here, there = begin, 0
        while here < end and there < others.size:
            one, other = positions[here], others[there]
            # Written always and counted only if it counts: which is lower cannot be foreseen.
            out[count] = here
            count += one == other
            here += one <= other
            there += other <= one
        begin = end
    return count


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
