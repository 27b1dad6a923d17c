"""One pass over memory in compiled form: adds a gradient, clears it, and lists which entries are large then.

Vectors of bfloat16 and float16 come as in ``spardl.vector.kernels.sums``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from spardl.vector.kernels import njit
from spardl.vector.kernels.sums import is_short, reaches, sum_at
from spardl.vector.kernels.words import fetch, lowest_bit, number_of_bits

__all__ = ["add_and_list"]

# Entries that are tested together, without a branch: the results fit into one word.
_STRIDE = 64
# Entries of float32 in a line of a cache, and how many entries ahead memory is asked for: a processor alone stops at
# the end of every page.
_LINE, _AHEAD = 16, 1024
# Entries that are added up before they are compared, where one loop does not become wide instructions for both.
_NEAR = 4096


@njit(nogil=True, cache=True, error_model="numpy")
def _add_and_list_range(
    memory: Any, gradient: Any, clear: bool, first: int, bound: Any, places: Any, values: Any, count: int
) -> int:
    """Lists places, counted from ``first``, behind the first ``count``; returns how many are listed then, or -1."""
    full = memory.size // _STRIDE * _STRIDE
    # A list that is full is given up, but the adding goes on: the vector is changed in place.
    fits = True
    for base in range(0, full, _STRIDE):
        _fetch(memory, base + _AHEAD)
        if gradient is not None:
            _fetch(gradient, base + _AHEAD)
        hits = np.uint64(0)
        for offset in range(_STRIDE):
            value = sum_at(memory, gradient, base + offset)
            memory[base + offset] = value
            hits |= np.uint64(reaches(value, bound)) << np.uint64(offset)
        if gradient is not None and clear:
            _clear(gradient, base, base + _STRIDE)
        if hits and fits:
            fits = count + np.int64(number_of_bits(hits)) <= places.size
            while hits and fits:
                place = base + np.int64(lowest_bit(hits))
                hits &= hits - np.uint64(1)
                places[count], values[count] = first + place, memory[place]
                count += 1
    for place in range(full, memory.size):
        value = sum_at(memory, gradient, place)
        memory[place] = value
        if reaches(value, bound) and fits:
            fits = count < places.size
            if fits:
                places[count], values[count] = first + place, value
                count += 1
    if gradient is not None and clear:
        _clear(gradient, full, memory.size)
    return count if fits else -1


@njit(nogil=True, cache=True, error_model="numpy")
def _add_near_and_list_range(
    memory: Any, gradient: Any, clear: bool, first: int, bound: Any, places: Any, values: Any, count: int
) -> int:
    """The same; entries are looked at once more while they are in the cache."""
    for begin in range(0, memory.size, _NEAR):
        end = min(begin + _NEAR, memory.size)
        near = memory[begin:end]
        _add(near, _part(gradient, begin, end), clear)
        if count >= 0:
            count = _add_and_list_range(near, None, False, first + begin, bound, places, values, count)
    return count


def _range(memory: Any, gradient: Any, clear: Any, first: Any, bound: Any, places: Any, values: Any, count: Any) -> Any:
    raise NotImplementedError("compiled only")


@overload(_range, inline="always")
def _range_for(
    memory: Any, gradient: Any, clear: Any, first: Any, bound: Any, places: Any, values: Any, count: Any
) -> Any:
    return _short_range if is_short(memory.dtype) else _long_range


def _short_range(
    memory: Any, gradient: Any, clear: Any, first: Any, bound: Any, places: Any, values: Any, count: Any
) -> Any:
    return _add_near_and_list_range(memory, gradient, clear, first, bound, places, values, count)


def _long_range(
    memory: Any, gradient: Any, clear: Any, first: Any, bound: Any, places: Any, values: Any, count: Any
) -> Any:
    return _add_and_list_range(memory, gradient, clear, first, bound, places, values, count)


@njit(inline="always")
def _fetch(vector: Any, start: int) -> None:
    for offset in range(0, _STRIDE, _LINE):
        fetch(vector, start + offset)


@njit(inline="always")
def _clear(vector: Any, start: int, stop: int) -> None:
    for place in range(start, stop):
        vector[place] = 0


def _part(vector: Any, start: Any, stop: Any) -> Any:
    raise NotImplementedError("compiled only")


# Not a branch, as elsewhere: numba drops the one for a gradient where that is ``None``, but keeps the one for ``None``
# where it is an array, and parts of an array would get a type of their own.
@overload(_part, inline="always")
def _part_for(vector: Any, start: Any, stop: Any) -> Any:
    return _no_part if isinstance(vector, types.NoneType) else _array_part


def _no_part(vector: Any, start: Any, stop: Any) -> Any:
    return None


def _array_part(vector: Any, start: Any, stop: Any) -> Any:
    return vector[start:stop]


@njit(nogil=True, cache=True, error_model="numpy")
def _add(memory: Any, gradient: Any, clear: bool) -> None:
    for place in range(memory.size):
        memory[place] = sum_at(memory, gradient, place)
    if gradient is not None and clear:
        _clear(gradient, 0, memory.size)


@njit(nogil=True, cache=True, error_model="numpy")
def add_and_list(
    memory: Any,
    gradient: Any,
    clear: bool,
    starts: Any,
    stops: Any,
    bounds: Any,
    rooms: Any,
    places: Any,
    values: Any,
    firsts: Any,
    lasts: Any,
) -> None:
    """Adds a gradient, or ``None``, to a vector, and lists what then reaches the bound of its range.

    Args:
        memory: shape (n,), changed in place.
        gradient: shape (n,), or ``None``.
        clear: whether it becomes zero; it is in the cache when it has been added.
        starts: int64, increasing: of the ranges, which do not overlap; what lies in none is added, too.
        stops: int64.
        bounds: magnitudes, one per range, comparable with the vector's entries.
        rooms: int64: how many entries of each range may be listed.
        places: integers: gets positions, increasing; has the sum of all rooms.
        values: gets the entries there.
        firsts: int64: gets where each range's begin in the list; -1 if they did not fit.
        lasts: int64: and where they end.
    """
    count = before = 0
    for number in range(starts.size):
        start, stop = starts[number], stops[number]
        _add(memory[before:start], _part(gradient, before, start), clear)
        part = _part(gradient, start, stop)
        limit = count + rooms[number]
        reached = _range(memory[start:stop], part, clear, start, bounds[number], places[:limit], values[:limit], count)
        firsts[number] = count if reached >= 0 else -1
        count = max(count, reached)
        lasts[number] = count
        before = stop
    _add(memory[before:], _part(gradient, before, memory.size), clear)
