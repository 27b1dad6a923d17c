"""The largest magnitude of a vector in compiled form, found among its bits as whole numbers."""

from __future__ import annotations

from typing import Any

from spardl.vector.kernels import njit

__all__ = ["divide", "largest"]

_NEAR = 4096
"""Entries that are looked at twice in a row."""


@njit(nogil=True, cache=True, error_model="numpy")
def largest(bits: Any, mask: Any) -> Any:
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
    for start in range(0, values.size, _NEAR):
        # Looked at while it is in the cache, and not in the same loop, which would not be made into wide instructions.
        found = max(found, largest(bits[start : start + _NEAR], mask))
        _divide(values[start : start + _NEAR], divisor)
    return found


@njit(nogil=True, cache=True, error_model="numpy")
def _divide(values: Any, divisor: Any) -> None:
    for place in range(values.size):
        values[place] /= divisor
