"""Columns of thin matrices on a GPU; ``spardl.compressors.powersgd`` describes them."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from spardl.vector.kernels import gpu, gpu_select

__all__ = ["scaled"]

_TILE = 1024  # entries of a column that a program reads at once
_WARPS = 4


def scaled(factors: Tensor, old: Tensor | None = None) -> Tensor:
    """Divides each column by its largest magnitude, in one launch; a column of zeros stays.

    Args:
        factors: Matrices of shape (matrices, rows, columns), float32, bfloat16 or float16, contiguous.
        old: Tensor like ``factors`` (dtype and shape) whose columns replace those that are zero or contain a NaN;
            ``None`` to keep these.

    Returns:
        float32 tensor of the shape of ``factors``.
    """
    out = torch.empty_like(factors, dtype=torch.float32)
    matrices, rows, columns = factors.shape
    if out.numel():
        gpu.launch(_scale, (matrices * columns,), factors, old, rows, columns, out, _TILE, num_warps=_WARPS)
    return out


@gpu.kernel
def _scale(
    factors: tl.tensor, old: tl.tensor | None, rows: int, columns: int, out: tl.tensor, tile: tl.constexpr
) -> None:
    """Scales one column."""
    number = tl.program_id(0).to(tl.int64)
    first = number // columns * rows * columns + number % columns
    peak = _peak(factors + first, rows, columns, tile)
    renewed = peak == peak  # noqa: PLR0124
    if old is not None:
        renewed = peak > 0
        peak = tl.where(renewed, peak, _peak(old + first, rows, columns, tile))
    divisor = tl.where(peak == 0, 1.0, peak)
    for start in range(0, rows, tile):
        at = start + tl.arange(0, tile)
        inside, place = at < rows, first + at.to(tl.int64) * columns
        value = gpu_select.wide(tl.load(factors + place, mask=inside, other=0))
        if old is not None:
            value = tl.where(renewed, value, gpu_select.wide(tl.load(old + place, mask=inside, other=0)))
        tl.store(out + place, tl.math.div_rn(value, tl.zeros_like(value) + divisor), mask=inside)


@gpu.kernel
def _peak(column: tl.tensor, rows: int, columns: int, tile: tl.constexpr) -> tl.tensor:
    """Largest magnitude of a column; NaN if it contains one."""
    most = tl.zeros([tile], tl.float32)
    missing = tl.zeros([tile], tl.int32)
    for start in range(0, rows, tile):
        at = start + tl.arange(0, tile)
        value = gpu_select.wide(tl.load(column + at.to(tl.int64) * columns, mask=at < rows, other=0))
        most = tl.maximum(most, tl.abs(value))
        missing = missing | (value != value).to(tl.int32)  # noqa: PLR0124
    return tl.where(tl.max(missing) > 0, float("nan"), tl.max(most))
