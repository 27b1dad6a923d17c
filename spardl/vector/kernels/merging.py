"""Sums of sorted sparse vectors in compiled form, each index added up from the first vector to the last."""

from __future__ import annotations

from typing import Any

import numpy as np

from spardl.vector.kernels import njit
from spardl.vector.kernels.words import lowest_bit

__all__ = ["add_all", "add_two"]

# So that a word has a bit for each word of marks, and all fits into the first-level cache.
_WIDTH = 64 * 64
_ZERO = np.uint64(0)
_ONE = np.uint64(1)
_USED_UP = np.iinfo(np.int64).max


@njit(nogil=True, cache=True, error_model="numpy")
def add_two(indices: Any, values: Any, other_indices: Any, other_values: Any, out_indices: Any, out_values: Any) -> Any:
    """Adds two vectors.

    Args:
        indices: int64, strictly increasing: the first vector's.
        values: float32 or float64, as many.
        other_indices: the second vector's.
        other_values: as many.
        out_indices: int64, as long as both vectors together; to write.
        out_values: as long; to write.

    Returns:
        How many entries the sum has.
    """
    nothing = values.dtype.type(0)
    one, other, done = 0, 0, 0
    while one < indices.size and other < other_indices.size:
        index, other_index = indices[one], other_indices[other]
        # Loaded in any case: which index is lower cannot be foreseen, and half of all branches would be taken wrongly.
        value, other_value = values[one], other_values[other]
        first, second = index <= other_index, other_index <= index
        out_indices[done] = min(index, other_index)
        # Sums begin with 0, as in the portable twin: a value of -0.0 alone becomes 0.0 in both.
        out_values[done] = (nothing + (value if first else nothing)) + (other_value if second else nothing)
        one += first
        other += second
        done += 1
    done = _add_rest(indices[one:], values[one:], out_indices, out_values, done)
    return _add_rest(other_indices[other:], other_values[other:], out_indices, out_values, done)


@njit(nogil=True, cache=True, error_model="numpy")
def _add_rest(indices: Any, values: Any, out_indices: Any, out_values: Any, done: int) -> Any:
    nothing = values.dtype.type(0)
    for entry in range(indices.size):
        out_indices[done + entry] = indices[entry]
        out_values[done + entry] = nothing + values[entry]
    return done + indices.size


@njit(nogil=True, cache=True, error_model="numpy")
def add_all(indices: Any, values: Any, ends: Any, out_indices: Any, out_values: Any) -> int:
    """Adds any number of vectors, a window of the dense vector after the other; windows without entries cost nothing.

    Args:
        indices: int64, those of all vectors after each other; strictly increasing in each.
        values: float32 or float64, as many.
        ends: int64, where each vector ends in them.
        out_indices: int64, as long as ``indices``; to write.
        out_values: as long; to write.

    Returns:
        How many entries the sum has.
    """
    sums, marks = np.zeros(_WIDTH, values.dtype), np.zeros(_WIDTH // 64, np.uint64)
    places, heads = np.empty_like(ends), np.empty_like(ends)
    begin = 0
    for vector in range(ends.size):
        places[vector] = begin
        heads[vector] = indices[begin] if begin < ends[vector] else _USED_UP
        begin = ends[vector]
    done = 0
    while True:
        first = heads.min()
        if first == _USED_UP:
            return done
        base = first - first % _WIDTH
        used = _ZERO
        for vector in range(ends.size):
            if heads[vector] < base + _WIDTH:
                used |= _add_window(indices, values, places, heads, ends, vector, base + _WIDTH, sums, marks)
        done = _take_window(sums, marks, used, base, out_indices, out_values, done)


@njit(nogil=True, cache=True, error_model="numpy")
def _add_window(
    indices: Any, values: Any, places: Any, heads: Any, ends: Any, vector: int, stop: int, sums: Any, marks: Any
) -> Any:
    """Adds a vector's entries below ``stop``; returns a bit for each word of marks that was used."""
    used, entry, end = _ZERO, places[vector], ends[vector]
    index = heads[vector]
    while index < stop:
        # The same as index - base, but inside the window whatever the index is.
        position = index & (_WIDTH - 1)
        sums[position] += values[entry]
        marks[position >> 6] |= _ONE << np.uint64(position & 63)
        used |= _ONE << np.uint64(position >> 6)
        entry += 1
        index = indices[entry] if entry < end else _USED_UP
    places[vector], heads[vector] = entry, index
    return used


@njit(nogil=True, cache=True, error_model="numpy")
def _take_window(sums: Any, marks: Any, used: Any, base: int, out_indices: Any, out_values: Any, done: int) -> int:
    """Writes the entries of a window in order, and leaves it empty; returns how many there are so far."""
    while used:
        word = np.int64(lowest_bit(used))
        used &= used - _ONE
        bits, marks[word] = marks[word], _ZERO
        while bits:
            position = 64 * word + np.int64(lowest_bit(bits))
            bits &= bits - _ONE
            out_indices[done] = base + position
            out_values[done] = sums[position]
            sums[position] = 0
            done += 1
    return done
