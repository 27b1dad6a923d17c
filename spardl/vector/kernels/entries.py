"""Compiled kernels for sparse vectors: indexed access, sums, and set operations, several times faster than torch.

Positions are not checked. They are cast to unsigned integers, because numba tests signed ones for negative indices.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from spardl.vector.kernels import njit
from spardl.vector.kernels.words import fetch, lowest_bit

__all__ = [
    "add",
    "add_all",
    "add_two",
    "among",
    "cut",
    "cut_to_bfloat16",
    "gather",
    "put",
    "put_others",
    "split",
    "within",
]


# Sums of sorted sparse vectors; each entry is summed from the first vector to the last.


# Window size: one word has a bit for each word of marks, and all marks fit in the first-level cache.
_WIDTH = 64 * 64
_ZERO = np.uint64(0)
_ONE = np.uint64(1)
_USED_UP = np.iinfo(np.int64).max


@njit(nogil=True, cache=True, error_model="numpy")
def add_two(indices: Any, values: Any, other_indices: Any, other_values: Any, out_indices: Any, out_values: Any) -> Any:
    """Adds two sparse vectors, and writes the sum to the outputs.

    Args:
        indices: int64 indices of the first vector, strictly increasing.
        values: float32 or float64 values of the first vector.
        other_indices: Indices of the second vector.
        other_values: Values of the second vector.
        out_indices: int64 output, as long as both vectors together.
        out_values: Output of the same length.

    Returns:
        Number of entries of the sum.
    """
    nothing = values.dtype.type(0)
    one, other, done = 0, 0, 0
    while one < indices.size and other < other_indices.size:
        index, other_index = indices[one], other_indices[other]
        # Load both: the comparison is unpredictable, and a branch would be mispredicted half of the time.
        value, other_value = values[one], other_values[other]
        first, second = index <= other_index, other_index <= index
        out_indices[done] = min(index, other_index)
        # Start from +0 like the portable version: a lone value of -0.0 becomes 0.0 in both.
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
    """Adds any number of sparse vectors, and writes the sum to the outputs.

    Args:
        indices: Concatenated int64 indices of all vectors, strictly increasing in each.
        values: Concatenated float32 or float64 values.
        ends: For each vector, the position (int64) after its last entry in ``indices`` and ``values``.
        out_indices: int64 output, as long as ``indices``.
        out_values: Output of the same length.

    Returns:
        Number of entries of the sum.
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
    """Adds a vector's entries below ``stop``; returns a bit for each word of marks used."""
    used, entry, end = _ZERO, places[vector], ends[vector]
    index = heads[vector]
    while index < stop:
        # Equals index - base, but stays inside the window for any index.
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
    """Writes the entries of a window in order, and empties it; returns the number of entries written so far."""
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


# Set operations on increasing positions.


# Positions marked at a time, one byte each: the marks fit in a first-level cache.
_TILE = 1 << 15


@njit(nogil=True, cache=True, error_model="numpy")
def within(positions: Any, others: Any, out: Any) -> int:
    """Writes to ``out`` the indices (places in ``positions``) of those ``positions`` that occur in ``others``.

    Args:
        positions: int64 positions that consist of a few increasing sequences, one after the other.
        others: int64 positions, strictly increasing.
        out: int64 output, as long as ``positions``.

    Returns:
        Number of indices written.
    """
    found = np.empty(positions.size, np.bool_)
    among(positions, others, found)
    count = 0
    for place in range(positions.size):
        # Write always and count conditionally: a branch would be mispredicted often.
        out[count] = place
        count += np.int64(found[place])
    return count


@njit(nogil=True, cache=True, error_model="numpy")
def among(positions: Any, others: Any, found: Any) -> None:
    """Writes to ``found`` whether each of the ``positions`` occurs in ``others``.

    Args:
        positions: int64 positions that consist of a few increasing sequences, one after the other.
        others: int64 positions, strictly increasing.
        found: Bool output, as long as ``positions``.
    """
    marks = np.zeros(_TILE, np.uint8)
    begin, number = 0, np.uint8(0)
    while begin < positions.size:
        end = begin + 1
        while end < positions.size and positions[end - 1] < positions[end]:
            end += 1
        number = _among_run(positions[begin:end], others, marks, number, found[begin:end])
        begin = end


@njit(nogil=True, cache=True, error_model="numpy")
def _among_run(positions: Any, others: Any, marks: Any, number: Any, found: Any) -> Any:
    """Like ``among`` for one increasing run, window by window; returns the last mark used."""
    # Lookups in marks are independent of each other, whereas each step of a merge depends on the previous one. Marks
    # are numbered by window and never 0, so earlier windows need not be cleared.
    while positions.size:
        number = np.uint8(number + 1)
        if not number:
            marks[:] = 0
            number = np.uint8(1)
        first = positions[0]
        others = others[np.searchsorted(others, first) :]
        inside = np.searchsorted(others[:_TILE], first + _TILE)
        for place in range(inside):
            marks[np.uint64(others[place] - first)] = number
        many = np.searchsorted(positions[:_TILE], first + _TILE)
        for place in range(many):
            found[place] = marks[np.uint64(positions[place] - first)] == number
        others, positions, found = others[inside:], positions[many:], found[many:]
    return number


@njit(nogil=True, cache=True, error_model="numpy")
def split(array: Any, places: Any, chosen: Any, others: Any) -> None:
    """Copies the selected entries of an array to one output, and all others to a second one.

    Args:
        array: Array of shape (m,).
        places: int64 indices, strictly increasing.
        chosen: Output for the entries at these indices.
        others: Output for all other entries.
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


_CHUNK = 4096
# Prefetch distance in entries: without prefetching, a processor has only a few loads in flight.
_AHEAD = 64
_SIGN, _MAGNITUDE, _INFINITE = np.uint32(1 << 31), np.uint32(0x7FFFFFFF), np.uint32(0x7F800000)
_HALF, _UPPER, _LARGEST = np.uint32(0x7FFF), np.uint32(0xFFFF0000), np.uint32(0x7F7F0000)


@njit(nogil=True, cache=True, error_model="numpy")
def gather(values: Any, positions: Any, out: Any) -> None:
    """Copies the entries of ``values`` at ``positions`` to ``out``."""
    last = positions.size - 1
    for index in range(positions.size):
        fetch(values, positions[min(index + _AHEAD, last)])
        out[index] = values[np.uint64(positions[index])]


@njit(nogil=True, cache=True, error_model="numpy")
def put(values: Any, positions: Any, new: Any) -> None:
    """Overwrites the entries of ``values`` at ``positions`` with those of ``new``."""
    last = positions.size - 1
    for index in range(positions.size):
        fetch(values, positions[min(index + _AHEAD, last)])
        values[np.uint64(positions[index])] = new[index]


@njit(nogil=True, cache=True, error_model="numpy")
def put_others(values: Any, mask: Any, positions: Any, new: Any, kept: Any) -> Any:
    """Overwrites the entries at ``positions`` with those of ``new``, except at the positions in ``kept``.

    Args:
        values: Vector of shape (n,), as integers.
        mask: Bit mask that removes the sign from these integers.
        positions: Positions that consist of a few increasing sequences, one after the other.
        new: New entries, as integers.
        kept: Increasing positions that are not changed.

    Returns:
        The largest magnitude of an entry that was kept, as the bits of a number; a NaN exceeds all numbers.
    """
    stays = np.empty(positions.size, np.bool_)
    among(positions, kept, stays)
    kind, last = values.dtype.type, positions.size - 1
    most = kind(0)
    for index in range(positions.size):
        fetch(values, positions[min(index + _AHEAD, last)])
        place = np.uint64(positions[index])
        # Bit masks instead of a branch, which would be mispredicted often.
        now, changes = values[place], np.int64(stays[index]) - 1
        most = max(most, kind(now & mask & ~changes))
        values[place] = now ^ ((now ^ new[index]) & changes)
    return most


@njit(nogil=True, cache=True, error_model="numpy")
def cut(values: Any, positions: Any, out: Any) -> None:
    """Copies the entries of ``values`` at ``positions`` to ``out``, and sets them to zero in ``values``."""
    last = positions.size - 1
    for index in range(positions.size):
        fetch(values, positions[min(index + _AHEAD, last)])
        place = np.uint64(positions[index])
        out[index] = values[place]
        values[place] = 0


@njit(nogil=True, cache=True, error_model="numpy")
def add(values: Any, positions: Any, amounts: Any, before: Any) -> Any:
    """Adds ``amounts`` to the entries at distinct ``positions``, and copies the previous entries to ``before``.

    Returns:
        The largest magnitude of the amounts; NaN if one is NaN.
    """
    last, most, odd = positions.size - 1, amounts.dtype.type(0), False
    for index in range(positions.size):
        fetch(values, positions[min(index + _AHEAD, last)])
        place, amount = np.uint64(positions[index]), amounts[index]
        before[index] = values[place]
        values[place] += amount
        most = max(most, abs(amount))
        odd |= np.isnan(amount)
    return amounts.dtype.type(np.nan) if odd else most


@njit(nogil=True, cache=True, error_model="numpy")
def cut_to_bfloat16(values: Any, positions: Any, before: Any, sent: Any, errors: Any) -> None:
    """Rounds float32 entries to bfloat16, and replaces them by their rounding errors.

    Writes the original entries, the rounded values and the errors to the outputs. Rounds to nearest, ties to even;
    finite numbers stay finite. Infinities and NaNs are kept and have an error of 0.
    """
    # A chunk stays in the cache until its errors are written. Simple loops: the first one keeps many loads in flight,
    # the next two are vectorized.
    for begin in range(0, positions.size, _CHUNK):
        end = min(begin + _CHUNK, positions.size)
        places, brief = positions[begin:end], sent[begin:end]
        gather(values, places, before[begin:end])
        _round(before[begin:end].view(np.uint32), brief.view(np.uint32))
        _subtract(before[begin:end], brief, errors[begin:end])
        put(values, places, errors[begin:end])


@njit(nogil=True, cache=True, error_model="numpy")
def _round(bits: Any, out: Any) -> None:
    """Rounds the bits of float32 numbers to bfloat16."""
    for index in range(bits.size):
        magnitude, sign = np.uint32(bits[index] & _MAGNITUDE), np.uint32(bits[index] & _SIGN)
        odd = np.uint32(np.uint32(magnitude >> np.uint32(16)) & np.uint32(1))
        rounded = min(np.uint32(np.uint32(magnitude + _HALF + odd) & _UPPER), _LARGEST)
        out[index] = np.uint32((rounded if magnitude < _INFINITE else magnitude) | sign)


@njit(nogil=True, cache=True, error_model="numpy")
def _subtract(values: Any, others: Any, out: Any) -> None:
    """Differences of two arrays, 0 where a value is not finite."""
    for index in range(values.size):
        out[index] = values[index] - others[index] if abs(values[index]) < np.inf else np.float32(0)
