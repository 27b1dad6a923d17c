"""Wire formats of sparse messages: values in their own dtype, or rounded to fewer bits.

The sender keeps the rounding errors, as error feedback does for unsent entries.
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
from spardl.vector.norms import largest_magnitude
from spardl.vector.packing import NIBBLE, Slot, index_bytes, message_bytes, pack, pack_indices, too_short, unpack_all
from spardl.vector.sparse import SparseVector, concatenate

__all__ = ["CHUNK", "COARSE", "EXACT", "TYPES", "Coarse", "CoarseValues", "Form", "Typed", "Wire"]


# Values in 8, 4 or 2 bits: the smallest and largest magnitude of each chunk, and a sign and a level per value.
#
# Sparse values were selected for being large, so levels between zero and the smallest magnitude would be wasted, and no
# value becomes zero. Chunks follow the order of the values, so values that were rounded once and are sent in the same
# order are not rounded again.
#
# Source: the quantized values of SparseLoCo (Sarfi et al., arXiv 2508.15706), with 2 bits per value of a top-k; the
# levels here differ from theirs.


CHUNK = 256
"""Number of values that share limits."""

# Rounding is idempotent unless the limits of a chunk are only a few units in the last place apart.
_ROUNDS = 8


class CoarseValues(NamedTuple):
    """Encoding of values with few bits: two limits per chunk of 256 values, followed by one packed code per value.

    The limits are the smallest and the largest magnitude of the chunk.

    Attributes:
        bits: Bits per code (a sign and a level between the limits): 2, 4 or 8.
    """

    bits: int

    def size(self, count: int, dtype: torch.dtype) -> int:
        """Returns the number of bytes that ``count`` values of type ``dtype`` occupy."""
        return 2 * _chunks(count) * dtype.itemsize + packed_bytes(count, self.bits)

    def rounded(self, values: Tensor) -> Tensor:
        """Returns the values that a receiver decodes; these can be encoded without further loss.

        If a chunk holds an infinity or a NaN, all of its values become NaN.

        Args:
            values: Floating-point tensor of shape (m,).

        Returns:
            Tensor of shape (m,), in new memory.
        """
        for _ in range(_ROUNDS):
            again = self._read(*self._code(values), values.dtype)
            if torch.equal(again, values):
                break
            values = again
        return again

    def write(self, values: Tensor, capacity: int) -> Tensor:
        """Encodes rounded values as bytes.

        Args:
            values: Tensor of shape (m,), m at most ``capacity``.
            capacity: Number of values to encode, padded with zeros.

        Returns:
            uint8 tensor of shape (size(capacity, values.dtype),).
        """
        limits, codes = self._code(values)
        padded = values.new_zeros(_chunks(capacity), 2)
        padded[: len(limits)] = limits
        filled = codes.new_zeros(capacity)
        filled[: codes.numel()] = codes
        return torch.cat((padded.view(-1).view(torch.uint8), pack_codes(filled, self.bits)))

    def codes(self, written: Tensor, count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Extracts limits and codes from encoded values.

        Args:
            written: Encoded values as uint8, shape (size(count, dtype),).
            count: Number of values, including padding.
            dtype: Type of the values.

        Returns:
            Limits, shape (chunks, 2), and codes as uint8, shape (count,).
        """
        border = 2 * _chunks(count) * dtype.itemsize
        # In a slice of a longer message, the limits may start at an offset that is not aligned for their type.
        limits = written[:border].clone().view(dtype).view(-1, 2)
        return limits, unpack_codes(written[border:], self.bits, count)

    def values(self, limits: Tensor, codes: Tensor) -> Tensor:
        """Decodes values from limits and codes.

        Args:
            limits: Limits of the chunks, shape (chunks, 2).
            codes: Codes as uint8, shape (m,): those of all values, or only of the first m.

        Returns:
            Values in the dtype of the limits, shape (m,).
        """
        return self._read(limits, codes, limits.dtype)

    @property
    def _top(self) -> int:
        """Level of the upper limit."""
        return int(2 ** (self.bits - 1)) - 1

    def _code(self, values: Tensor) -> tuple[Tensor, Tensor]:
        rows = _rows(values.abs())
        limits = torch.stack(rows.aminmax(dim=1), dim=1)
        # In float64, so that narrower dtypes round to the nearest level.
        low, high = (limit.unsqueeze(1) for limit in limits.double().unbind(1))
        shares = (rows.double() - low).div_(torch.where(high > low, high - low, 1))
        # NaN becomes 0 because it has no integer value; the limits of its chunk are NaN.
        places = shares.mul_(self._top).round_().nan_to_num_(0).to(torch.uint8).view(-1)[: values.numel()]
        return limits, places | (values.signbit().to(torch.uint8) << (self.bits - 1))

    def _read(self, limits: Tensor, codes: Tensor, dtype: torch.dtype) -> Tensor:
        places = _rows((codes & self._top).double())
        low, high = (limit.unsqueeze(1) for limit in limits[: len(places)].double().unbind(1))
        between = (high - low) * (places / self._top) + low
        # The interpolation may miss the upper limit by a rounding error; the limit must be exact.
        magnitudes = torch.where((places == self._top) & low.isfinite(), high, between)
        signs = codes >> (self.bits - 1)
        return magnitudes.view(-1)[: codes.numel()].mul_(1 - 2 * signs.double()).to(dtype)


def _chunks(count: int) -> int:
    return -(-count // CHUNK)


def _rows(values: Tensor) -> Tensor:
    """Copies values into rows of one chunk each; pads the last row with the last value."""
    missing = -values.numel() % CHUNK
    return torch.cat((values, values[-1:].expand(missing))).view(-1, CHUNK) if values.numel() else values.view(0, CHUNK)


# Formats of sparse messages: values and indices.


class Form(Protocol):
    """Format in which sparse vectors are encoded as bytes."""

    @abstractmethod
    def __hash__(self) -> int:
        """Equal formats have equal hashes."""

    @abstractmethod
    def size(self, slot: Slot) -> int:
        """Returns the size of a message for ``slot`` in bytes."""

    @abstractmethod
    def pack(self, vector: SparseVector, slot: Slot) -> Tensor:
        """Encodes a sparse vector as a message.

        Args:
            vector: Sparse vector that fits the slot, with values rounded by ``Wire.rounded``.
            slot: Space for the vector; the receiver must use an equal slot.

        Returns:
            uint8 tensor of shape (size(slot),).

        Raises:
            ProgramError: If the vector has more entries than the slot's capacity.
        """

    @abstractmethod
    def open(self, messages: Tensor, slots: Sequence[Slot], *, full: bool = False) -> SparseVector:
        """Decodes concatenated messages as one long vector, which consists of the messages' vectors in order.

        Args:
            messages: uint8 tensor of shape (bytes,) with the messages of the slots in order.
            slots: Spaces of the vectors, at least one.
            full: Whether every vector has as many entries as its slot allows; see ``unpack_all``.

        Returns:
            The concatenated vectors as one sparse vector, in new memory.

        Raises:
            ProgramError: If there are fewer bytes than the slots require.
        """


class Typed(NamedTuple):
    """Format with one floating-point number per value.

    Attributes:
        own: Dtype of the values in memory.
        sent: Dtype of the values in messages.
        step: The number of low bits per index is a multiple of this number (see ``Slot``).
    """

    own: torch.dtype
    sent: torch.dtype
    step: int = NIBBLE

    def size(self, slot: Slot) -> int:
        """Returns the size of a message for ``slot`` in bytes."""
        return message_bytes(slot._replace(step=self.step), self.sent)

    def pack(self, vector: SparseVector, slot: Slot) -> Tensor:
        """Encodes a ``vector`` that fits ``slot`` as a uint8 tensor of shape (size(slot),)."""
        return pack(vector, slot._replace(step=self.step), self.sent)

    def open(self, messages: Tensor, slots: Sequence[Slot], *, full: bool = False) -> SparseVector:
        """Decodes concatenated ``messages``, uint8, shape (bytes,), with these ``slots``, like ``Form.open``."""
        own_slots = [slot if slot.step == self.step else slot._replace(step=self.step) for slot in slots]
        return unpack_all(messages, own_slots, self.sent, self.own, full=full)


class Coarse(NamedTuple):
    """Format with a few bits per value, and limits for each chunk of 256 values (see ``CoarseValues``).

    Attributes:
        own: Dtype of the values in memory, and of the limits.
        values: Encoding of the values.
        step: The number of low bits per index is a multiple of this number (see ``Slot``).
    """

    own: torch.dtype
    values: CoarseValues
    step: int = NIBBLE

    def size(self, slot: Slot) -> int:
        """Returns the size of a message for ``slot`` in bytes."""
        return self.values.size(slot.capacity, self.own) + index_bytes(slot._replace(step=self.step))

    def pack(self, vector: SparseVector, slot: Slot) -> Tensor:
        """Encodes a ``vector`` with rounded values that fits ``slot`` as a uint8 tensor of shape (size(slot),)."""
        indices = pack_indices(vector.indices, slot._replace(step=self.step))
        return torch.cat((self.values.write(vector.values, slot.capacity), indices))

    def open(self, messages: Tensor, slots: Sequence[Slot], *, full: bool = False) -> SparseVector:
        """Decodes concatenated ``messages``, uint8, shape (bytes,), with these ``slots``, like ``Form.open``."""
        if sum(map(self.size, slots)) > messages.numel():
            raise too_short(messages)
        blocks, start = [], 0
        for slot in slots:
            stop = start + self.size(slot)
            blocks.append(self._block(messages[start:stop], slot._replace(step=self.step), full))
            start = stop
        return concatenate(blocks)

    def _block(self, message: Tensor, slot: Slot, full: bool) -> SparseVector:
        border = self.values.size(slot.capacity, self.own)
        limits, codes = self.values.codes(message[:border], slot.capacity, self.own)
        # Reuses the index decoder: the codes take the place of the values.
        found = unpack_all(torch.cat((codes, message[border:])), [slot], torch.uint8, torch.uint8, full=full)
        return SparseVector(found.indices, self.values.values(limits, found.values), slot.length)


TYPES: Mapping[str, torch.dtype | None] = MappingProxyType(
    {"exact": None, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
)
COARSE: Mapping[str, CoarseValues] = MappingProxyType(
    {"int8": CoarseValues(8), "int4": CoarseValues(4), "int2": CoarseValues(2)}
)


@dataclass(frozen=True)
class Wire:
    """Number format of the values in sparse messages.

    Args:
        values: Name of the format: ``exact`` (the gradient's dtype), ``float32``, ``bfloat16`` or ``float16``, never
            wider than the gradient's dtype; or ``int8``, ``int4``, ``int2``: a sign, and a level between the smallest
            and the largest magnitude of 256 values, for communicators that send rounded values unchanged
            (``allgather``, ``spardl``, ``gtopk``).

    Raises:
        ConfigError: If ``values`` is another name.
    """

    values: str = "exact"

    def __post_init__(self) -> None:
        check_choice("wire.values", self.values, [*TYPES, *COARSE])

    @property
    def coarse(self) -> bool:
        """Whether values are quantized to 8 bits or fewer, with common limits for each 256 consecutive values."""
        return self.values in COARSE

    def dtype(self, own: torch.dtype) -> torch.dtype:
        """Returns the dtype that values of dtype ``own`` have in messages."""
        wanted = TYPES.get(self.values)
        return own if wanted is None or wanted.itemsize >= own.itemsize else wanted

    def rounds(self, own: torch.dtype) -> bool:
        """Returns whether values of dtype ``own`` are rounded before they are sent."""
        return self.coarse or self.dtype(own) != own

    def form(self, own: torch.dtype, step: int = NIBBLE) -> Form:
        """Returns the message format for values of dtype ``own``; ``step`` is that of ``Slot``."""
        return Coarse(own, COARSE[self.values], step) if self.coarse else Typed(own, self.dtype(own), step)

    def rounded(self, values: Tensor) -> Tensor:
        """Returns the values that a receiver decodes, in the dtype of ``values``.

        Rounds to nearest, ties to even. A finite value that would overflow becomes the largest finite number.
        Infinities and NaNs are kept, except for ``int8`` and below, where all 256 values of the chunk become NaN.

        Args:
            values: Tensor of any shape; for ``int8`` and below all values of a message, shape (m,).

        Returns:
            A tensor of the same shape; the input itself if nothing is rounded.
        """
        if self.coarse:
            return COARSE[self.values].rounded(values)
        if not self.rounds(values.dtype):
            return values
        dtype = self.dtype(values.dtype)
        most = torch.finfo(dtype).max
        # On the CPU, one pass for the maximum is cheaper than a test per entry; on a GPU it would synchronize.
        if values.device.type != "cpu" or not largest_magnitude([values]) <= most:
            values = torch.where(values.isfinite(), values.clamp(-most, most), values)
        return values.to(dtype).to(values.dtype)


EXACT: Final = Wire()
