"""Single entries of a long vector in compiled form: what torch's indexing does, at several times its speed.

Positions are trusted: they were found in the vector. They are read as unsigned, or numba would test each for being
negative, to count it from the end.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from spardl.vector.kernels import njit
from spardl.vector.kernels.positions import among
from spardl.vector.kernels.words import fetch

__all__ = ["add", "cut", "cut_to_bfloat16", "gather", "put", "put_others"]

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
