"""Entries as floating-point numbers of 8 bits, E4M3: shares of the largest magnitude in their block, times 448.

Source: Micikevicius et al., FP8 Formats for Deep Learning, arXiv 2209.05433: 4 bits of an exponent, 3 of a fraction, no
infinities; 448 is the highest.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from spardl.vector.kernels import compiled
from spardl.vector.levels import RAW, Written, divide_rows, in_blocks, room

__all__ = ["HIGHEST", "pack_float8", "read_float8"]

HIGHEST = 448


def pack_float8(values: Tensor, block: int, *, leave: bool = False, into: Written | None = None) -> Written:
    """The largest magnitude of each block, and of each entry the nearest number, ties to even.

    Args:
        values: float32 or float64, shape (n,), finite.
        block: entries of a block.
        leave: whether ``values`` keep only what their numbers lack; they must be contiguous then.
        into: where to write what is returned; new memory if missing.

    Returns:
        Scales, shape (ceil(n / block),), and the bits of the numbers, uint8, shape (n,).
    """
    scales, packed = into or room(values, block, 8)
    if compiled(values):
        _pack_compiled(values, block, leave, scales, packed)
        return scales, packed
    rows = in_blocks(values, block)
    scales.copy_(divide_rows(rows))
    packed.copy_(rows.mul_(HIGHEST).view(-1)[: values.numel()].to(torch.float8_e4m3fn).view(torch.uint8))
    if leave:
        values.sub_(_read(scales, packed, block))
    return scales, packed


def _pack_compiled(values: Tensor, block: int, leave: bool, scales: Tensor, packed: Tensor) -> None:
    from spardl.vector.kernels import float8 as kernels  # noqa: PLC0415 - numba is optional

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
    """Writes what ``pack_float8`` found stands for.

    Args:
        scales: shape (ceil(n / block),).
        packed: uint8, shape (n,).
        block: entries of a block.
        values: of the type of the scales, shape (n,), contiguous; to write.
        add: whether it is added to what is there.
    """
    if compiled(values):
        from spardl.vector.kernels import float8 as kernels  # noqa: PLC0415 - numba is optional

        shares = _shares(values.dtype).numpy()
        kernels.read_float8(packed.numpy(), shares, scales.numpy(), block, add, values.numpy())
    elif add:
        values.add_(_read(scales, packed, block))
    else:
        values.copy_(_read(scales, packed, block))


def _read(scales: Tensor, packed: Tensor, block: int) -> Tensor:
    rows = in_blocks(packed.view(torch.float8_e4m3fn).to(scales.dtype).div_(HIGHEST), block)
    return rows.mul_(scales.unsqueeze(1)).view(-1)[: packed.numel()]


@lru_cache(maxsize=2)
def _shares(dtype: torch.dtype) -> Tensor:
    """What each byte stands for, shape (256,), on the CPU."""
    return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).to(dtype).div_(HIGHEST)
