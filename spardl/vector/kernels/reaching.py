"""What reaches a bound, in compiled form: of a list, and of all entries of a block.

Magnitudes are compared as whole numbers, as in ``spardl.vector.kernels.selection``.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from spardl.vector.kernels import njit
from spardl.vector.kernels.words import lowest_bit

__all__ = ["collect", "search"]

_STRIDE = 64


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
