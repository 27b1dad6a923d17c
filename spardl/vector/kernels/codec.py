"""Compiled kernels that encode and decode messages, quantization levels and 8-bit floats, as the portable code does."""

from __future__ import annotations

from typing import Any

import numpy as np

from spardl.vector.bits import low_bits
from spardl.vector.kernels import njit
from spardl.vector.kernels.selection import largest_magnitude
from spardl.vector.kernels.words import lowest_bit, number_of_bits

__all__ = ["decode", "encode", "pack_float8", "pack_levels", "read_float8", "read_levels", "write"]


# 8-bit floating point, block by block.


# In float32: 2^-6, below which E4M3 numbers are spaced evenly by 2^-9; and 2^14, whose spacing in float32 is 2^-9.
_LEAST, _EVEN = np.float32(2**-6), np.int32(121 << 23)
_STEP, _STEP_BITS = np.float32(1 << 14), np.int32(141 << 23)
# Half of the dropped bits minus one in the last place; and the difference of the two formats' exponent offsets.
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
    """Quantizes blocks to E4M3 (8-bit floats): writes each block's scale, and its entries / scale * 448.

    The scale of a block is its largest magnitude.

    Args:
        values: Finite float32 or float64 vector of shape (n,).
        bits: The memory of ``values``, as integers.
        mask: Bit mask that removes the sign from these integers.
        leave: Whether to replace the values by their quantization errors.
        scales: Output for one scale per block, in the type of the values.
        scale_bits: The memory of ``scales``, as integers.
        near: float32 buffer for the entries of a block.
        near_bits: The memory of ``near``, as integers.
        far: Another float32 buffer for the entries of a block.
        far_bits: The memory of ``far``, as integers.
        highest: 448, the largest number of E4M3, in the type of the values.
        packed: uint8 output of shape (n,).
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


# Separate loops over slices that start at index 0: only such loops are vectorized.


@njit(nogil=True, cache=True, error_model="numpy")
def _find_float8(values: Any, divisor: Any, highest: Any, near: Any) -> None:
    for entry in range(values.size):
        near[entry] = values[entry] / divisor * highest


@njit(nogil=True, cache=True, error_model="numpy")
def _far(near: Any, far: Any) -> None:
    """Rounds to multiples of 2^-9; the low bits of the result are the multiples."""
    for entry in range(near.size):
        far[entry] = abs(near[entry]) + _STEP


@njit(nogil=True, cache=True, error_model="numpy")
def _code(near: Any, far: Any, packed: Any) -> None:
    for entry in range(packed.size):
        # The casts keep everything in 32 bits: numba widens sums to 64, which halves the vector width.
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
    """Decodes E4M3 numbers, and writes them to ``values`` or adds them to it.

    Args:
        packed: uint8 codes of shape (n,), as written by ``pack_float8``.
        shares: Table of the 256 codes as multiples of the scale, shape (256,), in the type of the values.
        scales: float32 or float64 scale of each block.
        block: Number of entries per block.
        add: Whether to add to ``values`` instead of overwriting them.
        values: Output of shape (n,), in the type of the scales.
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


# Quantization levels, block by block, so that the second read of an entry hits the cache.


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
    """Quantizes blocks to levels: writes each block's scale (its largest magnitude) and its entries' packed levels.

    Args:
        values: Finite float32 or float64 vector of shape (n,).
        bits: The memory of ``values``, as integers.
        mask: Bit mask that removes the sign from these integers.
        top: Highest level, in the type of the values; the lowest level is its negative.
        half: 1.5 times the smallest number from which on the type holds integers only; adding it rounds to an integer.
        width: Bits per code.
        leave: Whether to replace the values by their quantization errors.
        scales: Output for one scale per block, in the type of the values.
        scale_bits: The memory of ``scales``, as integers.
        row: Buffer for the entries of a block, in the type of the values.
        row_bits: The memory of ``row``, as integers.
        packed: uint8 output for the codes; the lowest level has code 0.
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


# Separate loops over slices that start at index 0: only such loops are vectorized.


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
    # The low bits of each number are the integer that was added to ``half``.
    if shift == 0:
        for entry in range(packed.size):
            packed[entry] = codes[entry]
    else:
        for entry in range(packed.size):
            packed[entry] |= np.uint8(codes[entry] << shift)


@njit(nogil=True, cache=True, error_model="numpy")
def read_levels(packed: Any, width: int, top: Any, scales: Any, block: int, add: bool, values: Any) -> None:
    """Decodes levels, and writes the values to ``values`` or adds them to it.

    Args:
        packed: uint8 codes, as written by ``pack_levels``.
        width: Bits per code.
        top: Highest level, in the type of the values; the lowest is its negative.
        scales: float32 or float64 scale of each block.
        block: Number of entries per block.
        add: Whether to add to ``values`` instead of overwriting them.
        values: Output of shape (n,), in the type of the scales.
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


# Unsigned constants: numba promotes mixed signed and unsigned integers to floating point.
_ZERO = np.uint64(0)
_ONE = np.uint64(1)
_BYTE = np.uint64(8)

# Widths of the planes that hold the bits beyond whole bytes.
_WIDTHS = (4, 2, 1)

_low_bits = njit(nogil=True, cache=True)(low_bits)


@njit(nogil=True, cache=True, error_model="numpy")
def write(values: Any, indices: Any, capacity: int, length: int, step: int, out: Any) -> None:
    """Writes a message: values, followed by the encoded indices.

    Args:
        values: Values, read as integers of the same size.
        indices: Indices as for ``encode``.
        capacity: Maximum number of entries of the message, which is padded with zeros.
        length: Length of the dense vector.
        step: The number of low bits per index is a multiple of this number (see ``packing.Slot``).
        out: uint8 output, aligned for the values; space after the message is filled with zeros.
    """
    border = capacity * values.itemsize
    value_part = out[:border].view(values.dtype)
    _copy(values, value_part[: values.size])
    value_part[values.size :] = 0
    encode(indices, capacity, length, step, out[border:])


@njit(nogil=True, cache=True, error_model="numpy")
def encode(indices: Any, capacity: int, length: int, step: int, out: Any) -> None:
    """Encodes the indices of a sparse vector as in ``spardl.vector.packing``.

    Args:
        indices: int64 indices, strictly increasing, below ``length``, at most ``capacity`` of them.
        capacity: Maximum number of indices in the message, which is padded with the index ``length``.
        length: Length of the dense vector.
        step: The number of low bits per index is a multiple of this number (see ``packing.Slot``).
        out: uint8 output; space after the code is filled with zeros.
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
    """Writes a few bits of each index as a plane (see ``spardl.vector.bits``)."""
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
    """Writes the bitmap; each word stays in a register until it is complete."""
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
    """Writes the bytes of a word that are within ``out``; returns the index of the next word."""
    if 8 * place + 8 <= out.size:
        for byte in range(8):
            out[8 * place + byte] = word >> np.uint64(8 * byte)
    else:
        for byte in range(max(0, out.size - 8 * place)):
            out[8 * place + byte] = word >> np.uint64(8 * byte)
    return place + 1


@njit(nogil=True, cache=True, error_model="numpy")
def decode(messages: Any, slots: Any, indices: Any, values: Any) -> int:
    """Decodes concatenated messages as one vector.

    Args:
        messages: uint8 array, aligned for the values.
        slots: int64 array of shape (messages, 3): fields ``capacity``, ``length`` and ``step`` of each message's slot.
        indices: int64 output, as long as all capacities together.
        values: Output for the values, as integers of the same size; as long as ``indices``.

    Returns:
        The number of entries, or -1 if there are fewer bytes than the slots require.
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
        # Checked before anything is read: messages come from other processes and may be truncated.
        if end > messages.size:
            return -1
        target = indices[done : done + capacity]
        found = _read_bits(messages[uppers:end], low, target)
        found = _read_lows(messages[lows:uppers], low, length, start, target, found)
        first = begin // raw.itemsize
        _copy(raw[first : first + found], values[done : done + found])
        done += found
        start += length
        # The next message starts at a multiple of the value size.
        begin = (end + raw.itemsize - 1) // raw.itemsize * raw.itemsize
    return done


@njit(nogil=True, cache=True, error_model="numpy")
def _copy(values: Any, out: Any) -> None:
    for entry in range(out.size):
        out[entry] = values[entry]


@njit(nogil=True, cache=True, error_model="numpy")
def _read_bits(code: Any, low: int, out: Any) -> Any:
    """Decodes the high bits until the output or the bitmap ends; returns the number of entries."""
    found = 0
    for place in range(code.size // 8):
        word = _word(code, place)
        end = found + np.int64(number_of_bits(word))
        if end + 3 > out.size:
            return _read_rest(code, place, low, found, out)
        # Four at a time is faster; up to three extra entries are written, and overwritten next.
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
    """Decodes the high bits from word ``place`` on, one entry at a time."""
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
    """Adds the low bits and ``start`` to the indices; returns the number of entries without padding."""
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
    # Padding has the index ``length`` and comes last.
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
