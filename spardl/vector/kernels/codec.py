"""Indices as bits, and back, in compiled form: what ``spardl.vector.packing`` describes, with the same bytes."""

from __future__ import annotations

from typing import Any

import numpy as np

from spardl.vector.bits import low_bits
from spardl.vector.kernels import njit
from spardl.vector.kernels.selection import largest_magnitude
from spardl.vector.kernels.words import lowest_bit, number_of_bits

__all__ = ["decode", "encode", "pack_float8", "pack_levels", "read_float8", "read_levels", "write"]


# Entries as numbers of 8 bits, block by block, in compiled form.


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
        scale_bits[block] = largest_magnitude(bits[start:stop], mask)
        scale = scales[block]
        _find_float8(part, scale if scale > 0 else highest / highest, highest, near)
        _far(near[: part.size], far)
        _code(near_bits[: part.size], far_bits, codes)
        if leave:
            _leave_float8(part, near, near_bits, far, highest, scale)


# Loops of their own over parts from their first entry on: only such are made into a few instructions for many entries.


@njit(nogil=True, cache=True, error_model="numpy")
def _find_float8(values: Any, divisor: Any, highest: Any, near: Any) -> None:
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
def _leave_float8(values: Any, near: Any, near_bits: Any, far: Any, highest: Any, scale: Any) -> None:
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
        _read_float8(packed[start:stop], shares, scales[row], add, values[start:stop])


@njit(nogil=True, cache=True, error_model="numpy")
def _read_float8(packed: Any, shares: Any, scale: Any, add: bool, values: Any) -> None:
    if add:
        for entry in range(values.size):
            values[entry] += shares[packed[entry]] * scale
    else:
        for entry in range(values.size):
            values[entry] = shares[packed[entry]] * scale


# Levels of entries, block by block, in compiled form: what is looked at twice is in the cache the second time.


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
        scale_bits[block] = largest_magnitude(bits[start:stop], mask)
        scale = scales[block]
        _find_levels(part, scale if scale > 0 else top / top, top, half, row)
        if leave:
            _leave_levels(part, row, half + top, top, scale)
        first = start
        while first < stop:
            plane = first // packed.size
            before, last = plane * packed.size, min(stop, (plane + 1) * packed.size)
            _pack(row_bits[first - start : last - start], plane * width, packed[first - before : last - before])
            first = last


# Loops of their own over parts from their first entry on: only such are made into a few instructions for many entries.


@njit(nogil=True, cache=True, error_model="numpy")
def _find_levels(values: Any, divisor: Any, top: Any, half: Any, row: Any) -> None:
    for entry in range(values.size):
        row[entry] = values[entry] / divisor * top + half + top


@njit(nogil=True, cache=True, error_model="numpy")
def _leave_levels(values: Any, row: Any, nought: Any, top: Any, scale: Any) -> None:
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
            _read_levels(packed[first - before : last - before], shift, code, top, scales[row], add, values[first:last])
            first = last


@njit(nogil=True, cache=True, error_model="numpy")
def _read_levels(packed: Any, shift: Any, code: Any, top: Any, scale: Any, add: bool, values: Any) -> None:
    if add:
        for entry in range(values.size):
            level = np.float32(np.uint8(packed[entry] >> shift) & code) - top
            values[entry] += level / top * scale
    else:
        for entry in range(values.size):
            level = np.float32(np.uint8(packed[entry] >> shift) & code) - top
            values[entry] = level / top * scale


# Numba turns whole numbers of both signs into floating point where they meet.
_ZERO = np.uint64(0)
_ONE = np.uint64(1)
_BYTE = np.uint64(8)

# Of what is left of whole bytes.
_WIDTHS = (4, 2, 1)

_low_bits = njit(nogil=True, cache=True)(low_bits)


@njit(nogil=True, cache=True, error_model="numpy")
def write(values: Any, indices: Any, capacity: int, length: int, step: int, out: Any) -> None:
    """Writes a message: values, and the code of their indices.

    Args:
        values: whole numbers of the size of a value, as many as indices.
        indices: as for ``encode``.
        capacity: how many the message is for; zeros fill it up.
        length: of the dense vector.
        step: the number of low bits is a multiple of it.
        out: uint8, aligned as values have to be; what is longer than the message is filled up with zeros.
    """
    border = capacity * values.itemsize
    room = out[:border].view(values.dtype)
    _copy(values, room[: values.size])
    room[values.size :] = 0
    encode(indices, capacity, length, step, out[border:])


@njit(nogil=True, cache=True, error_model="numpy")
def encode(indices: Any, capacity: int, length: int, step: int, out: Any) -> None:
    """Writes the code of indices.

    Args:
        indices: int64, strictly increasing, below ``length``, at most ``capacity``.
        capacity: how many the code is for; indices that are ``length`` fill it up.
        length: of the dense vector.
        step: the number of low bits is a multiple of it.
        out: uint8; what is longer than the code is filled up with zeros.
    """
    low = _low_bits(capacity, length, step)
    planes = low // 8
    for plane in range(planes):
        _write_plane(indices, length, 8 * plane, out[plane * capacity : (plane + 1) * capacity])
    begin, first = planes * capacity, 8 * planes
    for width in _WIDTHS:
        if low & width:
            size = (capacity * width + 7) // 8
            _write_codes(indices, length, first, width, capacity, out[begin : begin + size])
            begin += size
            first += width
    _write_bits(indices, length, low, capacity, out[begin:])


@njit(nogil=True, cache=True, error_model="numpy")
def _write_plane(indices: Any, length: int, shift: int, out: Any) -> None:
    for entry in range(indices.size):
        out[entry] = (indices[entry] >> shift) & 0xFF
    out[indices.size :] = (length >> shift) & 0xFF


@njit(nogil=True, cache=True, error_model="numpy")
def _write_codes(indices: Any, length: int, shift: int, width: int, capacity: int, out: Any) -> None:
    """Writes a few bits of each index; as many times as they fit into a byte, over the same memory."""
    size, mask = out.size, (1 << width) - 1
    filling = (length >> shift) & mask
    out[:] = 0
    for place in range(0, 8, width):
        first = place // width * size
        part = indices[first : first + size]
        for entry in range(part.size):
            out[entry] |= ((part[entry] >> shift) & mask) << place
        for entry in range(part.size, min(size, capacity - first)):
            out[entry] |= filling << place


@njit(nogil=True, cache=True, error_model="numpy")
def _write_bits(indices: Any, length: int, low: int, capacity: int, out: Any) -> None:
    """Writes the bitmap; a word stays in a register until all its bits are known."""
    place, word = 0, _ZERO
    for entry in range(indices.size):
        bit = (indices[entry] >> low) + entry
        while bit >= 64 * (place + 1):
            place, word = _write_word(word, place, out), _ZERO
        word |= _ONE << np.uint64(bit & 63)
    for entry in range(indices.size, capacity):
        bit = (length >> low) + entry
        while bit >= 64 * (place + 1):
            place, word = _write_word(word, place, out), _ZERO
        word |= _ONE << np.uint64(bit & 63)
    place = _write_word(word, place, out)
    out[8 * place :] = 0


@njit(nogil=True, cache=True, error_model="numpy")
def _write_word(word: Any, place: int, out: Any) -> int:
    """Writes what of a word is within ``out``; returns the place of the next one."""
    if 8 * place + 8 <= out.size:
        for byte in range(8):
            out[8 * place + byte] = word >> np.uint64(8 * byte)
    else:
        for byte in range(max(0, out.size - 8 * place)):
            out[8 * place + byte] = word >> np.uint64(8 * byte)
    return place + 1


@njit(nogil=True, cache=True, error_model="numpy")
def decode(messages: Any, slots: Any, indices: Any, values: Any) -> int:
    """Reads messages that lie end to end, as one vector.

    Args:
        messages: uint8, aligned as values have to be.
        slots: int64, shape (messages, 3): capacity, length and step of each.
        indices: int64, as long as all capacities together; to write.
        values: whole numbers of the size of a value, as long; to write.

    Returns:
        How many entries there are, or -1 if there are fewer bytes than the slots say.
    """
    raw = messages[: messages.size // values.itemsize * values.itemsize].view(values.dtype)
    begin, start, done = 0, 0, 0
    for message in range(slots.shape[0]):
        capacity, length = slots[message, 0], slots[message, 1]
        low = _low_bits(capacity, length, slots[message, 2])
        lows = begin + capacity * raw.itemsize
        uppers = lows + low // 8 * capacity
        for width in _WIDTHS:
            if low & width:
                uppers += (capacity * width + 7) // 8
        end = uppers + (capacity + (length >> low) + 7) // 8 if capacity else begin
        if end > messages.size:
            return -1
        room = indices[done : done + capacity]
        found = _read_bits(messages[uppers:end], low, room)
        found = _read_lows(messages[lows:uppers], low, length, start, room, found)
        first = begin // raw.itemsize
        _copy(raw[first : first + found], values[done : done + found])
        done += found
        start += length
        begin = (end + raw.itemsize - 1) // raw.itemsize * raw.itemsize
    return done


@njit(nogil=True, cache=True, error_model="numpy")
def _copy(values: Any, out: Any) -> None:
    for entry in range(out.size):
        out[entry] = values[entry]


@njit(nogil=True, cache=True, error_model="numpy")
def _read_bits(code: Any, low: int, out: Any) -> Any:
    """Reads upper parts until the room or the bitmap ends; returns how many there are."""
    found = 0
    for place in range(code.size // 8):
        word = _word(code, place)
        end = found + np.int64(number_of_bits(word))
        if end + 3 > out.size:
            return _read_rest(code, place, low, found, out)
        # Four at a time is faster; up to three too many are written, and overwritten next.
        while found < end:
            first = np.int64(lowest_bit(word))
            word &= word - _ONE
            second = np.int64(lowest_bit(word))
            word &= word - _ONE
            third = np.int64(lowest_bit(word))
            word &= word - _ONE
            fourth = np.int64(lowest_bit(word))
            word &= word - _ONE
            before = 64 * place - found
            out[found] = (before + first) << low
            out[found + 1] = (before + second - 1) << low
            out[found + 2] = (before + third - 2) << low
            out[found + 3] = (before + fourth - 3) << low
            found += 4
        found = end
    return _read_rest(code, code.size // 8, low, found, out)


@njit(nogil=True, cache=True, error_model="numpy")
def _read_rest(code: Any, place: int, low: int, found: int, out: Any) -> Any:
    """Reads upper parts from a word on, one at a time."""
    for later in range(place, (code.size + 7) // 8):
        word = _word(code, later)
        while word and found < out.size:
            out[found] = (64 * later + np.int64(lowest_bit(word)) - found) << low
            word &= word - _ONE
            found += 1
    return found


@njit(nogil=True, cache=True, error_model="numpy")
def _word(code: Any, place: int) -> Any:
    word = _ZERO
    if 8 * place + 8 <= code.size:
        for byte in range(8):
            word |= np.uint64(code[8 * place + byte]) << np.uint64(8 * byte)
    else:
        for byte in range(code.size - 8 * place):
            word |= np.uint64(code[8 * place + byte]) << np.uint64(8 * byte)
    return word


@njit(nogil=True, cache=True, error_model="numpy")
def _read_lows(code: Any, low: int, length: int, start: int, out: Any, found: int) -> int:
    """Completes indices, and adds ``start``; returns how many there are before those that fill up."""
    capacity, planes = out.size, low // 8
    for plane in range(planes):
        part = code[plane * capacity :]
        for entry in range(found):
            out[entry] |= np.int64(part[entry]) << (8 * plane)
    begin, first = planes * capacity, 8 * planes
    for width in _WIDTHS:
        if low & width:
            size = (capacity * width + 7) // 8
            _read_codes(code[begin : begin + size], first, width, out[:found])
            begin += size
            first += width
    while found and out[found - 1] >= length:
        found -= 1
    if start:
        for entry in range(found):
            out[entry] += start
    return found


@njit(nogil=True, cache=True, error_model="numpy")
def _read_codes(code: Any, shift: int, width: int, out: Any) -> None:
    mask = (1 << width) - 1
    for place in range(0, 8, width):
        part = out[place // width * code.size : (place // width + 1) * code.size]
        for entry in range(part.size):
            part[entry] |= np.int64((code[entry] >> place) & mask) << shift
