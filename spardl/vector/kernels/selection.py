"""The selection in compiled form: exact top-k of ranges.

Magnitudes are compared as whole numbers: without its sign bit, the bits of a floating-point number grow with its
magnitude. Vectors of bfloat16 and float16 come as in ``spardl.vector.kernels.sums``.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from spardl.vector.kernels import njit
from spardl.vector.kernels.entries import gather
from spardl.vector.kernels.words import lowest_bit

__all__ = ["largest", "list_of"]

# Entries that are tested together, without a branch: the results fit into one word.
_STRIDE = 64
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
