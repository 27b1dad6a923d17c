"""The selection in compiled form: one pass over memory to add and list, and exact top-k of ranges.

Magnitudes are compared as whole numbers: without its sign bit, the bits of a floating-point number grow with its
magnitude. Vectors of bfloat16 and float16 come as in ``spardl.vector.kernels.sums``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, types
from numba.extending import overload

from spardl.vector.kernels.sums import is_short, reaches, sum_at
from spardl.vector.kernels.words import lowest_bit

__all__ = ["add_and_list", "largest"]

# Entries that are tested together, without a branch: the results fit into one word.
_STRIDE = 64
# Bits that one pass of the radix selection looks at: its counters stay in the first-level cache; and of few entries,
# where to clear the counters would take longer than to look at the entries once more.
_DIGIT, _SMALL_DIGIT, _FEW = 11, 8, 8192
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
        hits = np.uint64(0)
        for offset in range(_STRIDE):
            value = sum_at(memory, gradient, base + offset)
            memory[base + offset] = value
            hits |= np.uint64(reaches(value, bound)) << np.uint64(offset)
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
        value = sum_at(memory, gradient, place)
        memory[place] = value
        if reaches(value, bound) and fits:
            fits = count < places.size
            if fits:
                places[count], values[count] = first + place, value
                count += 1
    if clear:
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


def _clear(vector: Any, start: Any, stop: Any) -> Any:
    raise NotImplementedError("compiled only")


@overload(_clear, inline="always")
def _clear_for(vector: Any, start: Any, stop: Any) -> Any:
    return _no_part if isinstance(vector, types.NoneType) else _clear_array


def _clear_array(vector: Any, start: Any, stop: Any) -> Any:
    vector[start:stop] = 0


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
        memory[place] = sum_at(memory, gradient, place)
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
        reached = _range(memory[start:stop], part, clear, start, bounds[number], places[:limit], values[:limit], count)
        firsts[number] = count if reached >= 0 else -1
        count = max(count, reached)
        lasts[number] = count
        before = stop
    _add(memory[before:], _part(gradient, before, memory.size), clear)


@njit(nogil=True, cache=True, error_model="numpy")
def _kth(bits: Any, mask: Any, k: int, width: int, counters: Any) -> tuple[Any, int]:
    """The k-th largest key, and how many of those equal to it belong to the k largest.

    It is found digit by digit from the highest one. Where a digit cuts exactly between the k largest and the others,
    the rest need not be looked at: all that begin like it belong.
    """
    prefix, left, wanted = np.int64(0), width, k
    longest = _DIGIT if bits.size > _FEW else _SMALL_DIGIT
    while left:
        digits = min(longest, left)
        below = left - digits
        counters[: 1 << digits] = 0
        for signed in bits:
            key = np.int64(signed & mask)
            if key >> left == prefix:
                counters[np.uint64((key >> below) & ((1 << digits) - 1))] += 1
        digit = (1 << digits) - 1
        while counters[digit] < wanted:
            wanted -= counters[digit]
            digit -= 1
        prefix, left = prefix << digits | digit, below
        if counters[digit] == wanted:
            return prefix << left, np.int64(bits.size)
    return prefix, np.int64(wanted)


@njit(nogil=True, cache=True, error_model="numpy")
def _collect(bits: Any, mask: Any, cut: Any, ties: int, out: Any) -> Any:
    """Writes where the keys exceed the cut, and the first so many that equal it, until all room is used.

    Returns:
        The least key among them.
    """
    count, least = 0, np.int64(mask)
    for index in range(bits.size):
        if count == out.size:
            break
        key = np.int64(bits[index] & mask)
        tie = np.int64(key == cut) & np.int64(ties > 0)
        # Written always and counted only if it counts: no branch to mispredict. So in ``_refresh``.
        out[count] = index
        chosen = np.int64(key > cut) | tie
        count += chosen
        least = min(least, key) if chosen else least
        ties -= tie
    return least


@njit(nogil=True, cache=True, error_model="numpy")
def _choose(bits: Any, mask: Any, width: int, counters: Any, out: Any) -> Any:
    """Fills ``out`` with where the largest keys are, increasing; returns the least of these keys."""
    cut, ties = _kth(bits, mask, out.size, width, counters)
    return _collect(bits, mask, cut, ties, out)


@njit(nogil=True, cache=True, error_model="numpy")
def _refresh(bits: Any, mask: Any, places: Any, listed: Any, touched: Any, bound: Any, united: Any, fresh: Any) -> int:
    """Unites a list with positions whose entries may have changed; both increase.

    Args:
        bits: the vector.
        mask: removes the sign.
        places: listed positions.
        listed: the entries there, as they were.
        touched: positions.
        bound: what does not reach it is left out.
        united: gets the positions; has room for one more than all.
        fresh: gets the entries.

    Returns:
        How many there are.
    """
    here = there = count = 0
    while here < places.size and there < touched.size:
        old, new = np.int64(places[here]), touched[there]
        place, changed = min(old, new), new <= old
        # Where nothing changed, an entry is loaded that is at hand, for nothing.
        loaded = bits[new if changed else np.int64(0)]
        entry = loaded if changed else listed[here]
        united[count], fresh[count] = place, entry
        here += np.int64(old <= new)
        there += np.int64(changed)
        count += np.int64(np.int64(entry & mask) >= bound)
    for index in range(here, places.size):
        united[count], fresh[count] = places[index], listed[index]
        count += 1
    for index in range(there, touched.size):
        entry = bits[touched[index]]
        united[count], fresh[count] = touched[index], entry
        count += np.int64(np.int64(entry & mask) >= bound)
    return count


@njit(nogil=True, cache=True, error_model="numpy")
def _candidates(
    bits: Any,
    mask: Any,
    places: Any,
    listed: Any,
    touched: Any,
    ends: Any,
    limits: Any,
    united: Any,
    fresh: Any,
) -> tuple[Any, Any]:
    """The positions and entries of a range that are listed or were touched since.

    Args:
        bits: the vector.
        mask: removes the sign.
        places: listed positions of the range.
        listed: the entries there, as they were.
        touched: positions, some increasing sequences end to end.
        ends: of these sequences.
        limits: where the range begins and ends, and the bound: what does not reach it is left out.
        united: shape (2, room): gets positions, in turns.
        fresh: shape (2, room): gets entries, in turns.
    """
    before = turn = 0
    for end in ends:
        part = touched[before:end]
        part = part[np.searchsorted(part, limits[0]) : np.searchsorted(part, limits[1])]
        before = end
        if part.size:
            many = _refresh(bits, mask, places, listed, part, limits[2], united[turn], fresh[turn])
            places, listed = united[turn, :many], fresh[turn, :many]
            turn = 1 - turn
    return places, listed


@njit(nogil=True, cache=True, error_model="numpy")
def largest(
    bits: Any,
    mask: Any,
    width: int,
    starts: Any,
    stops: Any,
    wanted: Any,
    places: Any,
    listed: Any,
    firsts: Any,
    lasts: Any,
    bounds: Any,
    touched: Any,
    ends: Any,
    out: Any,
    counts: Any,
    cuts: Any,
) -> None:
    """The positions of the largest magnitudes of some ranges; ties: the lowest positions.

    Args:
        bits: integers of the entries' size, shape (n,).
        mask: removes the sign.
        width: bits of a magnitude.
        starts: int64, of the ranges.
        stops: int64.
        wanted: int64, how many of each; none is negative or exceeds the range's length.
        places: listed positions of all ranges.
        listed: the entries there, as integers.
        firsts: int64: where each range's list begins; -1: none. Else all that reach its bound are listed or touched.
        lasts: int64: and where it ends.
        bounds: int64: keys of the magnitudes from which on entries are listed.
        touched: int64: positions whose entries may have changed since, some increasing sequences end to end.
        ends: int64: of these sequences.
        out: int64, shape (sum of wanted,): gets the positions, range by range, increasing.
        counts: int64: gets how many candidates were looked at in each range; -1 for all entries.
        cuts: int64: gets the key of the smallest entry chosen in each range; -1 if there was no choice.
    """
    counters = np.empty(1 << _DIGIT, np.int64)
    room = np.max(lasts - firsts) + touched.size + 1 if ends.size else 0
    united, fresh = np.empty((2, room), places.dtype), np.empty((2, room), bits.dtype)
    begin = 0
    for number in range(starts.size):
        start, stop, k = starts[number], stops[number], wanted[number]
        into, begin = out[begin : begin + k], begin + k
        counts[number] = cuts[number] = -1
        if k in (0, stop - start):
            into[:] = np.arange(start, start + k)
            continue
        if firsts[number] >= 0:
            near, keys = places[firsts[number] : lasts[number]], listed[firsts[number] : lasts[number]]
            limits = start, stop, bounds[number]
            near, keys = _candidates(bits, mask, near, keys, touched, ends, limits, united, fresh)
            if keys.size >= k:
                cuts[number] = _choose(keys, mask, width, counters, into)
                into[:] = near[into]
                counts[number] = keys.size
                continue
        cuts[number] = _choose(bits[start:stop], mask, width, counters, into)
        into += start
