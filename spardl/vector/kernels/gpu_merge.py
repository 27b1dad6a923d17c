"""Sums of sparse vectors on a GPU with results of fixed sizes; ``spardl.vector.sparse`` describes padded vectors."""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate

import torch
import triton.language as tl
from torch import Tensor

from spardl.vector.bits import INTEGERS, integers_on
from spardl.vector.kernels import gpu, gpu_select

__all__ = ["ends_of", "magnitudes", "merge", "split", "write_others"]

_TILE = 1024  # entries per program
_WARPS = 4


@lru_cache(maxsize=256)
def ends_of(counts: tuple[int, ...], device: torch.device, stream: int) -> Tensor:
    """Returns the cumulative sums of ``counts`` from 0 on: int64, shape (vectors + 1,), cached for a ``stream``."""
    return integers_on(device, list(accumulate(counts, initial=0)))


def merge(indices: Tensor, values: Tensor, counts: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Sums sparse vectors; each entry is summed from +0 and in the order of the vectors.

    Args:
        indices: Concatenated int64 indices of all vectors, shape (m,), strictly increasing in each.
        values: Their values, shape (m,), float32, bfloat16 or float16, finite.
        counts: Number of entries of each vector.

    Returns:
        Indices, in increasing order, and sums, shape (m,) each. An index of several vectors is repeated, each time with
        its sum. A sum that overflows becomes the largest number of the dtype.
    """
    out = torch.empty_like(indices), torch.empty_like(values)
    if total := indices.numel():
        gpu.launch(
            _merge,
            gpu.grid(total, _TILE),
            indices,
            values,
            total,
            ends_of(counts, indices.device, gpu.stream_of(indices.device)),
            max(counts).bit_length(),
            *out,
            float(torch.finfo(values.dtype).max),
            len(counts),
            _TILE,
            num_warps=_WARPS,
        )
    return out


def magnitudes(indices: Tensor, values: Tensor) -> Tensor:
    """Returns the magnitudes of values; -1 for each entry whose index repeats that of the entry before.

    Args:
        indices: int64 indices of shape (m,), increasing.
        values: Their values, shape (m,), float32, bfloat16 or float16.

    Returns:
        Tensor like ``values``, shape (m,).
    """
    out = torch.empty_like(values)
    if count := indices.numel():
        gpu.launch(_magnitudes, gpu.grid(count, _TILE), indices, values, count, out, _TILE, num_warps=_WARPS)
    return out


def split(indices: Tensor, values: Tensor, places: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Splits a padded vector into the entries to keep and all others.

    Args:
        indices: int64 indices of shape (m,), increasing; each occurs at most twice.
        values: Tensor of shape (m,), equal for equal indices.
        places: Places to keep: int64, shape (k,), strictly increasing, none of a repeated index.

    Returns:
        Indices and values of the kept entries, shape (k,), and of the others, shape (m - k,). If one of the others
        repeats a kept entry, its value is -0.
    """
    count, k = indices.numel(), places.numel()
    out = [like.new_empty(number) for number in (k, count - k) for like in (indices, values)]
    if count:
        raw = INTEGERS[values.itemsize]
        gpu.launch(
            _split,
            gpu.grid(count, _TILE),
            indices,
            values.view(raw),
            places,
            count,
            k,
            k.bit_length(),
            *(each.view(raw) if each.is_floating_point() else each for each in out),
            torch.iinfo(raw).min,
            _TILE,
            num_warps=_WARPS,
        )
    return out[0], out[1], out[2], out[3]


def write_others(values: Tensor, positions: Tensor, new: Tensor | None, final: Tensor) -> None:
    """Overwrites the entries at some positions, except at positions that are in the final result.

    Args:
        values: Vector of shape (n,), modified in place.
        positions: int64 positions of shape (m,), distinct.
        new: New entries like ``values``, shape (m,); ``None`` for zeros.
        final: int64 positions of shape (l,), increasing, possibly repeated.
    """
    if count := positions.numel():
        gpu.launch(
            _write_others,
            gpu.grid(count, _TILE),
            values,
            positions,
            new,
            count,
            final,
            final.numel(),
            final.numel().bit_length(),
            _TILE,
            num_warps=_WARPS,
        )


@gpu.kernel
def _first_from(
    numbers: tl.tensor, count: tl.tensor, wanted: tl.tensor, inside: tl.tensor, steps: tl.tensor
) -> tl.tensor:
    """Number of entries below ``wanted`` among increasing ``numbers``."""
    lower = tl.zeros_like(wanted)
    upper = lower + count
    for _ in range(steps):
        middle = (lower + upper) // 2
        active = inside & (lower < upper)
        number = tl.load(numbers + middle, mask=active, other=0)
        lower = tl.where(active & (number < wanted), middle + 1, lower)
        upper = tl.where(active & (number >= wanted), middle, upper)
    return lower


@gpu.kernel
def _is_at(numbers: tl.tensor, count: tl.tensor, place: tl.tensor, wanted: tl.tensor, inside: tl.tensor) -> tl.tensor:
    """Whether the number at ``place`` exists and is the wanted one."""
    present = inside & (place < count)
    return present & (tl.load(numbers + place, mask=present, other=-1) == wanted)


@gpu.kernel
def _merge(
    indices: tl.tensor,
    values: tl.tensor,
    total: int,
    ends: tl.tensor,
    steps: int,
    out_indices: tl.tensor,
    out_values: tl.tensor,
    most: float,
    vectors: tl.constexpr,
    tile: tl.constexpr,
) -> None:
    kind: tl.constexpr = values.dtype.element_ty
    at = tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile)
    inside = at < total
    index = tl.load(indices + at, mask=inside, other=0)
    own = tl.zeros_like(at)
    for other in range(1, vectors):
        own += tl.where(at >= tl.load(ends + other), 1, 0)
    place = at - tl.load(ends + own)
    sums = tl.zeros([tile], tl.float32)
    for other in range(vectors):
        begin = tl.load(ends + other)
        count = tl.load(ends + other + 1) - begin
        first = _first_from(indices + begin, count, index, inside, steps)
        present = _is_at(indices + begin, count, first, index, inside)
        value = gpu_select.wide(tl.load(values + begin + first, mask=present, other=0))
        # Every partial sum is rounded, as sums of torch are.
        sums = tl.where(present, gpu_select.wide(gpu_select.narrow(sums + value, kind)), sums)
        # Equal indices are in the order of their vectors.
        before = first + tl.where(present & (own > other), 1, 0)
        place += tl.where(own == other, 0, before)
    sums = tl.where(sums == float("inf"), most, tl.where(sums == float("-inf"), -most, sums))
    sums = tl.where(sums == sums, sums, 0.0)  # noqa: PLR0124
    tl.store(out_indices + place, index, mask=inside)
    tl.store(out_values + place, gpu_select.narrow(sums, kind), mask=inside)


@gpu.kernel
def _magnitudes(indices: tl.tensor, values: tl.tensor, count: int, out: tl.tensor, tile: tl.constexpr) -> None:
    kind: tl.constexpr = values.dtype.element_ty
    at = tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile)
    inside = at < count
    index = tl.load(indices + at, mask=inside, other=0)
    repeated = tl.load(indices + at - 1, mask=inside & (at > 0), other=-1) == index
    value = tl.abs(gpu_select.wide(tl.load(values + at, mask=inside, other=0)))
    tl.store(out + at, gpu_select.narrow(tl.where(repeated, -1.0, value), kind), mask=inside)


@gpu.kernel
def _split(
    indices: tl.tensor,
    values: tl.tensor,
    places: tl.tensor,
    count: int,
    k: int,
    steps: int,
    kept_indices: tl.tensor,
    kept_values: tl.tensor,
    other_indices: tl.tensor,
    other_values: tl.tensor,
    negative_zero: int,
    tile: tl.constexpr,
) -> None:
    """Splits values as integers of their size, so that -0 keeps its sign."""
    at = tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile)
    inside = at < count
    index = tl.load(indices + at, mask=inside, other=0)
    value = tl.load(values + at, mask=inside, other=0)
    before = _first_from(places, k, at, inside, steps)
    kept = _is_at(places, k, before, at, inside)
    tl.store(kept_indices + before, index, mask=kept)
    tl.store(kept_values + before, value, mask=kept)
    # An index occurs at most twice, so a repeated entry follows the one that was compared.
    follows = inside & (before > 0)
    follows &= tl.load(places + before - 1, mask=follows, other=-1) == at - 1
    repeats = follows & (tl.load(indices + at - 1, mask=follows, other=-1) == index)
    rest = tl.where(repeats, tl.cast(negative_zero, value.dtype), value)
    tl.store(other_indices + at - before, index, mask=inside & (kept == 0))
    tl.store(other_values + at - before, rest, mask=inside & (kept == 0))


@gpu.kernel
def _write_others(
    values: tl.tensor,
    positions: tl.tensor,
    new: tl.tensor | None,
    count: int,
    final: tl.tensor,
    others: int,
    steps: int,
    tile: tl.constexpr,
) -> None:
    at = tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile)
    inside = at < count
    position = tl.load(positions + at, mask=inside, other=0)
    first = _first_from(final, others, position, inside, steps)
    found = _is_at(final, others, first, position, inside)
    entry = tl.zeros([tile], values.dtype.element_ty)
    if new is not None:
        entry = tl.load(new + at, mask=inside, other=0)
    tl.store(values + position, entry, mask=inside & (found == 0))
