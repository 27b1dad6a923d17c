"""Single entries of a long vector in compiled form: what torch's indexing does, at several times its speed.

Positions are trusted: they were found in the vector. They are read as unsigned, or numba would test each for being
negative, to count it from the end.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

__all__ = ["add", "cut", "gather", "put"]


@njit(nogil=True, cache=True, error_model="numpy")
def gather(values: Any, positions: Any, out: Any) -> None:
    """``out`` gets the entries."""
    for index in range(positions.size):
        out[index] = values[np.uint64(positions[index])]


@njit(nogil=True, cache=True, error_model="numpy")
def put(values: Any, positions: Any, new: Any) -> None:
    """The entries become ``new``."""
    for index in range(positions.size):
        values[np.uint64(positions[index])] = new[index]


@njit(nogil=True, cache=True, error_model="numpy")
def cut(values: Any, positions: Any, out: Any) -> None:
    """``out`` gets the entries, which become 0."""
    for index in range(positions.size):
        place = np.uint64(positions[index])
        out[index] = values[place]
        values[place] = 0


@njit(nogil=True, cache=True, error_model="numpy")
def add(values: Any, positions: Any, amounts: Any, before: Any) -> None:
    """``before`` gets the entries, to which ``amounts`` are added then. No position may come twice."""
    for index in range(positions.size):
        place = np.uint64(positions[index])
        before[index] = values[place]
        values[place] += amounts[index]
