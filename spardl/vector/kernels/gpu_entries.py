"""Access to single entries of a vector on a GPU; each operation is one kernel launch."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from spardl.vector.bits import INTEGERS
from spardl.vector.kernels import gpu, gpu_select

__all__ = ["add", "cut", "limit_and_divide"]

_TILE = 1024  # entries per program
_WARPS = 4


def cut(values: Tensor, positions: Tensor, start: int) -> tuple[Tensor, Tensor]:
    """Reads entries of a vector and sets them to zero.

    Args:
        values: Vector of shape (n,); the entries become zero.
        positions: int64 positions of shape (k,), distinct.
        start: Position whose index is 0 in the result.

    Returns:
        Indices of the entries, counted from ``start`` and, after the end of the vector, on from its beginning; and the
        entries. Both have shape (k,).
    """
    count, raw = positions.numel(), INTEGERS[values.itemsize]
    indices, taken = torch.empty_like(positions) if start else positions, values.new_empty(count)
    if count:
        gpu.launch(
            _cut,
            gpu.grid(count, _TILE),
            values.view(raw),
            positions,
            count,
            start,
            values.numel(),
            indices if start else None,
            taken.view(raw),
            _TILE,
            num_warps=_WARPS,
        )
    return indices, taken


def add(
    values: Tensor, indices: Tensor, amounts: Tensor, start: int, finite: Tensor, words: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Adds amounts to entries, and clips sums that overflow to the largest number.

    Args:
        values: Vector of shape (n,), float32, bfloat16 or float16, modified in place.
        indices: int64 indices of shape (k,), counted from ``start`` and, after the end of the vector, on from its
            beginning. An index may occur twice in a row, with equal amounts, which are then added once.
        amounts: Tensor of shape (k,) of the same dtype.
        start: Position of index 0.
        finite: Bool tensor of shape (), true; becomes false if a sum is not finite.
        words: Bitmap in which the entries are marked, see ``gpu_select``, shape (m,); ``None`` to mark nothing.

    Returns:
        Positions of the entries in the vector, and their earlier values, shape (k,) each.
    """
    count = indices.numel()
    positions, before = torch.empty_like(indices) if start else indices, values.new_empty(count)
    if count:
        gpu.launch(
            _add,
            gpu.grid(count, _TILE),
            values,
            indices,
            amounts,
            count,
            start,
            values.numel(),
            positions if start else None,
            before,
            finite.view(torch.uint8),
            words,
            float(torch.finfo(values.dtype).max),
            _TILE,
            num_warps=_WARPS,
        )
    return positions, before


def limit_and_divide(total: Tensor, divisor: int, finite: Tensor, out: Tensor | None = None) -> Tensor:
    """Clips entries of a sum that overflowed, and divides all entries, rounding to nearest.

    Args:
        total: Sum of shape (m,), float32, bfloat16 or float16.
        divisor: Number to divide by.
        finite: Bool tensor of shape (), true; becomes false if a magnitude is not below the largest number of the
            dtype, which also marks sums that were clipped earlier.
        out: Tensor like ``total`` to write the quotients to, possibly the same, shape (m,); ``None`` allocates one.

    Returns:
        The quotients, shape (m,).
    """
    out = torch.empty_like(total) if out is None else out
    if count := total.numel():
        gpu.launch(
            _limit_and_divide,
            gpu.grid(count, _TILE),
            total,
            count,
            float(divisor),
            float(torch.finfo(total.dtype).max),
            out,
            finite.view(torch.uint8),
            _TILE,
            num_warps=_WARPS,
        )
    return out


@gpu.kernel
def _cut(
    values: tl.tensor,
    positions: tl.tensor,
    count: int,
    start: int,
    length: int,
    indices: tl.tensor | None,
    taken: tl.tensor,
    tile: tl.constexpr,
) -> None:
    at = tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile)
    inside = at < count
    position = tl.load(positions + at, mask=inside, other=0)
    entry = tl.load(values + position, mask=inside, other=0)
    tl.store(taken + at, entry, mask=inside)
    tl.store(values + position, tl.zeros_like(entry), mask=inside)
    if indices is not None:
        index = position - start
        tl.store(indices + at, tl.where(index < 0, index + length, index), mask=inside)


@gpu.kernel
def _add(
    values: tl.tensor,
    indices: tl.tensor,
    amounts: tl.tensor,
    count: int,
    start: int,
    length: int,
    positions: tl.tensor | None,
    before: tl.tensor,
    finite: tl.tensor,
    words: tl.tensor | None,
    most: float,
    tile: tl.constexpr,
) -> None:
    kind: tl.constexpr = values.dtype.element_ty
    at = tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile)
    inside = at < count
    index = tl.load(indices + at, mask=inside, other=0)
    position = index + start
    position = tl.where(position < length, position, position - length)
    # The first of two equal entries also writes what belongs to the second, which could otherwise read the new value.
    first = inside & ((at == 0) | (tl.load(indices + at - 1, mask=inside & (at > 0), other=-1) != index))
    again = first & (at + 1 < count) & (tl.load(indices + at + 1, mask=at + 1 < count, other=-1) == index)
    old = tl.load(values + position, mask=first, other=0)
    total = gpu_select.wide(
        gpu_select.narrow(gpu_select.wide(old) + gpu_select.wide(tl.load(amounts + at, mask=first, other=0)), kind)
    )
    if tl.sum((tl.abs(total) < float("inf")).to(tl.int32)) < tile:
        tl.store(finite, 0)
    total = tl.where(total == float("inf"), most, tl.where(total == float("-inf"), -most, total))
    total = tl.where(total == total, total, 0.0)  # noqa: PLR0124
    tl.store(values + position, gpu_select.narrow(total, kind), mask=first)
    tl.store(before + at, old, mask=first)
    tl.store(before + at + 1, old, mask=again)
    if positions is not None:
        tl.store(positions + at, position, mask=inside)
    if words is not None:
        bit = (tl.full([tile], 1, tl.int64) << (position % 32)).to(tl.uint32).to(tl.int32, bitcast=True)
        tl.atomic_or(words + position // 32, bit, mask=first)


@gpu.kernel
def _limit_and_divide(
    total: tl.tensor,
    count: int,
    divisor: float,
    most: float,
    out: tl.tensor,
    finite: tl.tensor,
    tile: tl.constexpr,
) -> None:
    kind: tl.constexpr = total.dtype.element_ty
    at = tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile)
    value = gpu_select.wide(tl.load(total + at, mask=at < count, other=0))
    if tl.sum((tl.abs(value) < most).to(tl.int32)) < tile:
        tl.store(finite, 0)
    value = tl.where(value == float("inf"), most, tl.where(value == float("-inf"), -most, value))
    value = tl.where(value == value, value, 0.0)  # noqa: PLR0124
    quotient = tl.math.div_rn(value, tl.zeros_like(value) + divisor)
    tl.store(out + at, gpu_select.narrow(quotient, kind), mask=at < count)
