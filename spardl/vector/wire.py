"""How the values of sparse messages travel: as they are, or rounded to fewer bits.

What rounding takes from a value stays with the worker that sends it: error feedback, as for entries that are not sent.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, NamedTuple, Protocol

import torch
from torch import Tensor

from spardl.basics.checks import check_choice
from spardl.vector.bits import pack_codes, packed_bytes, unpack_codes
from spardl.vector.norms import largest
from spardl.vector.packing import NIBBLE, Slot, index_bytes, message_bytes, pack, pack_indices, too_short, unpack_all
from spardl.vector.sparse import SparseVector, concatenate

__all__ = ["CHUNK", "COARSE", "EXACT", "TYPES", "Coarse", "CoarseValues", "Form", "Typed", "Wire"]


# Values in 8, 4 or 2 bits: of each chunk the smallest and the largest magnitude, of each value a sign and a place.
#
# Made for the values of sparse messages: they were selected because they are large, so levels between zero and the
# smallest magnitude would be wasted, and none becomes zero. Chunks are cut as the values come, so what was rounded
# once is rounded no further where it is sent whole.
#
# Source: the coarse values of SparseLoCo (Sarfi et al., arXiv 2508.15706), which has 2 bits for a value of a top-k;
# the levels here are our own.


CHUNK = 256
"""Values with limits of their own."""

# Rounding what was rounded changes nothing, but for limits that are only some steps of their type apart.
_ROUNDS = 8


class CoarseValues(NamedTuple):
    """How values are written: limits of chunks, in their type, then packed codes.

    Attributes:
        bits: of a code: a sign, and a place between the limits; one of 2, 4 and 8.
    """

    bits: int

    def size(self, count: int, dtype: torch.dtype) -> int:
        """Bytes of so many values of a type."""
        return 2 * _chunks(count) * dtype.itemsize + packed_bytes(count, self.bits)

    def rounded(self, values: Tensor) -> Tensor:
        """Values as their receiver will see them; writing these loses nothing.

        Where a chunk has an infinity or a NaN, all of it becomes NaN.

        Args:
            values: floating point, shape (m,).

        Returns:
            Shape (m,), in memory of its own.
        """
        for _ in range(_ROUNDS):
            again = self._read(*self._code(values), values.dtype)
            if torch.equal(again, values):
                break
            values = again
        return again

    def write(self, values: Tensor, capacity: int) -> Tensor:
        """Writes values.

        Args:
            values: shape (m,), m at most ``capacity``.
            capacity: how many there is room for; zeros fill it up.

        Returns:
            uint8, shape (size(capacity, values.dtype),).
        """
        limits, codes = self._code(values)
        room = values.new_zeros(_chunks(capacity), 2)
        room[: len(limits)] = limits
        filled = codes.new_zeros(capacity)
        filled[: codes.numel()] = codes
        return torch.cat((room.view(-1).view(torch.uint8), pack_codes(filled, self.bits)))

    def codes(self, written: Tensor, count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The limits and the codes of what was written.

        Args:
            written: uint8, shape (size(count, dtype),).
            count: of the values, with those that fill up.
            dtype: of the values.

        Returns:
            Limits, shape (chunks, 2), and codes, uint8, shape (count,).
        """
        border = 2 * _chunks(count) * dtype.itemsize
        # Cut out of a longer message, the limits can start at an offset that their type does not allow.
        limits = written[:border].clone().view(dtype).view(-1, 2)
        return limits, unpack_codes(written[border:], self.bits, count)

    def values(self, limits: Tensor, codes: Tensor) -> Tensor:
        """What codes stand for.

        Args:
            limits: of chunks, shape (chunks, 2).
            codes: uint8, shape (m,): all, or the first ones.

        Returns:
            Of the type of the limits, shape (m,).
        """
        return self._read(limits, codes, limits.dtype)

    @property
    def _top(self) -> int:
        """The place of the upper limit."""
        return int(2 ** (self.bits - 1)) - 1

    def _code(self, values: Tensor) -> tuple[Tensor, Tensor]:
        rows = _rows(values.abs())
        limits = torch.stack(rows.aminmax(dim=1), dim=1)
        low, high = (limit.unsqueeze(1) for limit in limits.double().unbind(1))
        shares = (rows.double() - low).div_(torch.where(high > low, high - low, 1))
        places = shares.mul_(self._top).round_().nan_to_num_(0).to(torch.uint8).view(-1)[: values.numel()]
        return limits, places | (values.signbit().to(torch.uint8) << (self.bits - 1))

    def _read(self, limits: Tensor, codes: Tensor, dtype: torch.dtype) -> Tensor:
        places = _rows((codes & self._top).double())
        low, high = (limit.unsqueeze(1) for limit in limits[: len(places)].double().unbind(1))
        between = (high - low) * (places / self._top) + low
        # The upper limit itself, to the last bit.
        magnitudes = torch.where((places == self._top) & low.isfinite(), high, between)
        signs = codes >> (self.bits - 1)
        return magnitudes.view(-1)[: codes.numel()].mul_(1 - 2 * signs.double()).to(dtype)


def _chunks(count: int) -> int:
    return -(-count // CHUNK)


def _rows(values: Tensor) -> Tensor:
    """A copy of values, shape (m,), as chunks, the last one filled up with the last value."""
    missing = -values.numel() % CHUNK
    return torch.cat((values, values[-1:].expand(missing))).view(-1, CHUNK) if values.numel() else values.view(0, CHUNK)


# The forms of sparse messages: how their values are written beside the indices.


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


TYPES: Mapping[str, torch.dtype | None] = MappingProxyType(
    {"exact": None, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
)
COARSE: Mapping[str, CoarseValues] = MappingProxyType(
    {"int8": CoarseValues(8), "int4": CoarseValues(4), "int2": CoarseValues(2)}
)


@dataclass(frozen=True)
class Wire:
    """The type of values on the wire.

    Args:
        values: ``exact`` (the gradient's own type), ``float32``, ``bfloat16`` or ``float16``, never wider than the
            gradient's own type; or ``int8``, ``int4``, ``int2``: a sign, and a place between the smallest and the
            largest magnitude of 256 values, for communicators that send whole what they round (``allgather``,
            ``spardl``, ``gtopk``).

    Raises:
        ConfigError: if it is none of these.
    """

    values: str = "exact"

    def __post_init__(self) -> None:
        check_choice("wire.values", self.values, [*TYPES, *COARSE])

    @property
    def coarse(self) -> bool:
        """Whether values share limits with others of their message."""
        return self.values in COARSE

    def dtype(self, own: torch.dtype) -> torch.dtype:
        """The type on the wire of values that are of type ``own`` in memory and travel alone."""
        wanted = TYPES.get(self.values)
        return own if wanted is None or wanted.itemsize >= own.itemsize else wanted

    def rounds(self, own: torch.dtype) -> bool:
        """Whether values that are of type ``own`` in memory travel as anything else."""
        return self.coarse or self.dtype(own) != own

    def form(self, own: torch.dtype, step: int = NIBBLE) -> Form:
        """The form of messages with values that are of type ``own`` in memory; ``step``: of their slots."""
        return Coarse(own, COARSE[self.values], step) if self.coarse else Typed(own, self.dtype(own), step)

    def rounded(self, values: Tensor) -> Tensor:
        """Values as their receiver will see them, in their own type.

        To the nearest, ties to even. A finite value that would overflow becomes the largest that does not; infinities
        and NaNs stay what they are, but for ``int8`` and fewer bits, where all 256 values around them become NaN.

        Args:
            values: of any shape; of ``int8`` and fewer bits all values of a message, shape (m,).

        Returns:
            A tensor of that shape; the very tensor, if the type is its own.
        """
        if self.coarse:
            return COARSE[self.values].rounded(values)
        if not self.rounds(values.dtype):
            return values
        dtype = self.dtype(values.dtype)
        most = torch.finfo(dtype).max
        # A look at the largest takes less than to ask each; but it would wait for a GPU.
        if values.device.type != "cpu" or not largest([values]) <= most:
            values = torch.where(values.isfinite(), values.clamp(-most, most), values)
        return values.to(dtype).to(values.dtype)


EXACT: Final = Wire()
