"""Entries as numbers of 8 bits, block by block, in compiled form."""

from __future__ import annotations

from typing import Any

import numpy as np

from spardl.vector.kernels import njit
from spardl.vector.kernels.magnitudes import largest

__all__ = ["pack_float8", "read_float8"]

# In float32: 2^-6, below which all numbers of 8 bits are at equal distances, 2^-9; and 2^14, which has that distance.
_LEAST, _EVEN = np.float32(2**-6), np.int32(121 << 23)
_STEP, _STEP_BITS = np.float32(1 << 14), np.int32(141 << 23)
# Half of the bits that are cut off, but for the last one; and what makes the exponent of one type that of the other.
_HALF, _SHIFT = np.int32((1 << 19) - 1), np.int32(120 << 23)


@njit(nogil=True, cache=True, error_model="numpy")
def pack_float8(
    values: Any,
    bits: Any,
    mask: Any,
    leave: bool,
    scales: Any,
    scale_bits: Any,
    near: Any,
    near_bits: Any,
    far: Any,
    far_bits: Any,
    highest: Any,
    packed: Any,
) -> None:
    """Writes the largest magnitude of each block, and the nearest number to each entry's share of it, times 448.

    Args:
        values: float32 or float64, shape (n,), finite.
        bits: the same memory, as integers.
        mask: removes the sign of such integers.
        leave: whether what a number stands for is taken out of its value.
        scales: of the same type, a number for each block; to write.
        scale_bits: the same memory, as integers.
        near: float32, as many as a block has entries, to work in.
        near_bits: the same memory, as integers.
        far: another such.
        far_bits: the same memory, as integers.
        highest: 448, of the type of the values.
        packed: uint8, shape (n,); to write.
    """
    for block in range(scales.size):
        start, stop = block * near.size, min((block + 1) * near.size, values.size)
        part, codes = values[start:stop], packed[start:stop]
        scale_bits[block] = largest(bits[start:stop], mask)
        scale = scales[block]
        _find(part, scale if scale > 0 else highest / highest, highest, near)
        _far(near[: part.size], far)
        _code(near_bits[: part.size], far_bits, codes)
        if leave:
            _leave(part, near, near_bits, far, highest, scale)


# Loops of their own over parts from their first entry on: only such are made into a few instructions for many entries.


@njit(nogil=True, cache=True, error_model="numpy")
def _find(values: Any, divisor: Any, highest: Any, near: Any) -> None:
    for entry in range(values.size):
        near[entry] = values[entry] / divisor * highest


@njit(nogil=True, cache=True, error_model="numpy")
def _far(near: Any, far: Any) -> None:
    """Rounds to multiples of 2^-9: their numbers are the last bits."""
    for entry in range(near.size):
        far[entry] = abs(near[entry]) + _STEP


@njit(nogil=True, cache=True, error_model="numpy")
def _code(near: Any, far: Any, packed: Any) -> None:
    for entry in range(packed.size):
        # 32 bits everywhere: numba makes 64 of what is added, and half as many entries would be done at a time.
        size = np.int32(near[entry] & np.int32(0x7FFFFFFF))
        odd = np.int32(np.int32(size >> 20) & np.int32(1))
        whole = np.int32(np.int32(size + _HALF) + odd)
        code = np.int32(far[entry] - _STEP_BITS) if size < _EVEN else np.int32(np.int32(whole - _SHIFT) >> np.int32(20))
        sign = np.int32(near[entry] & np.int32(-(2**31)))
        packed[entry] = np.int32(code | np.int32(np.int32(sign >> np.int32(24)) & np.int32(0x80)))
        near[entry] = np.int32(sign | np.int32(whole & np.int32(0x7FF00000)))


@njit(nogil=True, cache=True, error_model="numpy")
def _leave(values: Any, near: Any, near_bits: Any, far: Any, highest: Any, scale: Any) -> None:
    for entry in range(values.size):
        small = far[entry] - _STEP
        share = (small if small <= _LEAST else abs(near[entry])) / highest * scale
        values[entry] -= -share if near_bits[entry] < 0 else share


@njit(nogil=True, cache=True, error_model="numpy")
def read_float8(packed: Any, shares: Any, scales: Any, block: int, add: bool, values: Any) -> None:
    """Writes, or adds, what numbers stand for.

    Args:
        packed: uint8, shape (n,), as ``pack_float8`` wrote them.
        shares: of the type of the values, shape (256,): what each byte stands for.
        scales: float32 or float64, a number for each block.
        block: entries of a block.
        add: whether it is added to what is there.
        values: of the same type, shape (n,); to write.
    """
    for row in range(scales.size):
        start, stop = row * block, min((row + 1) * block, values.size)
        _read(packed[start:stop], shares, scales[row], add, values[start:stop])


@njit(nogil=True, cache=True, error_model="numpy")
def _read(packed: Any, shares: Any, scale: Any, add: bool, values: Any) -> None:
    if add:
        for entry in range(values.size):
            values[entry] += shares[packed[entry]] * scale
    else:
        for entry in range(values.size):
            values[entry] = shares[packed[entry]] * scale
