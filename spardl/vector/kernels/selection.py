"""Compiled kernels for selection: lists of entries above a threshold, largest magnitudes, and exact top-k of ranges.

Magnitudes are compared as integers: without its sign bit, the bits of a floating-point number increase with its
magnitude. Vectors of bfloat16 and float16 are passed as described in ``spardl.vector.kernels.words``.
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


# One pass over memory that adds a gradient, clears it, and lists the entries that are large afterwards.


# Entries tested together without a branch: the results fit in one word.
_STRIDE = 64
# float32 entries per cache line, and the prefetch distance in entries: hardware prefetchers stop at the end of a page.
_LINE, _AHEAD = 16, 1024
# Entries that are added before they are compared, for types where a single loop is not vectorized for both.
_NEAR = 4096


@njit(nogil=True, cache=True, error_model="numpy")
def _add_and_list_range(
    memory: Any, gradient: Any, clear: bool, first: int, bound: Any, places: Any, values: Any, count: int
) -> int:
    """Appends positions, counted from ``first``, to a list of ``count``; returns the new number of entries, or -1."""
    full = memory.size // _STRIDE * _STRIDE
    # A full list is abandoned, but the addition continues because the vector is modified in place.
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
    """Like ``_add_and_list_range``, but compares entries in a second loop, while they are in the cache."""
    for begin in range(0, memory.size, _NEAR):
        end = min(begin + _NEAR, memory.size)
        near = memory[begin:end]
        _add(near, _part(gradient, begin, end), clear)
        if count >= 0:
            count = _add_and_list_range(near, None, False, first + begin, bound, places, values, count)
    return count


def _range(memory: Any, gradient: Any, clear: Any, first: Any, bound: Any, places: Any, values: Any, count: Any) -> Any:
    raise NotImplementedError("_range() has no Python version; call it only in functions compiled by numba")


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
    raise NotImplementedError("_part() has no Python version; call it only in functions compiled by numba")


# An overload instead of a branch: numba drops the branch for a gradient where it is ``None``, but keeps the branch for
# ``None`` where it is an array, and slices of an array would then have another type.
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
    capacities: Any,
    places: Any,
    values: Any,
    firsts: Any,
    lasts: Any,
) -> None:
    """Adds a gradient to a vector, and lists the entries whose sums reach the bound of their range.

    Args:
        memory: Vector of shape (n,), modified in place.
        gradient: Gradient of shape (n,); ``None`` to add nothing.
        clear: Whether to set the gradient to zero.
        starts: int64 starts of the ranges, increasing; ranges do not overlap. Entries outside are added as well.
        stops: int64 ends of the ranges.
        bounds: Smallest magnitude to list per range, comparable with the vector's entries.
        capacities: int64 maximum number of listed entries per range.
        places: Integer output for the listed positions, increasing; as long as the sum of all capacities.
        values: Output for the listed entries.
        firsts: int64 output for the start of each range's list in ``places``; -1 if the list exceeds its capacity.
        lasts: int64 output for the end of each range's list in ``places``.
    """
    count = before = 0
    for number in range(starts.size):
        start, stop = starts[number], stops[number]
        _add(memory[before:start], _part(gradient, before, start), clear)
        part = _part(gradient, start, stop)
        limit = count + capacities[number]
        reached = _range(memory[start:stop], part, clear, start, bounds[number], places[:limit], values[:limit], count)
        firsts[number] = count if reached >= 0 else -1
        count = max(count, reached)
        lasts[number] = count
        before = stop
    _add(memory[before:], _part(gradient, before, memory.size), clear)


# Largest magnitude.


_IN_CACHE = 4096
"""Number of entries read twice in a row, so that the second read hits the cache."""


@njit(nogil=True, cache=True, error_model="numpy")
def largest_magnitude(bits: Any, mask: Any) -> Any:
    """Returns the largest magnitude in a vector, as an integer with the same bits; a NaN exceeds all numbers.

    Args:
        bits: Vector of shape (n,), read as integers of the same size.
        mask: Bit mask that removes the sign from these integers.
    """
    # Everything in the type of the entries: numba would compare in 64 bits otherwise.
    kind = bits.dtype.type
    one = two = three = four = kind(0)
    # Four streams at once: memory serves several streams faster than one.
    quarter = bits.size // 4
    second, third, fourth = bits[quarter:], bits[2 * quarter :], bits[3 * quarter :]
    # Indexed: a loop over the entries themselves is vectorized less.
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
    """Divides a vector by a number in place.

    Args:
        values: float32 or float64 vector of shape (n,).
        bits: The memory of ``values``, as integers.
        mask: Bit mask that removes the sign from these integers.
        divisor: Divisor, in the type of the values.

    Returns:
        The largest magnitude before the division, as an integer with the same bits.
    """
    found = bits.dtype.type(0)
    for start in range(0, values.size, _IN_CACHE):
        # Read again while in the cache, but in a separate loop: a combined one would not be vectorized.
        found = max(found, largest_magnitude(bits[start : start + _IN_CACHE], mask))
        _divide(values[start : start + _IN_CACHE], divisor)
    return found


@njit(nogil=True, cache=True, error_model="numpy")
def _divide(values: Any, divisor: Any) -> None:
    for place in range(values.size):
        values[place] /= divisor


# Entries that reach a bound, in a list and in a block.


@njit(nogil=True, cache=True, error_model="numpy")
def collect(places: Any, listed: Any, mask: Any, bound: int, out: Any) -> int:
    """Writes the positions of those entries of a list that reach a bound.

    Args:
        places: Listed positions.
        listed: Entries at these positions, as integers.
        mask: Bit mask that removes the sign from these integers.
        bound: Smallest magnitude to find, as an integer with the same bits.
        out: int64 output, one longer than the list.

    Returns:
        The number of positions written.
    """
    count = 0
    for index in range(places.size):
        # Write always and count conditionally: a branch would be mispredicted often.
        out[count] = places[index]
        count += np.int64(np.int64(listed[index] & mask) >= bound)
    return count


@njit(nogil=True, cache=True, error_model="numpy")
def search(bits: Any, mask: Any, bound: Any, out: Any) -> int:
    """Writes the positions of those entries of a block that reach a bound.

    Args:
        bits: Entries of the block, as integers.
        mask: Bit mask that removes the sign from these integers.
        bound: Smallest magnitude to find, as an integer with the same bits.
        out: int64 output, at least as long as the block.

    Returns:
        The number of positions written.
    """
    # In the type of the entries: numba would compare in 64 bits, fewer entries at a time.
    kind = bits.dtype.type
    count, least, full = 0, kind(bound), bits.size // _STRIDE * _STRIDE
    for base in range(0, full, _STRIDE):
        # Slices keep indices non-negative: numba would test others for being negative.
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


# Bits per pass of the radix selection: the counters stay in the first-level cache. Few entries use a smaller digit,
# because clearing the counters would take longer than another pass over the entries.
_DIGIT, _SMALL_DIGIT, _FEW = 11, 8, 8192


@njit(nogil=True, cache=True, error_model="numpy")
def _kth(bits: Any, mask: Any, k: int, counters: Any) -> tuple[Any, int]:
    """Finds the k-th largest key, and how many keys equal to it belong to the k largest.

    Radix selection on the distance from the smallest key, from the highest digit down. If a digit separates the k
    largest keys exactly, the lower digits are not examined: all keys with this prefix belong to the k largest.
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
    """Smallest key, and distance of the largest key from it."""
    # In the type of the entries, here and below: numba would compare in 64 bits, fewer entries at a time.
    # Of the entries' own type, throughout: numba would compare in 64 bits, fewer at a time. So below.
    kind = bits.dtype.type
    least, most = mask, kind(0)
    for place in range(bits.size):
        key = kind(bits[place] & mask)
        least, most = min(least, key), max(most, key)
    return np.int64(least), np.int64(most) - np.int64(least)


@njit(nogil=True, cache=True, error_model="numpy")
def _count(bits: Any, mask: Any, least: Any, shift: int, counters: Any) -> None:
    """Histogram of the keys' distances from ``least``, in units of 2^shift; keys out of range are not counted."""
    counters[:] = 0
    for place in range(bits.size):
        # As an unsigned number, a negative distance is huge and falls out of range.
        distance = np.uint64(np.int64(bits[place] & mask) - least) >> np.uint64(shift)
        if distance < np.uint64(counters.size):
            counters[distance] += 1


@njit(nogil=True, cache=True, error_model="numpy")
def _collect(bits: Any, mask: Any, cut: Any, ties: int, out: Any) -> Any:
    """Writes the indices of keys above the cut, and of the first ``ties`` keys equal to it; they fill ``out``.

    Returns:
        The smallest key among them.
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
    """Bit masks of at most 64 keys: those above the cut, and those equal to it."""
    kind, above, equal = bits.dtype.type, np.uint64(0), np.uint64(0)
    for offset in range(bits.size):
        key = kind(bits[offset] & mask)
        above |= np.uint64(key > cut) << np.uint64(offset)
        equal |= np.uint64(key == cut) << np.uint64(offset)
    return above, equal


@njit(nogil=True, cache=True, error_model="numpy")
def _choose(bits: Any, mask: Any, counters: Any, out: Any) -> Any:
    """Fills ``out`` with the indices of the largest keys, increasing; returns the smallest of these keys."""
    cut, ties = _kth(bits, mask, out.size, counters)
    return _collect(bits, mask, cut, ties, out)


@njit(nogil=True, cache=True, error_model="numpy")
def _refresh(mask: Any, places: Any, listed: Any, touched: Any, now: Any, bound: Any, united: Any, fresh: Any) -> int:
    """Merges a list with positions whose entries may have changed; both are increasing.

    Args:
        mask: Mask that removes the sign.
        places: Listed positions.
        listed: Entries at these positions when they were listed.
        touched: Positions that may have changed.
        now: Current entries at these positions.
        bound: Bits of the least magnitude; touched entries below are dropped.
        united: Output for the positions, one longer than both inputs together.
        fresh: Output for the entries.

    Returns:
        Number of positions written.
    """
    here = there = count = 0
    while here < places.size and there < touched.size:
        old, new = np.int64(places[here]), touched[there]
        # Write always and count conditionally: a branch would be mispredicted often.
        place, changed = min(old, new), new <= old
        # Load both, because the comparison is unpredictable.
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
    """Positions and entries of a range that are listed or may have changed.

    Args:
        bits: Vector of shape (n,), as integers.
        mask: Mask that removes the sign.
        places: Listed positions of the range.
        listed: Entries at these positions when they were listed.
        touched: Positions that may have changed, concatenated increasing sequences.
        ends: Ends of these sequences.
        limits: Start, stop and bound of the range; touched entries below the bound are dropped.
        united: Two alternating buffers for positions, shape (2, capacity).
        fresh: Two alternating buffers for entries, shape (2, capacity).
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
    """Returns three numbers on the list of the range [start, stop): its start, its end, and its bound as an integer.

    All three are -1 if the range has no list. ``lists`` has the columns that ``largest`` describes.
    """
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
    """Finds the positions of the largest magnitudes of some ranges; ties go to the lowest positions.

    Args:
        bits: Vector of shape (n,), read as integers of the same size.
        mask: Bit mask that removes the sign from these integers.
        ranges: int64 array of shape (3, r): starts, stops, and number of entries wanted, from 0 to the range's length.
        places: Listed positions.
        listed: Entries at these positions, as integers.
        lists: int64 array of shape (5, l) with a column per listed range: start (increasing) and stop of the range;
            start (-1 if dropped) and end of its list in ``places``; smallest listed magnitude, as an integer. All other
            entries of the range are smaller, unless they are touched.
        touched: int64 positions of entries that may have changed since they were listed: increasing sequences, one
            after the other.
        ends: int64 ends of these sequences.
        out: int64 output of shape (sum of wanted,): positions range by range, increasing within each.
        counts: int64 output: number of candidates compared in each range; -1 if all its entries were compared.
        cuts: Integer output: smallest selected magnitude of each range, as an integer; 0 if nothing was compared.
    """
    counters = np.empty(1 << _DIGIT, np.int64)
    capacity = _longest(lists) + touched.size + 1 if ends.size else 0
    united, fresh = np.empty((2, capacity), places.dtype), np.empty((2, capacity), bits.dtype)
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
