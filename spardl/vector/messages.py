"""The forms of sparse messages: how their values are written beside the indices."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from spardl.vector.coarse import CoarseValues
from spardl.vector.packing import NIBBLE, Slot, index_bytes, message_bytes, pack, pack_indices, too_short, unpack_all
from spardl.vector.sparse import SparseVector, concatenate

__all__ = ["Coarse", "Form", "Typed"]


class Form(Protocol):
    """How sparse vectors become bytes, and bytes sparse vectors."""

    @abstractmethod
    def __hash__(self) -> int:
        """Equal forms have equal ones."""

    @abstractmethod
    def size(self, slot: Slot) -> int:
        """Bytes of a message with the room of ``slot``."""

    @abstractmethod
    def pack(self, vector: SparseVector, slot: Slot) -> Tensor:
        """Writes a vector.

        Args:
            vector: fits the slot; its values are what rounding made of them, see ``Wire.rounded``.
            slot: the room; the receiver must know the same.

        Returns:
            uint8, shape (size(slot),).

        Raises:
            ProgramError: if the vector has more entries than its slot.
        """

    @abstractmethod
    def open(self, messages: Tensor, slots: Sequence[Slot]) -> SparseVector:
        """Reads messages that lie end to end as one vector: block i starts where block i-1 ends.

        Args:
            messages: uint8, shape (bytes,): the messages of the slots in order.
            slots: their room, at least one.

        Returns:
            The blocks end to end, in memory of their own.

        Raises:
            ProgramError: if there are fewer bytes than the slots say.
        """


class Typed(NamedTuple):
    """Every value in a type.

    Attributes:
        own: the type in memory.
        sent: the type on the wire.
        step: of the slots of its messages.
    """

    own: torch.dtype
    sent: torch.dtype
    step: int = NIBBLE

    def size(self, slot: Slot) -> int:
        """Bytes of a message with the room of ``slot``."""
        return message_bytes(slot._replace(step=self.step), self.sent)

    def pack(self, vector: SparseVector, slot: Slot) -> Tensor:
        """A message, uint8, shape (size(slot),), of a ``vector`` that fits its room, ``slot``."""
        return pack(vector, slot._replace(step=self.step), self.sent)

    def open(self, messages: Tensor, slots: Sequence[Slot]) -> SparseVector:
        """The vectors in ``messages``, uint8, shape (bytes,), end to end; ``slots``: their room."""
        rooms = [slot if slot.step == self.step else slot._replace(step=self.step) for slot in slots]
        return unpack_all(messages, rooms, self.sent, self.own)


class Coarse(NamedTuple):
    """Every value in a few bits, with limits for each chunk of a message.

    Attributes:
        own: the type in memory, and of the limits.
        values: how values are written.
        step: of the slots of its messages.
    """

    own: torch.dtype
    values: CoarseValues
    step: int = NIBBLE

    def size(self, slot: Slot) -> int:
        """Bytes of a message with the room of ``slot``."""
        return self.values.size(slot.capacity, self.own) + index_bytes(slot._replace(step=self.step))

    def pack(self, vector: SparseVector, slot: Slot) -> Tensor:
        """A message, uint8, shape (size(slot),), of a rounded ``vector`` that fits its room, ``slot``."""
        indices = pack_indices(vector.indices, slot._replace(step=self.step))
        return torch.cat((self.values.write(vector.values, slot.capacity), indices))

    def open(self, messages: Tensor, slots: Sequence[Slot]) -> SparseVector:
        """The vectors in ``messages``, uint8, shape (bytes,), end to end; ``slots``: their room."""
        if sum(map(self.size, slots)) > messages.numel():
            raise too_short(messages)
        blocks, start = [], 0
        for slot in slots:
            stop = start + self.size(slot)
            blocks.append(self._block(messages[start:stop], slot._replace(step=self.step)))
            start = stop
        return concatenate(blocks)

    def _block(self, message: Tensor, slot: Slot) -> SparseVector:
        border = self.values.size(slot.capacity, self.own)
        limits, codes = self.values.codes(message[:border], slot.capacity, self.own)
        # Read as a message whose values are the codes.
        found = unpack_all(torch.cat((codes, message[border:])), [slot], torch.uint8, torch.uint8)
        return SparseVector(found.indices, self.values.values(limits, found.values), slot.length)
