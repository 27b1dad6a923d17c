"""The largest magnitude of a vector in compiled form, found among its bits as whole numbers."""

from __future__ import annotations

from typing import Any

from numba import njit

__all__ = ["largest"]


@njit(nogil=True, cache=True, error_model="numpy")
def largest(bits: Any, mask: Any) -> Any:
    """The bits of the largest magnitude; a NaN is larger than any number.

    Args:
        bits: integers of the entries' size, shape (n,).
        mask: removes the sign.
    """
    # A zero of the entries' own type: a plain 0 would make numba compare in 64 bits.
    found = mask & ~mask
    # Place by place: a loop over the entries themselves compares fewer at a time.
    for place in range(bits.size):
        found = max(found, bits[place] & mask)
    return found
