"""Block-wise quantization: integer levels, 8-bit floating point, and stochastic rounding."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from spardl.vector.bits import aligned, pack_codes, packed_bytes, unpack_codes
from spardl.vector.kernels import compiled, runs_triton

__all__ = [
    "HIGHEST",
    "RAW",
    "Written",
    "allocate",
    "divide_rows",
    "highest",
    "in_blocks",
    "pack_float8",
    "pack_levels",
    "read_float8",
    "read_levels",
    "round_stochastically",
]


Round = Callable[[Tensor], Tensor]
"""Rounds a tensor to integers; may overwrite it."""


Written: TypeAlias = tuple[Tensor, Tensor]
"""Scales of the blocks, shape (blocks,), and packed codes (uint8)."""


class _Raw(NamedTuple):
    """Integer view of a dtype: integer type, mask that removes the sign, and constant that rounds to integers."""

    bits: Any
    mask: Any
    # 1.5 times the smallest number from which on the dtype holds integers only: adding it rounds to an integer.
    half: float


RAW: Mapping[torch.dtype, _Raw] = MappingProxyType(
    {
        torch.float32: _Raw(np.int32, np.int32(2**31 - 1), 1.5 * 2**23),
        torch.float64: _Raw(np.int64, np.int64(2**63 - 1), 1.5 * 2**52),
    }
)
"""Integer views by dtype."""


def in_blocks(values: Tensor, block: int) -> Tensor:
    """Copies ``values``, shape (n,), into rows of ``block`` entries; pads the last row with zeros."""
    rows = -(-values.numel() // block)
    return F.pad(values, (0, rows * block - values.numel())).view(rows, block)


def divide_rows(rows: Tensor) -> Tensor:
    """Divides each row by its largest magnitude, in place; leaves rows of zeros unchanged.

    Args:
        rows: Floating-point tensor of shape (rows, size).

    Returns:
        Largest magnitude of each row, shape (rows,).
    """
    largest: Tensor = torch.linalg.vector_norm(rows, ord=torch.inf, dim=1)
    rows.div_(torch.where(largest > 0, largest, 1).unsqueeze(1))
    return largest


def highest(bits: int) -> int:
    """Returns the highest level of codes with ``bits`` bits; the lowest level is its negative."""
    return int(2 ** (bits - 1)) - 1


def pack_levels(
    values: Tensor,
    block: int,
    bits: int,
    rounded: Round | None = None,
    *,
    leave: bool = False,
    into: Written | None = None,
) -> Written:
    """Quantizes entries to multiples of 1 / highest(bits) of the largest magnitude in their block.

    Args:
        values: Finite float32 or float64 tensor of shape (n,).
        block: Number of entries per block.
        bits: Bits per code, one of ``WIDTHS`` except 1.
        rounded: Function that rounds a tensor to integers; ``None`` rounds to nearest, ties to even.
        leave: Whether to replace ``values`` by their quantization errors; they must then be contiguous.
        into: Tensors for scales and packed codes to write to, as from ``allocate``; ``None`` allocates them.

    Returns:
        Scales, shape (ceil(n / block),), and levels offset by the highest one, as uint8 packed by ``pack_codes``.
    """
    scales, packed = into or allocate(values, block, bits)
    if rounded is None and compiled(values):
        _pack_levels(values, block, bits, leave, scales, packed)
        return scales, packed
    if rounded is None and _runs_on_gpu(values, block):
        from spardl.vector.kernels import gpu_levels  # noqa: PLC0415 - triton is installed only with CUDA

        gpu_levels.pack_levels(values.contiguous(), block, bits, leave, scales, packed)
        return scales, packed
    rows, top = in_blocks(values, block), highest(bits)
    scales.copy_(divide_rows(rows))
    levels = rows.view(-1)[: values.numel()].mul_(top)
    whole = levels.round_() if rounded is None else rounded(levels)
    packed.copy_(pack_codes(whole.add_(top).to(torch.uint8), bits))
    if leave:
        values.sub_(_read_levels(scales, packed, block, bits, values.numel()))
    return scales, packed


# Longest block that one program of a GPU holds.
_LONGEST = 1 << 14


def _runs_on_gpu(values: Tensor, block: int) -> bool:
    return values.dtype == torch.float32 and block <= _LONGEST and runs_triton(values)


def allocate(values: Tensor, block: int, bits: int) -> Written:
    """Allocates one scale per ``block`` entries of ``values``, shape (n,), and n packed codes of ``bits`` bits."""
    packed = torch.empty(packed_bytes(values.numel(), bits), dtype=torch.uint8, device=values.device)
    return values.new_empty(-(-values.numel() // block)), packed


def _pack_levels(values: Tensor, block: int, bits: int, leave: bool, scales: Tensor, packed: Tensor) -> None:
    from spardl.vector.kernels import codec as kernels  # noqa: PLC0415 - numba is optional

    raw, given = RAW[values.dtype], values.contiguous().numpy()
    number, row = given.dtype.type, np.empty(block, given.dtype)
    kernels.pack_levels(
        given,
        given.view(raw.bits),
        raw.mask,
        number(highest(bits)),
        number(raw.half),
        bits,
        leave,
        scales.numpy(),
        scales.numpy().view(raw.bits),
        row,
        row.view(raw.bits),
        packed.numpy(),
    )


def read_levels(scales: Tensor, packed: Tensor, block: int, bits: int, values: Tensor, *, add: bool = False) -> None:
    """Decodes levels written by ``pack_levels``, and writes the values to ``values`` or adds them to it.

    Args:
        scales: Scales of the blocks, shape (ceil(n / block),); or their bytes as uint8, aligned or not.
        packed: Packed codes as uint8, shape (packed_bytes(n, bits),).
        block: Number of entries per block.
        bits: Bits per code.
        values: Contiguous tensor of shape (n,) to write to, in the dtype of the scales.
        add: Whether to add to ``values`` instead of overwriting them.
    """
    if _runs_on_gpu(values, block):
        from spardl.vector.kernels import gpu_levels  # noqa: PLC0415 - triton is installed only with CUDA

        gpu_levels.read_levels(scales.view(torch.uint8), packed, block, bits, values, add)
        return
    scales = aligned(scales, values.dtype)
    if compiled(values):
        from spardl.vector.kernels import codec as kernels  # noqa: PLC0415 - numba is optional

        given = scales.numpy()
        top = given.dtype.type(highest(bits))
        kernels.read_levels(packed.numpy(), bits, top, given, block, add, values.numpy())
        return
    found = _read_levels(scales, packed, block, bits, values.numel())
    if add:
        values.add_(found)
    else:
        values.copy_(found)


def _read_levels(scales: Tensor, packed: Tensor, block: int, bits: int, count: int) -> Tensor:
    top, codes = highest(bits), unpack_codes(packed, bits, count)
    rows = in_blocks(codes.to(scales.dtype).sub_(top).div_(top), block)
    return rows.mul_(scales.unsqueeze(1)).view(-1)[:count]


# 8-bit floating point (E4M3): shares of the largest magnitude in a block, times 448.
#
# Source: Micikevicius et al., FP8 Formats for Deep Learning, arXiv 2209.05433: 4 exponent bits, 3 fraction bits, no
# infinities; the largest number is 448.


HIGHEST = 448


def pack_float8(values: Tensor, block: int, *, leave: bool = False, into: Written | None = None) -> Written:
    """Quantizes entries to E4M3 (8-bit floats), relative to the largest magnitude in their block; ties to even.

    Args:
        values: Finite float32 or float64 tensor of shape (n,).
        block: Number of entries per block.
        leave: Whether to replace ``values`` by their quantization errors; they must then be contiguous.
        into: Tensors for scales and E4M3 bits to write to; ``None`` allocates them.

    Returns:
        Scales, shape (ceil(n / block),), and the E4M3 bits as uint8, shape (n,).
    """
    scales, packed = into or allocate(values, block, 8)
    if compiled(values):
        _pack_float8(values, block, leave, scales, packed)
        return scales, packed
    rows = in_blocks(values, block)
    scales.copy_(divide_rows(rows))
    packed.copy_(rows.mul_(HIGHEST).view(-1)[: values.numel()].to(torch.float8_e4m3fn).view(torch.uint8))
    if leave:
        values.sub_(_read_float8(scales, packed, block))
    return scales, packed


def _pack_float8(values: Tensor, block: int, leave: bool, scales: Tensor, packed: Tensor) -> None:
    from spardl.vector.kernels import codec as kernels  # noqa: PLC0415 - numba is optional

    raw, given = RAW[values.dtype], values.contiguous().numpy()
    near, far = np.empty((2, block), np.float32)
    kernels.pack_float8(
        given,
        given.view(raw.bits),
        raw.mask,
        leave,
        scales.numpy(),
        scales.numpy().view(raw.bits),
        near,
        near.view(np.int32),
        far,
        far.view(np.int32),
        given.dtype.type(HIGHEST),
        packed.numpy(),
    )


def read_float8(scales: Tensor, packed: Tensor, block: int, values: Tensor, *, add: bool = False) -> None:
    """Decodes numbers written by ``pack_float8``, and writes them to ``values`` or adds them to it.

    Args:
        scales: Scales of the blocks, shape (ceil(n / block),); or their bytes as uint8, aligned or not.
        packed: E4M3 bits as uint8, shape (n,).
        block: Number of entries per block.
        values: Contiguous tensor of shape (n,) to write to, in the dtype of the scales.
        add: Whether to add to ``values`` instead of overwriting them.
    """
    scales = aligned(scales, values.dtype)
    if compiled(values):
        from spardl.vector.kernels import codec as kernels  # noqa: PLC0415 - numba is optional

        shares = _shares(values.dtype).numpy()
        kernels.read_float8(packed.numpy(), shares, scales.numpy(), block, add, values.numpy())
    elif add:
        values.add_(_read_float8(scales, packed, block))
    else:
        values.copy_(_read_float8(scales, packed, block))


def _read_float8(scales: Tensor, packed: Tensor, block: int) -> Tensor:
    rows = in_blocks(packed.view(torch.float8_e4m3fn).to(scales.dtype).div_(HIGHEST), block)
    return rows.mul_(scales.unsqueeze(1)).view(-1)[: packed.numel()]


@lru_cache(maxsize=2)
def _shares(dtype: torch.dtype) -> Tensor:
    """Returns the value, as a share of the scale, of each of the 256 codes, shape (256,), on the CPU."""
    return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).to(dtype).div_(HIGHEST)


def round_stochastically(values: Tensor, generator: torch.Generator) -> Tensor:
    """Rounds each value up or down at random, so that the expected result is the value; integers are kept.

    Args:
        values: Finite floating-point tensor of any shape; overwritten.
        generator: CPU generator, whatever the device of the values.

    Returns:
        Integers as a tensor of the same shape and dtype.
    """
    # Compare the fraction only: a random number added to a large value would lose its low bits.
    low = values.floor()
    chance = values.sub_(low)
    draw = torch.rand(values.shape, generator=generator, dtype=values.dtype).to(values.device)
    return low.add_(draw.lt_(chance))
