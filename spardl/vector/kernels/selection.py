"""The selection in compiled form: exact top-k of ranges.

Magnitudes are compared as whole numbers: without its sign bit, the bits of a floating-point number grow with its
magnitude. Vectors of bfloat16 and float16 come as in ``spardl.vector.kernels.words``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from spardl.vector.kernels import njit
from spardl.vector.kernels.entries import gather
from spardl.vector.kernels.words import fetch, is_short, lowest_bit, number_of_bits, reaches, sum_at

__all__ = ["add_and_list", "collect", "divide", "largest", "list_of", "search"]


# One pass over memory in compiled form: adds a gradient, clears it, and lists which entries are large then.
#
# Vectors of bfloat16 and float16 come as in ``spardl.vector.kernels.words``.


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


# The largest magnitude of a vector in compiled form, found among its bits as whole numbers.


_IN_CACHE = 4096
"""Entries that are looked at twice in a row."""


@njit(nogil=True, cache=True, error_model="numpy")
def largest_magnitude(bits: Any, mask: Any) -> Any:
    """The bits of the largest magnitude; a NaN is larger than any number.

    Args:
        bits: integers of the entries' size, shape (n,).
        mask: removes the sign.
    """
    # Of the entries' own type, throughout: numba would compare in 64 bits.
    kind = bits.dtype.type
    one = two = three = four = kind(0)
    # From four places on at once: memory answers several streams faster than one.
    quarter = bits.size // 4
    second, third, fourth = bits[quarter:], bits[2 * quarter :], bits[3 * quarter :]
    # Place by place: a loop over the entries themselves compares fewer at a time.
    for place in range(quarter):
        one = max(one, kind(bits[place] & mask))
        two = max(two, kind(second[place] & mask))
        three = max(three, kind(third[place] & mask))
        four = max(four, kind(fourth[place] & mask))
    for place in range(4 * quarter, bits.size):
        one = max(one, kind(bits[place] & mask))
    return max(one, two, three, four)


@njit(nogil=True, cache=True, error_model="numpy")
def divide(values: Any, bits: Any, mask: Any, divisor: Any) -> Any:
    """Divides entries by a number; returns the bits of what was the largest magnitude, as ``largest`` does.

    Args:
        values: float32 or float64, shape (n,).
        bits: the same memory, as integers.
        mask: removes the sign.
        divisor: of the type of the values.
    """
    found = bits.dtype.type(0)
    for start in range(0, values.size, _IN_CACHE):
        # Looked at while it is in the cache, and not in the same loop, which would not be made into wide instructions.
        found = max(found, largest_magnitude(bits[start : start + _IN_CACHE], mask))
        _divide(values[start : start + _IN_CACHE], divisor)
    return found


@njit(nogil=True, cache=True, error_model="numpy")
def _divide(values: Any, divisor: Any) -> None:
    for place in range(values.size):
        values[place] /= divisor


# What reaches a bound, in compiled form: of a list, and of all entries of a block.
#
# Magnitudes are compared as whole numbers, as in ``spardl.vector.kernels.selection``.


@njit(nogil=True, cache=True, error_model="numpy")
def collect(places: Any, listed: Any, mask: Any, bound: int, out: Any) -> int:
    """Writes which places of a list have entries that reach a bound.

    Args:
        places: positions.
        listed: the entries there, as integers.
        mask: removes the sign.
        bound: key of the least magnitude.
        out: int64, one longer than the list: gets the positions.

    Returns:
        How many there are.
    """
    count = 0
    for index in range(places.size):
        # Written always and counted only if it counts: no branch to mispredict.
        out[count] = places[index]
        count += np.int64(np.int64(listed[index] & mask) >= bound)
    return count


@njit(nogil=True, cache=True, error_model="numpy")
def search(bits: Any, mask: Any, bound: Any, out: Any) -> int:
    """Writes where a block's entries reach a bound.

    Args:
        bits: the entries, as integers.
        mask: removes the sign.
        bound: key of the least magnitude.
        out: int64, at least as long as the block: gets the positions in it.

    Returns:
        How many there are.
    """
    # Of the entries' own type: numba would compare in 64 bits, fewer at a time.
    kind = bits.dtype.type
    count, least, full = 0, kind(bound), bits.size // _STRIDE * _STRIDE
    for base in range(0, full, _STRIDE):
        # With places from 0 on: of others, numba would test each for being negative.
        part, hits = bits[base : base + _STRIDE], np.uint64(0)
        for offset in range(_STRIDE):
            hits |= np.uint64(kind(part[offset] & mask) >= least) << np.uint64(offset)
        while hits:
            out[count] = base + np.int64(lowest_bit(hits))
            hits &= hits - np.uint64(1)
            count += 1
    for place in range(full, bits.size):
        if bits[place] & mask >= least:
            out[count] = place
            count += 1
    return count


# Entries that are tested together, without a branch: the results fit into one word.
# Bits that one pass of the radix selection looks at: its counters stay in the first-level cache; and of few entries,
# where to clear the counters would take longer than to look at the entries once more.
_DIGIT, _SMALL_DIGIT, _FEW = 11, 8, 8192


@njit(nogil=True, cache=True, error_model="numpy")
def _kth(bits: Any, mask: Any, k: int, counters: Any) -> tuple[Any, int]:
    """The k-th largest key, and how many of those equal to it belong to the k largest.

    It is found digit by digit of how far it is above the least key, from the highest digit on. Where a digit cuts
    exactly between the k largest and the others, the rest need not be looked at: all that begin like it belong.
    """
    least, span = _span(bits, mask)
    left, wanted = 0, k
    while span >> left:
        left += 1
    longest = _DIGIT if bits.size > _FEW else _SMALL_DIGIT
    while left:
        digits = min(longest, left)
        left -= digits
        _count(bits, mask, least, left, counters[: 1 << digits])
        digit = (1 << digits) - 1
        while counters[digit] < wanted:
            wanted -= counters[digit]
            digit -= 1
        least += digit << left
        if counters[digit] == wanted:
            return least, np.int64(bits.size)
    return least, np.int64(wanted)


@njit(nogil=True, cache=True, error_model="numpy")
def _span(bits: Any, mask: Any) -> tuple[Any, Any]:
    """The least key, and how far the largest is above it."""
    # Of the entries' own type, throughout: numba would compare in 64 bits, fewer at a time. So below.
    kind = bits.dtype.type
    least, most = mask, kind(0)
    for place in range(bits.size):
        key = kind(bits[place] & mask)
        least, most = min(least, key), max(most, key)
    return np.int64(least), np.int64(most) - np.int64(least)


@njit(nogil=True, cache=True, error_model="numpy")
def _count(bits: Any, mask: Any, least: Any, shift: int, counters: Any) -> None:
    """Counts how many keys have which distance from ``least``, in units of 2^shift; others do not count."""
    counters[:] = 0
    for place in range(bits.size):
        # What is below is far above as an unsigned number.
        distance = np.uint64(np.int64(bits[place] & mask) - least) >> np.uint64(shift)
        if distance < np.uint64(counters.size):
            counters[distance] += 1


@njit(nogil=True, cache=True, error_model="numpy")
def _collect(bits: Any, mask: Any, cut: Any, ties: int, out: Any) -> Any:
    """Writes where the keys exceed the cut, and the first so many that equal it, which fill all room.

    Returns:
        The least key among them.
    """
    kind = bits.dtype.type
    count, least, cut = 0, mask, kind(cut)
    for base in range(0, bits.size, _STRIDE):
        chosen, equal = _compare(bits[base : base + _STRIDE], mask, cut)
        while equal and ties:
            chosen |= equal & (~equal + np.uint64(1))
            equal &= equal - np.uint64(1)
            ties -= 1
        while chosen:
            index = base + np.int64(lowest_bit(chosen))
            chosen &= chosen - np.uint64(1)
            out[count] = index
            count += 1
            least = min(least, kind(bits[index] & mask))
    return np.int64(least)


@njit(nogil=True, cache=True, error_model="numpy")
def _compare(bits: Any, mask: Any, cut: Any) -> tuple[Any, Any]:
    """A bit for each of at most 64 keys that exceed the cut, and for each that equals it."""
    kind, above, equal = bits.dtype.type, np.uint64(0), np.uint64(0)
    for offset in range(bits.size):
        key = kind(bits[offset] & mask)
        above |= np.uint64(key > cut) << np.uint64(offset)
        equal |= np.uint64(key == cut) << np.uint64(offset)
    return above, equal


@njit(nogil=True, cache=True, error_model="numpy")
def _choose(bits: Any, mask: Any, counters: Any, out: Any) -> Any:
    """Fills ``out`` with where the largest keys are, increasing; returns the least of these keys."""
    cut, ties = _kth(bits, mask, out.size, counters)
    return _collect(bits, mask, cut, ties, out)


@njit(nogil=True, cache=True, error_model="numpy")
def _refresh(mask: Any, places: Any, listed: Any, touched: Any, now: Any, bound: Any, united: Any, fresh: Any) -> int:
    """Unites a list with positions whose entries may have changed; both increase.

    Args:
        mask: removes the sign.
        places: listed positions.
        listed: the entries there, as they were.
        touched: positions.
        now: the entries there, as they are.
        bound: what does not reach it is left out.
        united: gets the positions; has room for one more than all.
        fresh: gets the entries.

    Returns:
        How many there are.
    """
    here = there = count = 0
    while here < places.size and there < touched.size:
        old, new = np.int64(places[here]), touched[there]
        # Written always and counted only if it counts: no branch to mispredict.
        place, changed = min(old, new), new <= old
        # Both are loaded: which it is cannot be foreseen.
        fresher, older = now[there], listed[here]
        entry = fresher if changed else older
        united[count], fresh[count] = place, entry
        here += np.int64(old <= new)
        there += np.int64(changed)
        count += np.int64(np.int64(entry & mask) >= bound)
    for index in range(here, places.size):
        united[count], fresh[count] = places[index], listed[index]
        count += 1
    for index in range(there, touched.size):
        united[count], fresh[count] = touched[index], now[index]
        count += np.int64(np.int64(now[index] & mask) >= bound)
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
            now = np.empty(part.size, bits.dtype)
            gather(bits, part, now)
            many = _refresh(mask, places, listed, part, now, limits[2], united[turn], fresh[turn])
            places, listed = united[turn, :many], fresh[turn, :many]
            turn = 1 - turn
    return places, listed


@njit(nogil=True, cache=True, error_model="numpy")
def _longest(lists: Any) -> Any:
    most = 0
    for row in range(lists.shape[1]):
        most = max(most, lists[3, row] - lists[2, row])
    return most


@njit(nogil=True, cache=True, error_model="numpy")
def list_of(lists: Any, start: int, stop: int) -> tuple[int, int, int]:
    """Where the list of a range begins and ends, and its bound; begins at -1 if there is none."""
    row = np.searchsorted(lists[0], start)
    if row == lists.shape[1] or lists[0, row] != start or lists[1, row] != stop:
        return -1, -1, -1
    return lists[2, row], lists[3, row], lists[4, row]


@njit(nogil=True, cache=True, error_model="numpy")
def largest(
    bits: Any,
    mask: Any,
    ranges: Any,
    places: Any,
    listed: Any,
    lists: Any,
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
        ranges: int64, shape (3, r): where they start, where they stop, and how many entries are wanted of each; none is
            negative or exceeds the range's length.
        places: listed positions.
        listed: the entries there, as integers.
        lists: int64, shape (5, l): of which ranges entries are listed, where these start, increasing, and stop; where
            each list begins, -1 if it was given up, and ends; and the key of the magnitude from which on entries are
            listed. All that reach it are listed or touched.
        touched: int64: positions whose entries may have changed since, some increasing sequences end to end.
        ends: int64: of these sequences.
        out: int64, shape (sum of wanted,): gets the positions, range by range, increasing.
        counts: int64: gets how many candidates were looked at in each range; -1 for all entries.
        cuts: integers of the entries' size: gets the key of the smallest entry chosen in each range; 0 if there was no
            choice.
    """
    counters = np.empty(1 << _DIGIT, np.int64)
    room = _longest(lists) + touched.size + 1 if ends.size else 0
    united, fresh = np.empty((2, room), places.dtype), np.empty((2, room), bits.dtype)
    begin = 0
    for number in range(ranges.shape[1]):
        start, stop, k = ranges[0, number], ranges[1, number], ranges[2, number]
        into, begin = out[begin : begin + k], begin + k
        counts[number], cuts[number] = -1, 0
        if k in (0, stop - start):
            into[:] = np.arange(start, start + k)
            continue
        first, last, bound = list_of(lists, start, stop)
        if first >= 0:
            near, keys = places[first:last], listed[first:last]
            limits = start, stop, bound
            near, keys = _candidates(bits, mask, near, keys, touched, ends, limits, united, fresh)
            if keys.size >= k:
                cuts[number] = _choose(keys, mask, counters, into)
                into[:] = near[into]
                counts[number] = keys.size
                continue
        cuts[number] = _choose(bits[start:stop], mask, counters, into)
        into += start
