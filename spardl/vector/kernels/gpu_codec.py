"""Encoding and decoding of sparse messages on a GPU, with one kernel launch per message.

``spardl.vector.packing`` documents the layout and defines slots. To encode, every byte of a message is computed
independently: for a byte of the bitmap, bisection finds the first entry whose bit it contains. To decode, one program
(thread block) per slot walks through the bitmap of the slot, which has about two bits per entry.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from spardl.vector.kernels import gpu

__all__ = ["decode", "encode"]

_TILE = 1024  # bytes or entries per program
_WARPS = 4


def encode(
    indices: Tensor, values: Tensor | None, numbers: tuple[int, int, int, int, int], out: Tensor, places: Tensor
) -> None:
    """Encodes the entries of one slot.

    Args:
        indices: int64 indices of shape (m,), strictly increasing.
        values: Values, read as integers of the same size, shape (m,); ``None`` to write indices only.
        numbers: Five numbers: capacity of the slot, its length, number of low bits per index, size of all low bits in
            bytes, and size of the bitmap in bytes.
        out: uint8 tensor for the encoded indices, shape (s,), at least as long as low bits and bitmap; the rest becomes
            zero.
        places: Tensor of shape (capacity,), in the dtype of ``values``, to which the values are written.
    """
    capacity, work = numbers[0], max(out.numel(), places.numel())
    if work:
        gpu.launch(
            _encode,
            gpu.grid(work, _TILE),
            indices,
            values,
            indices.numel(),
            *numbers,
            capacity.bit_length(),
            out,
            out.numel(),
            places,
            _TILE,
            num_warps=_WARPS,
        )


def decode(messages: Tensor, values: Tensor, table: Tensor, entries: int, *, full: bool) -> tuple[Tensor, Tensor]:
    """Decodes concatenated messages.

    Args:
        messages: uint8 tensor of shape (bytes,).
        values: The same memory as integers of the size of a value, shape (words,).
        table: One row per slot, int64, shape (slots, 8): its first byte, capacity, length, number of low bits per
            index, sizes in bytes of low bits and bitmap, number of entries before it, and first index.
        entries: Total capacity of the slots.
        full: Whether every slot is full; otherwise missing entries have the index -1.

    Returns:
        int64 indices, and values in the dtype of ``values``, shape (entries,) each.
    """
    indices = torch.empty(entries, dtype=torch.int64, device=messages.device)
    found = values.new_empty(entries)
    gpu.launch(
        _decode,
        (len(table),),
        messages,
        values,
        table,
        indices,
        found,
        values.itemsize,
        full,
        _TILE,
        num_warps=_WARPS,
    )
    return indices, found


@gpu.kernel
def _encode(
    indices: tl.tensor,
    values: tl.tensor | None,
    count: int,
    capacity: int,
    length: int,
    low: int,
    lows: int,
    uppers: int,
    bits: int,
    out: tl.tensor,
    size: int,
    places: tl.tensor,
    tile: tl.constexpr,
) -> None:
    """Writes one tile of the bytes, and the values of as many entries."""
    at = tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile)
    if values is not None:
        tl.store(places + at, tl.load(values + at, mask=at < count, other=0), mask=at < capacity)
    # Whole low bytes: those of all entries after each other.
    room = tl.cast(tl.maximum(capacity, 1), tl.int64)
    plane = at // room
    is_whole = plane < low // 8
    index = _index(indices, at - plane * room, count, length, is_whole)
    byte = (index >> (8 * tl.where(is_whole, plane, 0))) & 255
    begin = room * (low // 8)
    shift = (low // 8) * 8
    for step in tl.static_range(3):
        width = 4 >> step
        if low & width:
            number = (room * width + 7) // 8
            place = at - begin
            inside = (place >= 0) & (place < number)
            packed = tl.zeros_like(byte)
            for part in tl.static_range(8 >> (2 - step)):
                entry = place + part * number
                present = inside & (entry < capacity)
                code = (_index(indices, entry, count, length, present) >> shift) & ((1 << width) - 1)
                packed |= tl.where(present, code, 0) << (width * part)
            byte = tl.where(inside, packed, byte)
            begin += number
            shift += width
    # The bitmap: the first entry with a bit at or after the first bit of the byte, and the seven after it.
    first = (at - lows) * 8
    mapped = (at >= lows) & (at < lows + uppers)
    lower = tl.zeros_like(byte)
    upper = lower + capacity
    for _ in range(bits):
        middle = (lower + upper) // 2
        active = mapped & (lower < upper)
        place = middle + (_index(indices, middle, count, length, active) >> low)
        lower = tl.where(active & (place < first), middle + 1, lower)
        upper = tl.where(active & (place >= first), middle, upper)
    packed = tl.zeros_like(byte)
    for step in tl.static_range(8):
        entry = lower + step
        present = mapped & (entry < capacity)
        bit = entry + (_index(indices, entry, count, length, present) >> low) - first
        present &= bit < 8
        packed |= tl.where(present, 1, 0).to(tl.int64) << tl.where(present, bit, 0)
    byte = tl.where(at < lows, byte, packed)
    tl.store(out + at, byte.to(tl.uint8), mask=at < size)


@gpu.kernel
def _index(indices: tl.tensor, entry: tl.tensor, count: int, length: int, inside: tl.tensor) -> tl.tensor:
    """Index of each entry; the length for padding."""
    present = inside & (entry < count)
    return tl.where(present, tl.load(indices + entry, mask=present, other=0), tl.cast(length, tl.int64))


@gpu.kernel
def _decode(
    messages: tl.tensor,
    values: tl.tensor,
    table: tl.tensor,
    indices: tl.tensor,
    found: tl.tensor,
    width: tl.constexpr,
    full: tl.constexpr,
    tile: tl.constexpr,
) -> None:
    """Reads one slot."""
    row = table + tl.program_id(0) * 8
    begin = tl.load(row)
    capacity = tl.load(row + 1)
    length = tl.load(row + 2)
    low = tl.load(row + 3)
    lows = tl.load(row + 4)
    uppers = tl.load(row + 5)
    offset = tl.load(row + 6)
    start = tl.load(row + 7)
    code = messages + begin + capacity * width
    own_values = values + begin // width
    own_indices = indices + offset
    own_found = found + offset
    total = tl.zeros([1], tl.int64)
    for first in range(0, uppers, tile):
        at = first + tl.arange(0, tile)
        byte = tl.load(code + lows + at, mask=at < uppers, other=0).to(tl.int32)
        ones = byte - ((byte >> 1) & 0x55)
        ones = (ones & 0x33) + ((ones >> 2) & 0x33)
        ones = ((ones + (ones >> 4)) & 0x0F).to(tl.int64)
        entry = total + tl.cumsum(ones, 0) - ones
        for bit in range(8):
            is_set = ((byte >> bit) & 1) == 1
            place = at * 8 + bit
            _entry(code, own_values, own_indices, own_found, entry, place, is_set, capacity, length, low, start, full)
            entry += is_set.to(tl.int64)
        total += tl.sum(ones)
    # A corrupted message, or one with padding beyond its bitmap, has fewer bits than entries.
    missing = tl.sum(total)
    for first in range(missing, capacity, tile):
        entry = first + tl.arange(0, tile)
        beyond = tl.zeros_like(entry) + 8 * (lows + uppers)
        _entry(code, own_values, own_indices, own_found, entry, beyond, entry >= 0, capacity, length, low, start, full)


@gpu.kernel
def _entry(
    code: tl.tensor,
    values: tl.tensor,
    indices: tl.tensor,
    found: tl.tensor,
    entry: tl.tensor,
    place: tl.tensor,
    wanted: tl.tensor,
    capacity: tl.tensor,
    length: tl.tensor,
    low: tl.tensor,
    start: tl.tensor,
    full: tl.constexpr,
) -> None:
    """Writes the entries whose bits are at ``place``."""
    inside = wanted & (entry < capacity)
    index = (place - entry) << low
    for plane in range(low // 8):
        byte = tl.load(code + plane * capacity + entry, mask=inside, other=0)
        index |= byte.to(tl.int64) << (8 * plane)
    begin = (low // 8) * capacity
    shift = (low // 8) * 8
    for step in tl.static_range(3):
        width = 4 >> step
        if low & width:
            number = (capacity * width + 7) // 8
            part = entry // number
            byte = tl.load(code + begin + entry - part * number, mask=inside, other=0)
            index |= ((byte.to(tl.int64) >> (width * part)) & ((1 << width) - 1)) << shift
            begin += number
            shift += width
    index = tl.minimum(index, length - 1) + start if full else tl.where(index < length, index + start, -1)
    tl.store(indices + entry, index, mask=inside)
    tl.store(found + entry, tl.load(values + entry, mask=inside, other=0), mask=inside)
