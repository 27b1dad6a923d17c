"""Compact byte encoding of sparse vectors: 9.4 bits per index at density 1%, 12.9 bits at 0.1%.

A message holds the entries of a vector of known length, up to a fixed capacity (a ``Slot``). Its size follows from the
slot, so no sizes or headers are sent. It contains the values, then the indices in Elias-Fano coding: the low bits of
each index verbatim, and the high bits as a bitmap in which entry i sets bit ``i + (index >> low)``. The number of low
bits also follows from the slot. By default it is a multiple of four: that adds at most 4% to the size and keeps
encoding and decoding cheap. A vector with fewer entries than the capacity is padded: the additional entries have the
vector's length as index, and the reader drops them.

Layout for a capacity c: first, c values of the wire dtype. Second, the low bits: the least significant byte of all
entries, then the next byte of all entries, as long as whole bytes remain; then, if as many bits remain, a plane of four
bits, one of two bits and one of a single bit (see ``spardl.vector.bits``). Third, the bitmap of c + (length >> low)
bits, which begins in the lowest bit of its first byte. Last, zeros up to a multiple of the size of a value.

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
from spardl.vector.bits import INTEGERS, integers_on, low_bits, pack_codes, packed_bytes, unpack_codes
from spardl.vector.kernels import MOST_PER_PROGRAM, compiled, runs_triton
from spardl.vector.norms import host_reads
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

# Integer types for raw copies of values, by size in bytes: numpy has no bfloat16.


NIBBLE = 4
"""Granularity of low bits that is fast to encode and decode."""


class Slot(NamedTuple):
    """Fixed space for one sparse vector in a message, known to sender and receiver.

    Attributes:
        capacity: Maximum number of entries, at most ``length``.
        length: Number of entries of the dense vector, below 2^62.
        step: The number of low bits per index is a multiple of this number: 4 is fast, 1 gives the smallest message.
    """

    capacity: int
    length: int
    step: int = NIBBLE


class _IndexSizes(NamedTuple):
    """Sizes of the index parts of a message.

    Attributes:
        low: Number of low bits per index.
        lows: Size of all low bits, in bytes.
        uppers: Size of the bitmap of high bits, in bytes.
    """

    low: int
    lows: int
    uppers: int


def message_words(slot: Slot) -> int:
    """Returns the number of words (indices and values) in a message, as counted in the papers: 2 per entry."""
    return 2 * slot.capacity


def message_bytes(slot: Slot, dtype: torch.dtype) -> int:
    """Returns the size of a message in bytes, with values of type ``dtype``; a multiple of the size of a value."""
    return slot.capacity * dtype.itemsize + _padded(index_bytes(slot), dtype.itemsize)


def index_bytes(slot: Slot) -> int:
    """Returns the size of the indices of a message, in bytes."""
    sizes = _index_sizes(slot)
    return sizes.lows + sizes.uppers


def pack_indices(indices: Tensor, slot: Slot) -> Tensor:
    """Encodes indices without values.

    Args:
        indices: int64 indices of shape (m,), strictly increasing, below the slot's length, m at most ``capacity``.
        slot: Space for the sparse vector whose indices are encoded.

    Returns:
        uint8 tensor of shape (index_bytes(slot),).

    Raises:
        ProgramError: If there are more indices than the slot's capacity.
    """
    _check_capacity(indices.numel(), slot)
    out = torch.empty(index_bytes(slot), dtype=torch.uint8, device=indices.device)
    if runs_triton(out):
        _pack_on_gpu(indices, None, slot, out, out[:0])
    else:
        write = _encode_compiled if compiled(indices) else _encode
        write(indices, slot, out)
    return out


def _check_capacity(count: int, slot: Slot) -> None:
    if count > slot.capacity:
        raise ProgramError(f"message slot holds at most {slot.capacity} entries, got {count}")


def pack(vector: SparseVector, slot: Slot, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """Encodes a vector as a message.

    Args:
        vector: Sparse vector of the slot's length, with at most ``capacity`` entries.
        slot: Space for the vector; the receiver must use an equal slot.
        dtype: Wire dtype that the values are rounded to.
        out: uint8 tensor of shape (message_bytes(slot, dtype),) to write to; ``None`` allocates one.

    Returns:
        uint8 tensor of shape (message_bytes(slot, dtype),), on the vector's device.

    Raises:
        ProgramError: If the vector has more entries than the slot's capacity.
    """
    _check_capacity(len(vector), slot)
    if out is None:
        out = torch.empty(message_bytes(slot, dtype), dtype=torch.uint8, device=vector.indices.device)
    elif out.storage_offset() % dtype.itemsize:
        # A misaligned buffer cannot be viewed as values.
        return out.copy_(pack(vector, slot, dtype))
    if compiled(out):
        _pack_compiled(vector, slot, dtype, out)
        return out
    border = slot.capacity * dtype.itemsize
    values = out[:border].view(dtype)
    if runs_triton(out):
        _pack_on_gpu(vector.indices, vector.values.to(dtype), slot, out[border:], values)
        return out
    values[: len(vector)] = vector.values
    # Equal vectors must give equal bytes, so the padding is not left uninitialized.
    values[len(vector) :] = 0
    _encode(vector.indices, slot, out[border:])
    return out


def _pack_compiled(vector: SparseVector, slot: Slot, dtype: torch.dtype, out: Tensor) -> None:
    from spardl.vector.kernels import codec  # noqa: PLC0415 - takes seconds to import

    values = vector.values.to(dtype).view(INTEGERS[dtype.itemsize])
    codec.write(values.numpy(), vector.indices.numpy(), *slot, out.numpy())


def _pack_on_gpu(indices: Tensor, values: Tensor | None, slot: Slot, out: Tensor, places: Tensor) -> None:
    from spardl.vector.kernels import gpu_codec  # noqa: PLC0415 - triton is installed only with CUDA

    raw, sizes = INTEGERS[places.itemsize], _index_sizes(slot)
    numbers = (slot.capacity, slot.length, *sizes)
    own = None if values is None else values.contiguous().view(raw)
    gpu_codec.encode(indices.contiguous(), own, numbers, out, places.view(raw))


def unpack(message: Tensor, slot: Slot, dtype: torch.dtype, into: torch.dtype) -> SparseVector:
    """Decodes a message written by ``pack`` with the same slot and dtype.

    Args:
        message: uint8 tensor of shape (message_bytes(slot, dtype),).
        slot: Space of the vector in the message.
        dtype: Wire dtype of the values.
        into: Dtype of the values of the result.

    Returns:
        The vector, in new memory. For a corrupted message, its entries are arbitrary, but no memory outside the message
        is read.

    Raises:
        ProgramError: If the message is shorter than the slot requires.
    """
    return unpack_all(message, [slot], dtype, into)


def unpack_all(
    messages: Tensor, slots: Sequence[Slot], dtype: torch.dtype, into: torch.dtype, *, full: bool = False
) -> SparseVector:
    """Decodes concatenated messages as one long vector, in which the vector of message i follows that of message i-1.

    Args:
        messages: uint8 tensor of shape (bytes,) with the messages of the slots in order.
        slots: Spaces of the vectors, at least one.
        dtype: Wire dtype of the values.
        into: Dtype of the values of the result.
        full: Whether every vector has as many entries as its slot allows. If so, the host need not wait for a GPU to
            count entries, and entries that are missing from a corrupted message become arbitrary.

    Returns:
        The concatenated vectors as one sparse vector, in new memory.

    Raises:
        ProgramError: If there are fewer bytes than the slots require.
    """
    if messages.storage_offset() % dtype.itemsize:
        # A slice of a longer message may start at an offset that is not aligned for the values.
        messages = messages.clone()
    if compiled(messages):
        return _decode_compiled(messages, slots, dtype, into)
    return _decode(messages, slots, dtype, into, full=full and not host_reads(messages))


@lru_cache(maxsize=1 << 12)
def _index_sizes(slot: Slot) -> _IndexSizes:
    capacity, length, step = slot
    if not capacity:
        return _IndexSizes(0, 0, 0)
    low = low_bits(capacity, length, step)
    lows = sum(packed_bytes(capacity, width) for _, width in _planes(low))
    return _IndexSizes(low, lows, packed_bytes(capacity + (length >> low), 1))


def _planes(low: int) -> list[tuple[int, int]]:
    """Planes that ``low`` low bits are stored in: the first bit and the number of bits of each."""
    whole = 8 * (low // 8)
    return [(start, 8) for start in range(0, whole, 8)] + [
        (whole + (low & 7 & -2 * width), width) for width in (4, 2, 1) if low & width
    ]


def _padded(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def too_short(messages: Tensor) -> ProgramError:
    """Returns the ``ProgramError`` for ``messages`` (uint8, shape (m,)) that are shorter than their slots require."""
    return ProgramError(f"received messages have {messages.numel()} bytes, fewer than their slots require")


def _encode_compiled(indices: Tensor, slot: Slot, out: Tensor) -> None:
    from spardl.vector.kernels import codec  # noqa: PLC0415

    codec.encode(indices.numpy(), *slot, out.numpy())


def _decode_compiled(messages: Tensor, slots: Sequence[Slot], dtype: torch.dtype, into: torch.dtype) -> SparseVector:
    from spardl.vector.kernels import codec  # noqa: PLC0415

    table, capacity, length = _table(tuple(slots))
    indices, values = torch.empty(capacity, dtype=torch.int64), torch.empty(capacity, dtype=INTEGERS[dtype.itemsize])
    count = codec.decode(messages.numpy(), table, indices.numpy(), values.numpy())
    if count < 0:
        raise too_short(messages)
    return SparseVector(indices[:count], values[:count].view(dtype).to(into), length)


@lru_cache(maxsize=256)
def _table(slots: tuple[Slot, ...]) -> tuple[NDArray[np.int64], int, int]:
    """Slots as an array, their total capacity and total length; cached across the workers of a process."""
    table = np.fromiter(chain.from_iterable(slots), np.int64, 3 * len(slots)).reshape(-1, 3)
    capacity, length, _ = table.sum(0).tolist()
    return table, capacity, length


def _encode(indices: Tensor, slot: Slot, out: Tensor) -> None:
    """Encodes indices in torch, without synchronizing with the device."""
    sizes = _index_sizes(slot)
    filled = indices.new_full((slot.capacity,), slot.length)
    filled[: indices.numel()] = indices
    begin = 0
    for first, width in _planes(sizes.low):
        end = begin + packed_bytes(slot.capacity, width)
        out[begin:end] = pack_codes(((filled >> first) & (2**width - 1)).to(torch.uint8), width)
        begin = end
    bits = out.new_zeros(8 * sizes.uppers)
    bits[(filled >> sizes.low) + torch.arange(slot.capacity, device=out.device)] = 1
    border = sizes.lows + sizes.uppers
    out[sizes.lows : border] = (bits.view(-1, 8) << _eight_bits(out)).sum(1, dtype=torch.uint8)
    out[border:] = 0


def _decode(
    messages: Tensor, slots: Sequence[Slot], dtype: torch.dtype, into: torch.dtype, *, full: bool
) -> SparseVector:
    """Decodes messages in torch; synchronizes with the device once, to learn the number of entries, unless full."""
    sizes = [message_bytes(slot, dtype) for slot in slots]
    if sum(sizes) > messages.numel():
        raise too_short(messages)
    if runs_triton(messages) and max(slot.capacity for slot in slots) <= MOST_PER_PROGRAM:
        return _decode_on_gpu(messages[: sum(sizes)], tuple(slots), dtype, into, full=full)
    parts, values, start = [], [], 0
    for message, slot in zip(messages[: sum(sizes)].split(sizes), slots, strict=True):
        border = slot.capacity * dtype.itemsize
        values.append(message[:border].view(dtype))
        indices = _indices(message[border:], slot)
        if full:
            # Only a corrupted message has missing entries; they must not be read out of bounds.
            parts.append(indices.clamp_(max=slot.length - 1).add_(start))
        else:
            parts.append(torch.where(indices < slot.length, indices + start, -1))
        start += slot.length
    found = torch.cat(parts)
    if full:
        return SparseVector(found, torch.cat(values).to(into), start)
    return _present(found, torch.cat(values), into, start)


def _present(indices: Tensor, values: Tensor, into: torch.dtype, length: int) -> SparseVector:
    """Drops the padding, which has negative indices."""
    # The only synchronization with the device.
    kept = (indices >= 0).nonzero().squeeze(1)
    return SparseVector(indices[kept], values[kept].to(into), length)


def _decode_on_gpu(
    messages: Tensor, slots: tuple[Slot, ...], dtype: torch.dtype, into: torch.dtype, *, full: bool
) -> SparseVector:
    from spardl.vector.kernels import gpu, gpu_codec  # noqa: PLC0415

    _, capacity, length = _table(slots)
    raw = messages.contiguous().view(INTEGERS[dtype.itemsize])
    table = _gpu_table(slots, dtype, messages.device, gpu.stream_of(messages.device))
    indices, values = gpu_codec.decode(messages, raw, table, capacity, full=full)
    if full:
        return SparseVector(indices, values.view(dtype).to(into), length)
    return _present(indices, values.view(dtype), into, length)


@lru_cache(maxsize=256)
def _gpu_table(slots: tuple[Slot, ...], dtype: torch.dtype, device: torch.device, stream: int) -> Tensor:
    """Table of the slots on the device; cached for a stream, so that only the first step copies it."""
    rows, begin, entries, start = [], 0, 0, 0
    for slot in slots:
        rows.append((begin, slot.capacity, slot.length, *_index_sizes(slot), entries, start))
        begin += message_bytes(slot, dtype)
        entries += slot.capacity
        start += slot.length
    return integers_on(device, rows)


def _indices(code: Tensor, slot: Slot) -> Tensor:
    """Decodes all indices of a message, including padding."""
    sizes = _index_sizes(slot)
    border = sizes.lows + sizes.uppers
    bits = (code[sizes.lows : border].unsqueeze(1) >> _eight_bits(code)) & 1
    # A static size avoids a synchronization. Missing bits give places beyond the bitmap, and thus dropped indices.
    places = torch.nonzero_static(bits.view(-1), size=slot.capacity, fill_value=8 * border).squeeze(1)
    indices = places.sub_(torch.arange(slot.capacity, device=code.device)) << sizes.low
    begin = 0
    for first, width in _planes(sizes.low):
        end = begin + packed_bytes(slot.capacity, width)
        indices |= unpack_codes(code[begin:end], width, slot.capacity).long() << first
        begin = end
    return indices


def _eight_bits(like: Tensor) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=like.device)
