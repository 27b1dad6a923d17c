"""Sparse blocks as bytes, and back: one message for a whole bag of blocks.

The size of a message follows from what both sides know beforehand (how many entries each block may hold,
and how long it is), so no size travels. A block with fewer entries than its slot is filled up with entries
whose index is the block's length; the reader drops them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from spardl.sparse import SparseVector

__all__ = ["Slot", "message_bytes", "message_words", "pack", "unpack"]

_INT32_LIMIT = 2**31 - 1


class Slot(NamedTuple):
    """The room of one block in a message.

    Attributes:
        capacity: entries that the block may hold.
        length: length of the dense block; its indices are local to it.
    """

    capacity: int
    length: int


def message_words(slots: Sequence[Slot]) -> int:
    """Words (index or value) in a message, as the papers count them: 2 per entry."""
    return 2 * sum(slot.capacity for slot in slots)


def message_bytes(slots: Sequence[Slot], dtype: torch.dtype) -> int:
    """Bytes of a message with values of the given type."""
    return sum(slot.capacity for slot in slots) * (dtype.itemsize + _index_type(slots).itemsize)


def pack(blocks: Sequence[SparseVector], slots: Sequence[Slot], dtype: torch.dtype) -> Tensor:
    """Writes blocks into one message.

    Args:
        blocks: at least one, one per slot, each of the slot's length and with at most ``capacity`` entries.
        slots: the room of each block; the receiver must know the same.
        dtype: type of the values on the wire.

    Returns:
        uint8, shape (message_bytes(slots, dtype),), on the blocks' device.
    """
    filled = [_fill(block, slot) for block, slot in zip(blocks, slots, strict=True)]
    indices = torch.cat([indices for indices, _ in filled]).to(_index_type(slots))
    values = torch.cat([values for _, values in filled]).to(dtype)
    return torch.cat([part.view(torch.uint8) for part in (indices, values)])


def unpack(message: Tensor, slots: Sequence[Slot], dtype: torch.dtype) -> list[SparseVector]:
    """Reads back what ``pack`` wrote with the same slots and type."""
    capacities = [slot.capacity for slot in slots]
    border = sum(capacities) * _index_type(slots).itemsize
    indices = _reinterpret(message[:border], _index_type(slots)).split(capacities)
    values = _reinterpret(message[border:], dtype).split(capacities)
    return [_trim(*parts) for parts in zip(indices, values, slots, strict=True)]


def _fill(block: SparseVector, slot: Slot) -> tuple[Tensor, Tensor]:
    missing = slot.capacity - len(block)
    if missing == 0:
        return block.indices, block.values
    indices = block.indices.new_full((missing,), slot.length)
    return torch.cat((block.indices, indices)), torch.cat((block.values, block.values.new_zeros(missing)))


def _trim(indices: Tensor, values: Tensor, slot: Slot) -> SparseVector:
    indices = indices.to(torch.int64)
    if indices.numel() and int(indices[-1]) == slot.length:
        count = int(torch.searchsorted(indices, slot.length))
        indices, values = indices[:count], values[:count]
    return SparseVector(indices, values, slot.length)


def _index_type(slots: Sequence[Slot]) -> torch.dtype:
    longest = max((slot.length for slot in slots), default=0)
    return torch.int32 if longest < _INT32_LIMIT else torch.int64


def _reinterpret(part: Tensor, dtype: torch.dtype) -> Tensor:
    # A message cut out of a longer one can start at an offset that its type does not allow.
    if part.storage_offset() % dtype.itemsize:
        part = part.clone()
    return part.view(dtype)
