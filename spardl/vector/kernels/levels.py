"""Levels of entries, block by block, in compiled form: what is looked at twice is in the cache the second time."""

from __future__ import annotations

from typing import Any

import numpy as np

from spardl.vector.kernels import njit
from spardl.vector.kernels.magnitudes import largest

__all__ = ["pack_levels", "read_levels"]


@njit(nogil=True, cache=True, error_model="numpy")
def pack_levels(
    values: Any,
    bits: Any,
    mask: Any,
    top: Any,
    half: Any,
    width: int,
    leave: bool,
    scales: Any,
    scale_bits: Any,
    row: Any,
    row_bits: Any,
    packed: Any,
) -> None:
    """Writes the largest magnitude of each block, and the level of each entry, in planes of packed codes.

    Args:
        values: float32 or float64, shape (n,), finite.
        bits: the same memory, as integers.
        mask: removes the sign of such integers.
        top: the highest level, of the type of the values.
        half: 1.5 times the number from which on the type has whole numbers only: what is added to it is rounded.
        width: bits of a code.
        leave: whether what a level stands for is taken out of its value.
        scales: of the same type, a number for each block; to write.
        scale_bits: the same memory, as integers.
        row: of the same type, as many as a block has entries, to work in.
        row_bits: the same memory, as integers.
        packed: uint8, all codes, 0 for the lowest level; to write.
    """
    for block in range(scales.size):
        start, stop = block * row.size, min((block + 1) * row.size, values.size)
        part = values[start:stop]
        scale_bits[block] = largest(bits[start:stop], mask)
        scale = scales[block]
        _find(part, scale if scale > 0 else top / top, top, half, row)
        if leave:
            _leave(part, row, half + top, top, scale)
        first = start
        while first < stop:
            plane = first // packed.size
            before, last = plane * packed.size, min(stop, (plane + 1) * packed.size)
            _pack(row_bits[first - start : last - start], plane * width, packed[first - before : last - before])
            first = last


# Loops of their own over parts from their first entry on: only such are made into a few instructions for many entries.


@njit(nogil=True, cache=True, error_model="numpy")
def _find(values: Any, divisor: Any, top: Any, half: Any, row: Any) -> None:
    for entry in range(values.size):
        row[entry] = values[entry] / divisor * top + half + top


@njit(nogil=True, cache=True, error_model="numpy")
def _leave(values: Any, row: Any, nought: Any, top: Any, scale: Any) -> None:
    for entry in range(values.size):
        values[entry] -= (row[entry] - nought) / top * scale


@njit(nogil=True, cache=True, error_model="numpy")
def _pack(codes: Any, shift: int, packed: Any) -> None:
    """Of each number the last bits, which are the whole number that was added to half."""
    if shift == 0:
        for entry in range(packed.size):
            packed[entry] = codes[entry]
    else:
        for entry in range(packed.size):
            packed[entry] |= np.uint8(codes[entry] << shift)


@njit(nogil=True, cache=True, error_model="numpy")
def read_levels(packed: Any, width: int, top: Any, scales: Any, block: int, add: bool, values: Any) -> None:
    """Writes, or adds, what levels stand for.

    Args:
        packed: uint8, as ``pack_levels`` wrote them.
        width: bits of a code.
        top: the highest level, of the type of the values.
        scales: float32 or float64, a number for each block.
        block: entries of a block.
        add: whether it is added to what is there.
        values: of the same type, shape (n,); to write.
    """
    code = np.uint8((1 << width) - 1)
    for row in range(scales.size):
        first, stop = row * block, min((row + 1) * block, values.size)
        while first < stop:
            plane = first // packed.size
            before, last = plane * packed.size, min(stop, (plane + 1) * packed.size)
            shift = np.uint8(plane * width)
            _read(packed[first - before : last - before], shift, code, top, scales[row], add, values[first:last])
            first = last


@njit(nogil=True, cache=True, error_model="numpy")
def _read(packed: Any, shift: Any, code: Any, top: Any, scale: Any, add: bool, values: Any) -> None:
    if add:
        for entry in range(values.size):
            level = np.float32(np.uint8(packed[entry] >> shift) & code) - top
            values[entry] += level / top * scale
    else:
        for entry in range(values.size):
            level = np.float32(np.uint8(packed[entry] >> shift) & code) - top
            values[entry] = level / top * scale
