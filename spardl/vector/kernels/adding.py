"""One pass over memory in compiled form: adds a gradient, clears it, and lists which entries are large then.

A vector of bfloat16 comes as uint16, since numpy has no such type.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, types
from numba.extending import overload

from spardl.vector.kernels.words import fetch, lowest_bit

__all__ = ["add_and_list"]

# Entries that are tested together, without a branch: the results fit into one word.
_STRIDE = 64
# Entries of float32 in a line of a cache, and how many entries ahead memory is asked for: a processor alone stops at
# the end of every page.
_LINE, _AHEAD = 16, 1024


def _sum_at(memory: Any, gradient: Any, place: Any) -> Any:
    raise NotImplementedError("compiled only")


def _reaches(value: Any, bound: Any) -> Any:
    raise NotImplementedError("compiled only")


@overload(_sum_at, inline="always")
def _sum_at_for(memory: Any, gradient: Any, place: Any) -> Any:
    if isinstance(gradient, types.NoneType):
        return _alone_at
    return _float_sum_at if isinstance(memory.dtype, types.Float) else _brain_sum_at


def _alone_at(memory: Any, gradient: Any, place: Any) -> Any:
    return memory[place]


def _float_sum_at(memory: Any, gradient: Any, place: Any) -> Any:
    return memory[place] + gradient[place]


def _brain_sum_at(memory: Any, gradient: Any, place: Any) -> Any:
    # Numba widens what it shifts.
    one = np.uint32(np.uint32(memory[place]) << np.uint32(16)).view(np.float32)
    other = np.uint32(np.uint32(gradient[place]) << np.uint32(16)).view(np.float32)
    bits = np.float32(one + other).view(np.uint32)
    # To the nearest, ties to even. Finite numbers add up to no NaN, which this would not keep.
    odd = np.uint32(np.uint32(bits >> np.uint32(16)) & np.uint32(1))
    return np.uint16(np.uint32(bits + np.uint32(0x7FFF) + odd) >> np.uint32(16))


@overload(_reaches, inline="always")
def _reaches_for(value: Any, bound: Any) -> Any:
    return _float_reaches if isinstance(value, types.Float) else _brain_reaches


def _float_reaches(value: Any, bound: Any) -> Any:
    return abs(value) >= bound


def _brain_reaches(value: Any, bound: Any) -> Any:
    return (value & np.uint16(0x7FFF)) >= bound


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
        _fetch(gradient, base + _AHEAD)
        hits = np.uint64(0)
        for offset in range(_STRIDE):
            value = _sum_at(memory, gradient, base + offset)
            memory[base + offset] = value
            hits |= np.uint64(_reaches(value, bound)) << np.uint64(offset)
        if clear:
            _clear(gradient, base, base + _STRIDE)
        if hits and fits:
            fits = count + _STRIDE <= places.size
            while hits and fits:
                place = base + np.int64(lowest_bit(hits))
                hits &= hits - np.uint64(1)
                places[count], values[count] = first + place, memory[place]
                count += 1
    for place in range(full, memory.size):
        value = _sum_at(memory, gradient, place)
        memory[place] = value
        if _reaches(value, bound) and fits:
            fits = count < places.size
            if fits:
                places[count], values[count] = first + place, value
                count += 1
    if clear:
        _clear(gradient, full, memory.size)
    return count if fits else -1


def _fetch(vector: Any, start: Any) -> Any:
    raise NotImplementedError("compiled only")


@overload(_fetch, inline="always")
def _fetch_for(vector: Any, start: Any) -> Any:
    return _fetch_nothing if isinstance(vector, types.NoneType) else _fetch_stride


def _fetch_nothing(vector: Any, start: Any) -> Any:
    return None


def _fetch_stride(vector: Any, start: Any) -> Any:
    for offset in range(0, _STRIDE, _LINE):
        fetch(vector, start + offset)


def _clear(vector: Any, start: Any, stop: Any) -> Any:
    raise NotImplementedError("compiled only")


@overload(_clear, inline="always")
def _clear_for(vector: Any, start: Any, stop: Any) -> Any:
    return _no_part if isinstance(vector, types.NoneType) else _clear_array


def _clear_array(vector: Any, start: Any, stop: Any) -> Any:
    for place in range(start, stop):
        vector[place] = 0


def _part(vector: Any, start: Any, stop: Any) -> Any:
    raise NotImplementedError("compiled only")


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
        memory[place] = _sum_at(memory, gradient, place)
    if clear:
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
        reached = _add_and_list_range(
            memory[start:stop], part, clear, start, bounds[number], places[:limit], values[:limit], count
        )
        firsts[number] = count if reached >= 0 else -1
        count = max(count, reached)
        lasts[number] = count
        before = stop
    _add(memory[before:], _part(gradient, before, memory.size), clear)
