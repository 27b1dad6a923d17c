"""Sparse vectors as bytes, and back: 9.4 bits for an index at density 1%, 12.9 at 0.1%.

A message has room for a known number of entries of a vector of known length (a ``Slot``), and its size follows from
that, so neither sizes nor headers travel. It holds values, then indices in the code of Elias and Fano: the low bits of
each index as they are, and the upper bits as a bitmap in which entry i sets bit ``i + (index >> low)``. How many bits
are low follows from the slot, too; whole nibbles, which cost at most 4% in bytes and make reading and writing cheap,
unless the slot asks for the smallest message.
A vector with fewer entries than its slot is filled up with entries whose index is the length; the reader drops them.

Parts, in order, for a capacity c: values (c of the wire's type); whole low bytes, those of all entries after each
other, least significant bytes first; a plane of the remaining nibble if there is one (see ``spardl.vector.bits``), then
one of two remaining bits, then one of a single bit; the bitmap, c + (length >> low) bits, first bit lowest; zeros up to
a multiple of the size of a value.

Source: Elias, Efficient Storage and Retrieval by Content and Address of Static Files, J. ACM 21(2), 1974; Fano, On the
Number of Bits Required to Implement an Associative Memory, 1971.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spardl.basics.errors import ProgramError
from spardl.vector.bits import low_bits, pack_codes, packed_bytes, unpack_codes
from spardl.vector.kernels import compiled
from spardl.vector.sparse import SparseVector

__all__ = [
    "NIBBLE",
    "Slot",
    "index_bytes",
    "message_bytes",
    "message_words",
    "pack",
    "pack_indices",
    "too_short",
    "unpack",
    "unpack_all",
]

# What holds the bits of a value of so many bytes where its type does not matter: numpy has no bfloat16.
_RAW = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


NIBBLE = 4
"""Bits that are quick to read and write."""


class Slot(NamedTuple):
    """The room of one sparse vector in a message.

    Attributes:
        capacity: entries that the vector may hold, at most ``length``.
        length: length of the dense vector, below 2^62.
        step: the number of low bits is a multiple of it: 4 is quick, 1 makes the smallest message.
    """

    capacity: int
    length: int
    step: int = NIBBLE


class _Form(NamedTuple):
    """Where the parts of a message are, in bytes: after values of any type.

    Attributes:
        low: bits of an index that are low.
        lows: bytes of the low parts.
        uppers: bytes of the bitmap.
    """

    low: int
    lows: int
    uppers: int


def message_words(slot: Slot) -> int:
    """Words (index or value) in a message, as the papers count them: 2 per entry."""
    return 2 * slot.capacity


def message_bytes(slot: Slot, dtype: torch.dtype) -> int:
    """Bytes of a message with values of the given type; a multiple of the size of a value."""
    return slot.capacity * dtype.itemsize + _padded(index_bytes(slot), dtype.itemsize)


def index_bytes(slot: Slot) -> int:
    """Bytes of the indices of a message."""
    form = _form(slot)
    return form.lows + form.uppers


def pack_indices(indices: Tensor, slot: Slot) -> Tensor:
    """Writes indices alone.

    Args:
        indices: int64, shape (m,), strictly increasing, below the slot's length, m at most ``capacity``.
        slot: their room.

    Returns:
        uint8, shape (index_bytes(slot),).

    Raises:
        ProgramError: if there are more than the slot has room for.
    """
    _check_room(indices.numel(), slot)
    out = torch.empty(index_bytes(slot), dtype=torch.uint8, device=indices.device)
    write = _encode_compiled if compiled(indices) else _encode
    write(indices, slot, out)
    return out


def _check_room(count: int, slot: Slot) -> None:
    if count > slot.capacity:
        raise ProgramError(f"{count} entries do not fit into a message for {slot.capacity}")


def pack(vector: SparseVector, slot: Slot, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """Writes a vector into a message.

    Args:
        vector: of the slot's length, with at most ``capacity`` entries.
        slot: the room; the receiver must know the same.
        dtype: type of the values on the wire: they are rounded to it.
        out: where to write, uint8, shape (message_bytes(slot, dtype),); new memory if missing.

    Returns:
        uint8, shape (message_bytes(slot, dtype),), on the vector's device.

    Raises:
        ProgramError: if the vector has more entries than its slot.
    """
    _check_room(len(vector), slot)
    if out is None:
        out = torch.empty(message_bytes(slot, dtype), dtype=torch.uint8, device=vector.indices.device)
    elif out.storage_offset() % dtype.itemsize:
        return out.copy_(pack(vector, slot, dtype))
    if compiled(out):
        _pack_compiled(vector, slot, dtype, out)
        return out
    border = slot.capacity * dtype.itemsize
    values = out[:border].view(dtype)
    values[: len(vector)] = vector.values
    values[len(vector) :] = 0
    _encode(vector.indices, slot, out[border:])
    return out


def _pack_compiled(vector: SparseVector, slot: Slot, dtype: torch.dtype, out: Tensor) -> None:
    from spardl.vector.kernels import codec  # noqa: PLC0415 - takes seconds to import

    values = vector.values.to(dtype).view(_RAW[dtype.itemsize])
    codec.write(values.numpy(), vector.indices.numpy(), *slot, out.numpy())


def unpack(message: Tensor, slot: Slot, dtype: torch.dtype, into: torch.dtype) -> SparseVector:
    """Reads back what ``pack`` wrote with the same slot and type.

    Args:
        message: uint8, shape (message_bytes(slot, dtype),).
        slot: its room.
        dtype: type of the values on the wire.
        into: type of the values of the result.

    Returns:
        The vector, in memory of its own. What arrived damaged gives anything, but reads nothing beyond the message.

    Raises:
        ProgramError: if the message is shorter than the slot says.
    """
    return unpack_all(message, [slot], dtype, into)


def unpack_all(messages: Tensor, slots: Sequence[Slot], dtype: torch.dtype, into: torch.dtype) -> SparseVector:
    """Reads messages that lie end to end as one vector: block i starts where block i-1 ends.

    Args:
        messages: uint8, shape (bytes,): the messages of the slots in order.
        slots: their room, at least one.
        dtype: type of the values on the wire.
        into: type of the values of the result.

    Returns:
        The blocks end to end, in memory of their own.

    Raises:
        ProgramError: if there are fewer bytes than the slots say.
    """
    if messages.storage_offset() % dtype.itemsize:
        # A message cut out of a longer one can start where its values may not.
        messages = messages.clone()
    read = _decode_compiled if compiled(messages) else _decode
    return read(messages, slots, dtype, into)


@lru_cache(maxsize=1 << 12)
def _form(slot: Slot) -> _Form:
    capacity, length, step = slot
    if not capacity:
        return _Form(0, 0, 0)
    low = low_bits(capacity, length, step)
    lows = sum(packed_bytes(capacity, width) for _, width in _planes(low))
    return _Form(low, lows, packed_bytes(capacity + (length >> low), 1))


def _planes(low: int) -> list[tuple[int, int]]:
    """The planes of so many low bits: the first bit of each, and how many it has."""
    whole = 8 * (low // 8)
    return [(start, 8) for start in range(0, whole, 8)] + [
        (whole + (low & 7 & -2 * width), width) for width in (4, 2, 1) if low & width
    ]


def _padded(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def too_short(messages: Tensor) -> ProgramError:
    """What to raise of ``messages``, uint8, shape (bytes,), with fewer bytes than their slots say."""
    return ProgramError(f"{messages.numel()} bytes are fewer than the messages that were announced")


def _encode_compiled(indices: Tensor, slot: Slot, out: Tensor) -> None:
    from spardl.vector.kernels import codec  # noqa: PLC0415

    codec.encode(indices.numpy(), *slot, out.numpy())


def _decode_compiled(messages: Tensor, slots: Sequence[Slot], dtype: torch.dtype, into: torch.dtype) -> SparseVector:
    from spardl.vector.kernels import codec  # noqa: PLC0415

    table, capacity, length = _table(tuple(slots))
    indices, values = torch.empty(capacity, dtype=torch.int64), torch.empty(capacity, dtype=_RAW[dtype.itemsize])
    count = codec.decode(messages.numpy(), table, indices.numpy(), values.numpy())
    if count < 0:
        raise too_short(messages)
    return SparseVector(indices[:count], values[:count].view(dtype).to(into), length)


@lru_cache(maxsize=256)
def _table(slots: tuple[Slot, ...]) -> tuple[NDArray[np.int64], int, int]:
    """Slots as numbers, and their capacities and lengths together: once for all workers that a process plays."""
    table = np.fromiter(chain.from_iterable(slots), np.int64, 3 * len(slots)).reshape(-1, 3)
    capacity, length, _ = table.sum(0).tolist()
    return table, capacity, length


def _encode(indices: Tensor, slot: Slot, out: Tensor) -> None:
    """The code of indices, in torch: without waiting for the device."""
    form = _form(slot)
    filled = indices.new_full((slot.capacity,), slot.length)
    filled[: indices.numel()] = indices
    begin = 0
    for first, width in _planes(form.low):
        end = begin + packed_bytes(slot.capacity, width)
        out[begin:end] = pack_codes(((filled >> first) & (2**width - 1)).to(torch.uint8), width)
        begin = end
    bits = out.new_zeros(8 * form.uppers)
    bits[(filled >> form.low) + torch.arange(slot.capacity, device=out.device)] = 1
    border = form.lows + form.uppers
    out[form.lows : border] = (bits.view(-1, 8) << _eight(out)).sum(1, dtype=torch.uint8)
    out[border:] = 0


def _decode(messages: Tensor, slots: Sequence[Slot], dtype: torch.dtype, into: torch.dtype) -> SparseVector:
    """The code of indices, in torch: waits once for the device, to learn how many entries there are."""
    sizes = [message_bytes(slot, dtype) for slot in slots]
    if sum(sizes) > messages.numel():
        raise too_short(messages)
    parts, values, start = [], [], 0
    for message, slot in zip(messages[: sum(sizes)].split(sizes), slots, strict=True):
        border = slot.capacity * dtype.itemsize
        values.append(message[:border].view(dtype))
        indices = _indices(message[border:], slot)
        parts.append(torch.where(indices < slot.length, indices + start, -1))
        start += slot.length
    found = torch.cat(parts)
    kept = (found >= 0).nonzero().squeeze(1)
    return SparseVector(found[kept], torch.cat(values)[kept].to(into), start)


def _indices(code: Tensor, slot: Slot) -> Tensor:
    """All of a message, those that fill it up included."""
    form = _form(slot)
    border = form.lows + form.uppers
    bits = (code[form.lows : border].unsqueeze(1) >> _eight(code)) & 1
    places = torch.nonzero_static(bits.view(-1), size=slot.capacity, fill_value=8 * border).squeeze(1)
    indices = places.sub_(torch.arange(slot.capacity, device=code.device)) << form.low
    begin = 0
    for first, width in _planes(form.low):
        end = begin + packed_bytes(slot.capacity, width)
        indices |= unpack_codes(code[begin:end], width, slot.capacity).long() << first
        begin = end
    return indices


def _eight(like: Tensor) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=like.device)
