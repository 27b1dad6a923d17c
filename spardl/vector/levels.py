"""Entries as levels of the largest magnitude in their block."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from spardl.vector.bits import pack_codes, packed_bytes, unpack_codes
from spardl.vector.kernels import compiled

__all__ = ["RAW", "Written", "divide_rows", "highest", "in_blocks", "pack_levels", "read_levels", "room"]

Round = Callable[[Tensor], Tensor]
"""Makes whole numbers of others, which may be overwritten."""


Written: TypeAlias = tuple[Tensor, Tensor]
"""Scales of blocks, shape (blocks,), and packed codes, uint8."""


class _Raw(NamedTuple):
    """How a type looks as integers: their type, what removes the sign, and 1.5 times where only whole numbers are."""

    bits: Any
    mask: Any
    half: float


RAW: Mapping[torch.dtype, _Raw] = MappingProxyType(
    {
        torch.float32: _Raw(np.int32, np.int32(2**31 - 1), 1.5 * 2**23),
        torch.float64: _Raw(np.int64, np.int64(2**63 - 1), 1.5 * 2**52),
    }
)
"""How types look as integers."""


def in_blocks(values: Tensor, block: int) -> Tensor:
    """A copy of ``values``, shape (n,), in rows of ``block``, the last one filled up with zeros."""
    rows = -(-values.numel() // block)
    return F.pad(values, (0, rows * block - values.numel())).view(rows, block)


def divide_rows(rows: Tensor) -> Tensor:
    """Divides rows by their largest magnitudes, in place; rows of zeros stay.

    Args:
        rows: floating point, shape (rows, size).

    Returns:
        The magnitudes, shape (rows,).
    """
    largest: Tensor = torch.linalg.vector_norm(rows, ord=torch.inf, dim=1)
    rows.div_(torch.where(largest > 0, largest, 1).unsqueeze(1))
    return largest


def highest(bits: int) -> int:
    """The highest level that codes of so many bits can tell; the lowest is as far below zero."""
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
    """The largest magnitude of each block, and of each entry the multiple of 1 / highest(bits) of it.

    Args:
        values: float32 or float64, shape (n,), finite.
        block: entries of a block.
        bits: of a code, one of ``WIDTHS`` but 1.
        rounded: how levels become whole; ``None``: to the nearest, of two as near to the even one.
        leave: whether ``values`` keep only what their levels lack; they must be contiguous then.
        into: where to write what is returned; new memory if missing.

    Returns:
        Scales, shape (ceil(n / block),), and levels plus the highest one, uint8, as ``pack_codes`` packs them.
    """
    scales, packed = into or room(values, block, bits)
    if rounded is None and compiled(values):
        _pack_compiled(values, block, bits, leave, scales, packed)
        return scales, packed
    rows, top = in_blocks(values, block), highest(bits)
    scales.copy_(divide_rows(rows))
    levels = rows.view(-1)[: values.numel()].mul_(top)
    whole = levels.round_() if rounded is None else rounded(levels)
    packed.copy_(pack_codes(whole.add_(top).to(torch.uint8), bits))
    if leave:
        values.sub_(_read(scales, packed, block, bits, values.numel()))
    return scales, packed


def room(values: Tensor, block: int, bits: int) -> Written:
    """Memory for the scales of ``values``, shape (n,), by ``block``, and for packed codes of so many ``bits``."""
    packed = torch.empty(packed_bytes(values.numel(), bits), dtype=torch.uint8, device=values.device)
    return values.new_empty(-(-values.numel() // block)), packed


def _pack_compiled(values: Tensor, block: int, bits: int, leave: bool, scales: Tensor, packed: Tensor) -> None:
    from spardl.vector.kernels import levels as kernels  # noqa: PLC0415 - numba is optional

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
    """Writes what ``pack_levels`` found stands for.

    Args:
        scales: shape (ceil(n / block),).
        packed: uint8, shape (packed_bytes(n, bits),).
        block: entries of a block.
        bits: of a code.
        values: of the type of the scales, shape (n,), contiguous; to write.
        add: whether it is added to what is there.
    """
    if compiled(values):
        from spardl.vector.kernels import levels as kernels  # noqa: PLC0415 - numba is optional

        given = scales.numpy()
        top = given.dtype.type(highest(bits))
        kernels.read_levels(packed.numpy(), bits, top, given, block, add, values.numpy())
        return
    found = _read(scales, packed, block, bits, values.numel())
    if add:
        values.add_(found)
    else:
        values.copy_(found)


def _read(scales: Tensor, packed: Tensor, block: int, bits: int, count: int) -> Tensor:
    top, codes = highest(bits), unpack_codes(packed, bits, count)
    rows = in_blocks(codes.to(scales.dtype).sub_(top).div_(top), block)
    return rows.mul_(scales.unsqueeze(1)).view(-1)[:count]
