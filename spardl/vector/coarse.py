"""Values in 8, 4 or 2 bits: of each chunk the smallest and the largest magnitude, of each value a sign and a place.

Made for the values of sparse messages: they were selected because they are large, so levels between zero and the
smallest magnitude would be wasted, and none becomes zero. Chunks are cut as the values come, so what was rounded once
is rounded no further where it is sent whole.

Source: the coarse values of SparseLoCo (Sarfi et al., arXiv 2508.15706), which has 2 bits for a value of a top-k; the
levels here are our own.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from spardl.vector.bits import pack_codes, packed_bytes, unpack_codes

__all__ = ["CHUNK", "CoarseValues"]

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
