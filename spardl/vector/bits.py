"""Bit packing of small codes, and messages that hold scales and one code per entry.

Codes of b bits are stored in planes: if they take m bytes, byte i holds codes i, i + m, i + 2m, ..., with code i in its
lowest bits. Memory is accessed in order, so packing takes a few vectorized passes on any device.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = [
    "INTEGERS",
    "WIDTHS",
    "ScaledCodes",
    "aligned",
    "integers_on",
    "low_bits",
    "pack_codes",
    "packed_bytes",
    "unpack_codes",
]

WIDTHS = (1, 2, 4, 8)
"""Supported numbers of bits per code."""

INTEGERS: Mapping[int, torch.dtype] = MappingProxyType({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64})
"""Integer dtype by the size of an entry in bytes, to read the bits of numbers of that size."""


def integers_on(device: torch.device, numbers: Any) -> Tensor:
    """Copies integers to a device without waiting for it.

    Args:
        device: Device of the result.
        numbers: Integers, or sequences of integers of equal lengths.

    Returns:
        int64 tensor of shape (m,), or (r, m) for r sequences.
    """
    return torch.tensor(numbers, dtype=torch.int64).to(device, non_blocking=True)


def packed_bytes(count: int, bits: int) -> int:
    """Returns the number of bytes that ``count`` codes of ``bits`` bits occupy."""
    return -(-count * bits // 8)


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Packs codes into bytes.

    Args:
        codes: Codes as uint8, shape (count,), below 2^bits.
        bits: Bits per code, one of ``WIDTHS``.

    Returns:
        uint8 tensor of shape (packed_bytes(count, bits),), in new memory.
    """
    size = packed_bytes(codes.numel(), bits)
    # Not a view: the bits of the other planes are added in place.
    packed = codes[:size].clone()
    for place in range(1, 8 // bits):
        plane = codes[place * size : (place + 1) * size]
        packed[: plane.numel()] |= plane << bits * place
    return packed


def unpack_codes(packed: Tensor, bits: int, count: int) -> Tensor:
    """Unpacks codes packed by ``pack_codes`` with the same number of bits.

    Args:
        packed: Packed codes as uint8, shape (packed_bytes(count, bits),).
        bits: Bits per code.
        count: Number of codes.

    Returns:
        uint8 tensor of shape (count,).
    """
    size = packed.numel()
    codes = packed.new_empty(8 // bits * size)
    for place in range(8 // bits):
        torch.bitwise_right_shift(packed, bits * place, out=codes[place * size : (place + 1) * size])
    return codes.bitwise_and_(2**bits - 1)[:count]


def aligned(message: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns bytes as numbers of type ``dtype``.

    Args:
        message: uint8 tensor of shape (m * itemsize,), or a tensor of type ``dtype``.
        dtype: Type of the numbers.

    Returns:
        Tensor of shape (m,): a view, or a copy if the bytes are not aligned for the type.
    """
    # A slice of a longer message may start anywhere.
    return (message.clone() if message.storage_offset() * message.itemsize % dtype.itemsize else message).view(dtype)


class ScaledCodes(NamedTuple):
    """Format of a message: scales in the dtype of the vector, followed by packed codes.

    Attributes:
        scales: Number of scales.
        codes: Number of codes.
        bits: Bits per code.
    """

    scales: int
    codes: int
    bits: int

    def size(self, dtype: torch.dtype) -> int:
        """Returns the size of a message in bytes, with scales of type ``dtype``."""
        return self.scales * dtype.itemsize + packed_bytes(self.codes, self.bits)

    def write(self, scales: Tensor, codes: Tensor) -> Tensor:
        """Packs the codes, and writes a message of scales and packed codes.

        Args:
            scales: Floating-point tensor of shape (scales,).
            codes: Codes as uint8, shape (codes,).

        Returns:
            uint8 tensor of shape (size(scales.dtype),).
        """
        return torch.cat((scales.view(torch.uint8), pack_codes(codes, self.bits)))

    def places(self, message: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Returns two views of a message, for the caller to write the scales and the packed codes to.

        Args:
            message: uint8 tensor of shape (m,), with m at least ``size(dtype)``, that owns its memory.
            dtype: Type of the scales.

        Returns:
            Scales, shape (scales,), and packed codes as uint8; both are views of the message.
        """
        border = self.scales * dtype.itemsize
        return message[:border].view(dtype), message[border : self.size(dtype)]

    def read(self, message: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Reads the scales and unpacks the codes of a message.

        Args:
            message: uint8 tensor of shape (size(dtype),).
            dtype: Type of the scales.

        Returns:
            Scales, shape (scales,), and codes as uint8, shape (codes,), both in new memory.
        """
        scales, packed = self.cut(message, dtype)
        return scales.clone().view(dtype), unpack_codes(packed, self.bits, self.codes)

    def cut(self, message: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Splits a message into the bytes of the scales and the packed codes, without decoding them.

        Args:
            message: uint8 tensor of shape (size(dtype),).
            dtype: Type of the scales.

        Returns:
            The bytes of the scales, shape (s,), to be read with ``aligned``, and the packed codes, shape (m - s,). Both
            are uint8 views of the message.
        """
        border = self.scales * dtype.itemsize
        return message[:border], message[border:]


def low_bits(capacity: int, length: int, step: int) -> int:
    """Returns the number of low bits per index, a multiple of ``step``, that gives the shortest message."""
    # Numba compiles this function as well (``spardl.vector.kernels.codec``): keep to plain integers and loops.
    best, least = 0, capacity + length
    for low in range(step, 64, step):
        bits = capacity * low + capacity + (length >> low)
        if bits < least:
            best, least = low, bits
    return best
