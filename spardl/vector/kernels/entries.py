"""Single entries of a long vector in compiled form: what torch's indexing does, at several times its speed.

Positions are trusted: they were found in the vector. They are read as unsigned, or numba would test each for being
negative, to count it from the end.
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


# Sums of sorted sparse vectors in compiled form, each index added up from the first vector to the last.


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


# Increasing positions in compiled form: which of them others have, and what is at some places and at all others.


# Positions that are marked at a time, a byte each: they fit into a first-level cache.
_TILE = 1 << 15


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


_CHUNK = 4096
# So many entries ahead, their memory is asked for: a processor alone waits for a few at a time.
_AHEAD = 64
_SIGN, _MAGNITUDE, _INFINITE = np.uint32(1 << 31), np.uint32(0x7FFFFFFF), np.uint32(0x7F800000)
_HALF, _UPPER, _LARGEST = np.uint32(0x7FFF), np.uint32(0xFFFF0000), np.uint32(0x7F7F0000)


@njit(nogil=True, cache=True, error_model="numpy")
def gather(values: Any, positions: Any, out: Any) -> None:
    """``out`` gets the entries."""
    last = positions.size - 1
    for index in range(positions.size):
        fetch(values, positions[min(index + _AHEAD, last)])
        out[index] = values[np.uint64(positions[index])]


@njit(nogil=True, cache=True, error_model="numpy")
def put(values: Any, positions: Any, new: Any) -> None:
    """The entries become ``new``."""
    last = positions.size - 1
    for index in range(positions.size):
        fetch(values, positions[min(index + _AHEAD, last)])
        values[np.uint64(positions[index])] = new[index]


@njit(nogil=True, cache=True, error_model="numpy")
def put_others(values: Any, mask: Any, positions: Any, new: Any, kept: Any) -> Any:
    """The entries become ``new``, but for those at positions that are ``kept``, too.

    Args:
        values: shape (n,), as integers.
        mask: removes the sign.
        positions: some increasing runs end to end.
        new: as many, as integers.
        kept: increasing positions.

    Returns:
        The bits of the largest magnitude that stayed; a NaN is larger than any number.
    """
    stays = np.empty(positions.size, np.bool_)
    among(positions, kept, stays)
    kind, last = values.dtype.type, positions.size - 1
    most = kind(0)
    for index in range(positions.size):
        fetch(values, positions[min(index + _AHEAD, last)])
        place = np.uint64(positions[index])
        # Chosen by its bits: no branch to mispredict.
        now, changes = values[place], np.int64(stays[index]) - 1
        most = max(most, kind(now & mask & ~changes))
        values[place] = now ^ ((now ^ new[index]) & changes)
    return most


@njit(nogil=True, cache=True, error_model="numpy")
def cut(values: Any, positions: Any, out: Any) -> None:
    """``out`` gets the entries, which become 0."""
    last = positions.size - 1
    for index in range(positions.size):
        fetch(values, positions[min(index + _AHEAD, last)])
        place = np.uint64(positions[index])
        out[index] = values[place]
        values[place] = 0


@njit(nogil=True, cache=True, error_model="numpy")
def add(values: Any, positions: Any, amounts: Any, before: Any) -> Any:
    """``before`` gets the entries, to which ``amounts`` are added then. No position may come twice.

    Returns:
        The largest magnitude of the amounts; NaN if there is one.
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
    """Rounds float32 entries, ``before``, to what is ``sent``; the difference stays, and goes to ``errors``.

    To the nearest, ties to even; finite numbers stay finite. Infinities and NaNs stay what they are, and leave nothing.
    """
    # A chunk stays in the cache until its errors are written. Plain loops: the first has many loads under way at once,
    # the next two work on several entries at once.
    for begin in range(0, positions.size, _CHUNK):
        end = min(begin + _CHUNK, positions.size)
        places, brief = positions[begin:end], sent[begin:end]
        gather(values, places, before[begin:end])
        _round(before[begin:end].view(np.uint32), brief.view(np.uint32))
        _subtract(before[begin:end], brief, errors[begin:end])
        put(values, places, errors[begin:end])


@njit(nogil=True, cache=True, error_model="numpy")
def _round(bits: Any, out: Any) -> None:
    """The bits of float32 numbers, rounded to bfloat16."""
    for index in range(bits.size):
        magnitude, sign = np.uint32(bits[index] & _MAGNITUDE), np.uint32(bits[index] & _SIGN)
        odd = np.uint32(np.uint32(magnitude >> np.uint32(16)) & np.uint32(1))
        rounded = min(np.uint32(np.uint32(magnitude + _HALF + odd) & _UPPER), _LARGEST)
        out[index] = np.uint32((rounded if magnitude < _INFINITE else magnitude) | sign)


@njit(nogil=True, cache=True, error_model="numpy")
def _subtract(values: Any, others: Any, out: Any) -> None:
    """The differences, 0 where a value is not finite."""
    for index in range(values.size):
        out[index] = values[index] - others[index] if abs(values[index]) < np.inf else np.float32(0)
