"""Integer levels of blocks on a GPU; ``spardl.vector.levels`` describes them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from spardl.vector.kernels import gpu

__all__ = ["pack_levels", "read_levels"]

_TILE = 1024  # entries or bytes per program
_WARPS = 4
# 1.5 times the smallest number from which on float32 holds integers only: adding it rounds to an integer.
_HALF = 1.5 * 2.0**23


def pack_levels(values: Tensor, block: int, bits: int, leave: bool, scales: Tensor, packed: Tensor) -> None:
    """Quantizes entries to levels, block by block.

    Args:
        values: Finite float32 tensor of shape (n,), contiguous.
        block: Number of entries per block, at most as many as one Triton program can hold.
        bits: Bits per code: 8, 4 or 2.
        leave: Whether to replace ``values`` by their quantization errors.
        scales: Tensor to write the scales to, shape (ceil(n / block),).
        packed: uint8 tensor to write the packed codes to, shape (packed bytes,).
    """
    count, whole = values.numel(), bits == torch.uint8.itemsize * 8
    if not count:
        return
    codes = packed if whole else packed.new_empty(count)
    tile = triton.next_power_of_2(block)
    top = float(2 ** (bits - 1) - 1)
    gpu.launch(
        _quantize, (scales.numel(),), values, count, block, top, _HALF, scales, codes, leave, tile, num_warps=_WARPS
    )
    if not whole:
        size = packed.numel()
        gpu.launch(_pack, gpu.grid(size, _TILE), codes, count, size, packed, bits, _TILE, num_warps=_WARPS)


def read_levels(scales: Tensor, packed: Tensor, block: int, bits: int, values: Tensor, add: bool) -> None:
    """Decodes levels, and writes the values to ``values`` or adds them to it.

    Args:
        scales: Bytes of the float32 scales of the blocks, shape (4 * ceil(n / block),), aligned or not.
        packed: Packed codes as uint8, shape (packed bytes,).
        block: Number of entries per block.
        bits: Bits per code: 8, 4 or 2.
        values: float32 tensor of shape (n,) to write to, contiguous.
        add: Whether to add to ``values`` instead of overwriting them.
    """
    if count := values.numel():
        gpu.launch(
            _read,
            gpu.grid(count, _TILE),
            values,
            count,
            scales,
            packed,
            packed.numel(),
            block,
            float(2 ** (bits - 1) - 1),
            bits,
            add,
            _TILE,
            num_warps=_WARPS,
        )


@gpu.kernel
def _quantize(
    values: tl.tensor,
    count: int,
    block: int,
    top: float,
    half: float,
    scales: tl.tensor,
    codes: tl.tensor,
    leave: tl.constexpr,
    tile: tl.constexpr,
) -> None:
    """Quantizes one block."""
    number = tl.program_id(0).to(tl.int64)
    own = tl.arange(0, tile)
    at = number * block + own
    inside = (own < block) & (at < count)
    value = tl.load(values + at, mask=inside, other=0)
    scale = tl.max(tl.abs(value))
    tl.store(scales + number, scale)
    divisor = tl.where(scale > 0, scale, 1.0)
    level = tl.math.div_rn(value, tl.zeros_like(value) + divisor) * top
    level = (level + half) - half
    tl.store(codes + at, (level + top).to(tl.uint8), mask=inside)
    if leave:
        # Rounded like the decoded value, without fused multiply-add; adding +0 turns -0 into the +0 of a decoded level.
        share = tl.math.div_rn(level + 0.0, tl.zeros_like(value) + top)
        tl.store(values + at, value - share * scale, mask=inside)


@gpu.kernel
def _pack(codes: tl.tensor, count: int, size: int, packed: tl.tensor, bits: tl.constexpr, tile: tl.constexpr) -> None:
    at = tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile)
    byte = tl.zeros([tile], tl.int32)
    for place in tl.static_range(8 // bits):
        entry = at + place * tl.cast(size, tl.int64)
        code = tl.load(codes + entry, mask=(at < size) & (entry < count), other=0).to(tl.int32)
        byte |= code << (bits * place)
    tl.store(packed + at, byte.to(tl.uint8), mask=at < size)


@gpu.kernel
def _read(
    values: tl.tensor,
    count: int,
    scales: tl.tensor,
    packed: tl.tensor,
    size: int,
    block: int,
    top: float,
    bits: tl.constexpr,
    add: tl.constexpr,
    tile: tl.constexpr,
) -> None:
    at = tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile)
    inside = at < count
    place = at // size
    byte = tl.load(packed + at - place * size, mask=inside, other=0).to(tl.int32)
    code = (byte >> (place.to(tl.int32) * bits)) & ((1 << bits) - 1)
    level = code.to(tl.float32) - top
    first = scales + 4 * (at // block)
    raw = tl.load(first, mask=inside, other=0).to(tl.int32)
    for part in tl.static_range(1, 4):
        raw |= tl.load(first + part, mask=inside, other=0).to(tl.int32) << (8 * part)
    scale = raw.to(tl.float32, bitcast=True)
    value = tl.math.div_rn(level, tl.zeros_like(level) + top) * scale
    if add:
        value = tl.load(values + at, mask=inside, other=0) + value
    tl.store(values + at, value, mask=inside)
