"""Small codes as bytes, and messages that hold some scales and a code per entry.

Codes of b bits lie in planes: with m bytes, byte i holds codes i, i + m, i + 2m, ..., the first in its lowest bits. All
memory is read and written in order, so packing is a few vectorised passes on any device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["WIDTHS", "ScaledCodes", "low_bits", "pack_codes", "packed_bytes", "unpack_codes"]

WIDTHS = (1, 2, 4, 8)
"""Bits that a code may have."""


def packed_bytes(count: int, bits: int) -> int:
    """Bytes that so many codes take."""
    return -(-count * bits // 8)


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Packs codes into bytes.

    Args:
        codes: uint8, shape (count,), below 2^bits.
        bits: one of ``WIDTHS``.

    Returns:
        uint8, shape (packed_bytes(count, bits),), in memory of its own.
    """
    size = packed_bytes(codes.numel(), bits)
    packed = codes[:size].clone()
    for place in range(1, 8 // bits):
        plane = codes[place * size : (place + 1) * size]
        packed[: plane.numel()] |= plane << bits * place
    return packed


def unpack_codes(packed: Tensor, bits: int, count: int) -> Tensor:
    """Reads back what ``pack_codes`` packed with the same number of bits.

    Args:
        packed: uint8, shape (packed_bytes(count, bits),).
        bits: of a code.
        count: how many codes.

    Returns:
        uint8, shape (count,).
    """
    size = packed.numel()
    codes = packed.new_empty(8 // bits * size)
    for place in range(8 // bits):
        torch.bitwise_right_shift(packed, bits * place, out=codes[place * size : (place + 1) * size])
    return codes.bitwise_and_(2**bits - 1)[:count]


class ScaledCodes(NamedTuple):
    """The form of a message: scales in the type of the vector, then packed codes.

    Attributes:
        scales: number of scales.
        codes: number of codes.
        bits: of a code.
    """

    scales: int
    codes: int
    bits: int

    def size(self, dtype: torch.dtype) -> int:
        """Bytes of a message with scales of a type."""
        return self.scales * dtype.itemsize + packed_bytes(self.codes, self.bits)

    def write(self, scales: Tensor, codes: Tensor) -> Tensor:
        """Writes a message.

        Args:
            scales: shape (scales,), floating point.
            codes: uint8, shape (codes,).

        Returns:
            uint8, shape (size(scales.dtype),).
        """
        return torch.cat((scales.view(torch.uint8), pack_codes(codes, self.bits)))

    def places(self, message: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Where scales and packed codes are to be written.

        Args:
            message: uint8, shape (m,), m at least ``size(dtype)``, in memory of its own.
            dtype: of the scales.

        Returns:
            Scales, shape (scales,), and packed codes, uint8, both parts of the message.
        """
        border = self.scales * dtype.itemsize
        return message[:border].view(dtype), message[border : self.size(dtype)]

    def read(self, message: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Reads a message.

        Args:
            message: uint8, shape (size(dtype),).
            dtype: of the scales.

        Returns:
            Scales, shape (scales,), and codes, uint8, shape (codes,), in memory of their own.
        """
        scales, packed = self.cut(message, dtype)
        return scales, unpack_codes(packed, self.bits, self.codes)

    def cut(self, message: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """As ``read``, but codes stay packed.

        Args:
            message: uint8, shape (size(dtype),).
            dtype: of the scales.

        Returns:
            Scales, shape (scales,), in memory of their own, and packed codes, uint8, a part of the message.
        """
        border = self.scales * dtype.itemsize
        # Cut out of a longer message, the scales can start at an offset that their type does not allow.
        return message[:border].clone().view(dtype), message[border:]


def low_bits(capacity: int, length: int, step: int) -> int:
    """How many bits of an index are low: those that make the smallest message, of the multiples of ``step``.

    Kept so simple that it compiles, see ``spardl.vector.kernels.codec``.
    """
    best, least = 0, capacity + length
    for low in range(step, 64, step):
        bits = capacity * low + capacity + (length >> low)
        if bits < least:
            best, least = low, bits
    return best
