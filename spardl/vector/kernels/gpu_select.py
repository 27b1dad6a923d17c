"""Exact selection on a GPU without reading a value on the host.

One pass over memory adds the gradient, clips overflows, and marks (sets a bit for) each entry that reaches the bound of
its range, in a bitmap of n/8 bytes. Later, one program (thread block) per range lists the marked entries, finds the
k-th largest magnitude among them digit by digit, writes the chosen positions in order, and derives the bound for the
next step. If fewer than k marked entries reach the bound, or too many are marked, the program compares the whole range
instead, so the result is always exact.

Magnitudes are compared as integers: the bits of a floating-point number without its sign increase with its magnitude.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from spardl.vector.bits import INTEGERS, integers_on
from spardl.vector.kernels import gpu

__all__ = [
    "NO_BOUND",
    "ROW",
    "add_and_mark",
    "edges_of",
    "finite_flags",
    "mark",
    "narrow",
    "select",
    "wide",
    "words_of",
]

NO_BOUND = 2**31 - 1
"""Bound that no entry reaches."""

ROW = 7
"""Number of columns in the table of ``select``."""

_TILE = 4096  # entries per program of the pass over memory
_LISTED = 2048  # candidates or words per iteration of the selection
_WARPS = 8
_END = 2**63 - 1
# Number of bits of a mantissa.
_MANTISSA = {torch.float32: 23, torch.bfloat16: 7, torch.float16: 10}


def words_of(length: int, device: torch.device) -> Tensor:
    """Allocates the bitmap (one bit per entry) for a vector of ``length`` entries: int32, shape (m,), not cleared."""
    return torch.empty(triton.cdiv(max(length, 1), _TILE) * (_TILE // 32), dtype=torch.int32, device=device)


def edges_of(ranges: Sequence[tuple[int, int]], device: torch.device) -> Tensor:
    """Copies starts and stops of r ordered, disjoint ranges to a device, between sentinels: int64, shape (2r + 2,)."""
    numbers = [-_END, *(edge for pair in ranges for edge in pair), _END]
    return integers_on(device, numbers)


def finite_flags(gradient: Tensor, spare: int = 0) -> Tensor:
    """Checks a gradient for non-finite entries.

    Args:
        gradient: Gradient of shape (n,), float32, bfloat16 or float16.
        spare: Number of further flags to allocate, for other purposes.

    Returns:
        Bool tensor of shape (2 + spare,). The first value is whether all entries are finite, all others are true. The
        first two are the ``flags`` of ``add_and_mark``.
    """
    flags = torch.ones(2 + spare, dtype=torch.bool, device=gradient.device)
    if gradient.numel():
        gpu.launch(
            _find_nonfinite,
            gpu.grid(gradient.numel(), _TILE),
            gradient,
            flags.view(torch.uint8),
            gradient.numel(),
            _TILE,
            num_warps=_WARPS,
        )
    return flags


def add_and_mark(
    memory: Tensor,
    gradient: Tensor | None,
    flags: Tensor | None,
    edges: Tensor,
    bounds: Tensor,
    words: Tensor,
    ranges: int,
) -> None:
    """Adds a gradient to a residual in place, and marks the entries that reach the bound of their range.

    Args:
        memory: Residual of shape (n,), float32, bfloat16 or float16, contiguous.
        gradient: Gradient like ``memory``, shape (n,), contiguous; ``None`` to add nothing.
        flags: Bool, shape (2,), from ``finite_flags``. If the first flag is false, nothing is added. If a sum
            overflows, it is clipped to just below the largest number, and the second flag becomes false. ``None`` to
            add without conditions.
        edges: Borders of the ranges from ``edges_of``: int64, shape (2r + 2,).
        bounds: Least magnitude to mark in each range, as the integer with the same bits: int32, shape (r,).
        words: Bitmap from ``words_of``, shape (m,); overwritten, and not used without ranges.
        ranges: Number of ranges, r.
    """
    limits = torch.finfo(memory.dtype)
    # Rounded to the dtype here, because the kernel gets a float32.
    most = float(torch.tensor(limits.max * (1 - limits.eps), dtype=memory.dtype))
    if memory.numel():
        gpu.launch(
            _add,
            gpu.grid(memory.numel(), _TILE),
            memory,
            gradient,
            None if flags is None else flags.view(torch.uint8),
            memory.numel(),
            edges,
            bounds,
            edges.numel() - 1,
            words if ranges else None,
            most,
            _TILE,
            num_warps=_WARPS,
        )


def mark(positions: Tensor, words: Tensor) -> None:
    """Sets the bits of ``positions`` (int64, shape (k,), may repeat) in the bitmap ``words``, shape (m,)."""
    if positions.numel():
        gpu.launch(_mark, gpu.grid(positions.numel(), 1024), positions, words, positions.numel(), 1024)


def select(
    values: Tensor, table: Tensor, words: Tensor, bounds: Tensor, following: Tensor, memo: Tensor, scratch: Tensor,
    positions: Tensor,
) -> None:  # fmt: skip
    """Finds the largest entries of some ranges; ties go to the lowest positions.

    Args:
        values: Vector of shape (n,), n below 2^31, without NaN; contiguous.
        table: One row per range, int64, shape (r, ROW): start, stop, k, offset in ``positions``, index of its bound (-1
            if the range has no marks), offset in ``scratch``, and number of entries in ``scratch``.
        words: Bitmap of the marked entries, shape (m,).
        bounds: Bounds that the marked entries reach, as integers: int32, shape (b,).
        following: Tensor like ``bounds``, shape (b,), for the bounds of the next step.
        memo: State of the adaptation of the bounds, kept from step to step: int32, shape (b, 2), initially 0.
        scratch: int32 tensor of shape (s,) for lists of marked entries.
        positions: int64 tensor of shape (sum of k,), written range by range, increasing within each.
    """
    gpu.launch(
        _select,
        (len(table),),
        values.view(INTEGERS[values.itemsize]),
        table,
        words,
        bounds,
        following,
        memo,
        scratch,
        positions,
        values.itemsize,
        1 << _MANTISSA[values.dtype],
        ROW,
        False,
        _LISTED,
        num_warps=_WARPS,
    )


def select_from_all(values: Tensor, k: int, table: Tensor) -> Tensor:
    """Finds the k largest entries of a vector of magnitudes; negative entries are never selected.

    Args:
        values: Vector of shape (n,), n below 2^31, with at least k entries that are not negative.
        k: Number of entries, at least 1.
        table: Result of ``table_of_all`` for the same numbers: int64, shape (1, ROW).

    Returns:
        int64 positions of shape (k,), increasing; ties go to the lowest positions.
    """
    positions = torch.empty(k, dtype=torch.int64, device=values.device)
    raw, none = values.view(INTEGERS[values.itemsize]), positions[:0].view(torch.int32)
    gpu.launch(
        _select,
        (1,),
        raw,
        table,
        none,
        none,
        none,
        none,
        none,
        positions,
        values.itemsize,
        1,
        ROW,
        True,
        _LISTED,
        num_warps=_WARPS,
    )
    return positions


@lru_cache(maxsize=256)
def table_of_all(length: int, k: int, device: torch.device, stream: int) -> Tensor:
    """Returns the table of ``select_from_all`` for a whole vector, cached for a ``stream``: int64, shape (1, ROW)."""
    return integers_on(device, [[0, length, k, 0, -1, 0, 0]])


@gpu.kernel
def wide(stored: tl.tensor) -> tl.tensor:
    """Converts entries of the vector's dtype (float32, bfloat16 or float16) to float32."""
    value = stored
    if stored.dtype == tl.bfloat16:
        value = (stored.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    elif stored.dtype == tl.float16:
        value = stored.to(tl.float32)
    return value


@gpu.kernel
def narrow(value: tl.tensor, kind: tl.constexpr) -> tl.tensor:
    """Rounds float32 numbers to the dtype ``kind``: to nearest, ties to even."""
    stored = value
    if kind == tl.bfloat16:
        stored, _ = gpu.rounded(value, kind)
    elif kind == tl.float16:
        stored = value.to(tl.float16)
    return stored


@gpu.kernel
def _find_nonfinite(gradient: tl.tensor, flags: tl.tensor, length: int, tile: tl.constexpr) -> None:
    at = tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile)
    finite = tl.abs(wide(tl.load(gradient + at, mask=at < length, other=0))) < float("inf")
    if tl.sum(finite.to(tl.int32)) < tile:
        tl.store(flags, 0)


@gpu.kernel
def _add(
    memory: tl.tensor,
    gradient: tl.tensor | None,
    flags: tl.tensor | None,
    length: int,
    edges: tl.tensor,
    bounds: tl.tensor,
    segments: int,
    words: tl.tensor | None,
    most: float,
    tile: tl.constexpr,
) -> None:
    """Adds one tile and marks its entries. Segment i starts at ``edges[i]``; segments with odd numbers are ranges."""
    start = tl.program_id(0).to(tl.int64) * tile
    at = start + tl.arange(0, tile)
    inside = at < length
    kind: tl.constexpr = memory.dtype.element_ty
    stored = tl.load(memory + at, mask=inside, other=0)
    if gradient is not None:
        total = narrow(wide(stored) + wide(tl.load(gradient + at, mask=inside, other=0)), kind)
        stored = total if flags is None else tl.where(tl.load(flags) != 0, total, stored)
    if flags is not None:
        value = wide(stored)
        if tl.sum((tl.abs(value) < float("inf")).to(tl.int32)) < tile:
            tl.store(flags + 1, 0)
        value = tl.where(value == float("inf"), most, tl.where(value == float("-inf"), -most, value))
        stored = narrow(tl.where(value == value, value, 0.0), kind)  # noqa: PLR0124
    if gradient is not None or flags is not None:
        tl.store(memory + at, stored, mask=inside)
    if words is not None:
        if kind == tl.float32:
            key = stored.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        else:
            key = stored.to(tl.int16, bitcast=True).to(tl.int32) & 0x7FFF
        _mark_tile(tl.where(inside, key, -1), start, edges, bounds, segments, words, tile)


@gpu.kernel
def _mark_tile(
    key: tl.tensor,
    start: tl.tensor,
    edges: tl.tensor,
    bounds: tl.tensor,
    segments: int,
    words: tl.tensor,
    tile: tl.constexpr,
) -> None:
    """Marks the entries of a tile that starts at ``start`` and has the magnitudes ``key``."""
    stop = start + tile
    segment = gpu.segment_at(edges, segments, start)
    bits = _marked(key, bounds, segment, tile)
    edge = tl.load(edges + segment + 1)
    first = start + 32 * tl.arange(0, tile // 32)
    while edge < stop:  # a tile across edges: each further segment decides the bits after its start
        segment += 1
        settled = gpu.below(edge - first)
        behind = _marked(key, bounds, segment, tile)
        bits = behind ^ ((bits ^ behind) & settled)
        edge = tl.load(edges + segment + 1)
    tl.store(words + first // 32, bits.to(tl.int32, bitcast=True))


@gpu.kernel
def _marked(key: tl.tensor, bounds: tl.tensor, segment: tl.tensor, tile: tl.constexpr) -> tl.tensor:
    """One bit per entry that reaches the bound of a segment, shape (tile / 32,)."""
    is_range = segment % 2 == 1
    bound = tl.load(bounds + segment // 2, mask=is_range, other=2**31 - 1)
    return gpu.packed(key, bound, tile)


@gpu.kernel
def _mark(positions: tl.tensor, words: tl.tensor, count: int, tile: tl.constexpr) -> None:
    at = tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile)
    place = tl.load(positions + at, mask=at < count, other=0)
    bit = (tl.full([tile], 1, tl.int64) << (place % 32)).to(tl.uint32).to(tl.int32, bitcast=True)
    tl.atomic_or(words + place // 32, bit, mask=at < count, sem="relaxed")  # read by the next launch


@gpu.kernel
def _key(values: tl.tensor, position: tl.tensor, inside: tl.tensor, width: tl.constexpr) -> tl.tensor:
    """Magnitudes as integers."""
    bits = tl.load(values + position, mask=inside, other=0).to(tl.int32)
    return bits & (0x7FFFFFFF if width == 4 else 0x7FFF)


@gpu.kernel
def _key_or_none(
    values: tl.tensor, position: tl.tensor, inside: tl.tensor, width: tl.constexpr, skips: tl.constexpr
) -> tl.tensor:
    """Magnitudes as integers; -1 for negative entries that are not compared."""
    key = _key(values, position, inside, width)
    if skips:
        key = tl.where(tl.load(values + position, mask=inside, other=0) < 0, -1, key)
    return key


@gpu.kernel
def _place(scratch: tl.tensor, at: tl.tensor, inside: tl.tensor, start: tl.tensor, listed: tl.tensor) -> tl.tensor:
    """Position of each entry to compare: in the list, or in the whole range."""
    return tl.where(listed, tl.load(scratch + at, mask=inside & listed, other=0).to(tl.int64), start + at)


@gpu.kernel
def _list(
    words: tl.tensor, start: tl.tensor, stop: tl.tensor, scratch: tl.tensor, room: tl.tensor, tile: tl.constexpr
) -> tl.tensor:
    """Lists the marked entries of a range; returns their number, which may exceed ``room``."""
    count = start * 0
    last = (stop + 31) // 32
    for first in range(start // 32, last, tile):
        at = first + tl.arange(0, tile)
        word = tl.load(words + at, mask=at < last, other=0).to(tl.uint32, bitcast=True)
        word = word & (gpu.below(stop - at * 32) ^ gpu.below(start - at * 32))
        number = gpu.ones(word)
        place = count + tl.cumsum(number, 0) - number
        for _ in range(tl.max(number)):  # each iteration takes the lowest bit of every word
            lowest = gpu.ones((word - 1) ^ (word & (word - 1)))
            tl.store(scratch + place, (at * 32 + lowest).to(tl.int32), mask=(word != 0) & (place < room))
            word = word & (word - 1)
            place += 1
        count += tl.sum(number)
    return count


@gpu.kernel
def _reaching(
    values: tl.tensor, scratch: tl.tensor, count: tl.tensor, bound: tl.tensor, width: tl.constexpr, tile: tl.constexpr
) -> tl.tensor:
    """Number of listed entries that reach a bound."""
    reached = count * 0
    for first in range(0, count, tile):
        at = first + tl.arange(0, tile)
        inside = at < count
        position = tl.load(scratch + at, mask=inside, other=0).to(tl.int64)
        reached += tl.sum((inside & (_key(values, position, inside, width) >= bound)).to(tl.int32))
    return reached


@gpu.kernel
def _smallest(
    values: tl.tensor,
    scratch: tl.tensor,
    start: tl.tensor,
    listed: tl.tensor,
    size: tl.tensor,
    k: tl.tensor,
    width: tl.constexpr,
    skips: tl.constexpr,
    tile: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Finds the k-th largest magnitude, eight bits at a time; also returns how many entries equal to it are wanted."""
    remaining = k
    cut = tl.zeros([1], tl.int32)
    bins = tl.arange(0, 512)
    for step in tl.static_range(width):
        shift = 8 * (width - 1 - step)
        histogram = tl.zeros([512], tl.int32)
        for first in range(0, size, tile):
            at = first + tl.arange(0, tile)
            inside = at < size
            key = _key_or_none(values, _place(scratch, at, inside, start, listed), inside, width, skips)
            inside &= key >= 0
            if step > 0:
                inside &= (key >> (shift + 8)) == (cut >> (shift + 8))
            histogram += tl.histogram(tl.where(inside, (key >> shift) & 255, 256), 512)
        histogram = tl.where(bins < 256, histogram, 0)
        reaching = tl.sum(histogram) - tl.cumsum(histogram, 0) + histogram
        digit = tl.max(tl.where((bins < 256) & (reaching >= remaining), bins, 0))
        remaining -= tl.sum(tl.where(bins > digit, histogram, 0))
        cut |= digit << shift
    return cut, remaining


@gpu.kernel
def _store_bound(
    following: tl.tensor,
    memo: tl.tensor,
    number: tl.tensor,
    smallest: tl.tensor,
    k: tl.tensor,
    reached: tl.tensor,
    listed: tl.tensor,
    fits: tl.tensor,
    unit: tl.constexpr,
) -> None:
    """Derives the bound for the next step."""
    slack = tl.load(memo + 2 * number)
    before = tl.load(memo + 2 * number + 1)
    # As in ``spardl.vector.candidates``, with differences of integers instead of ratios.
    factor = tl.where(listed, 1.0, tl.where(fits, 3.0, 0.4))
    factor = tl.where(listed & (2 * reached > 3 * k), 0.8, tl.where(listed & (5 * reached < 6 * k), 1.15, factor))
    adapted = (slack.to(tl.float32) * factor).to(tl.int32)
    slack = tl.where(before == 0, unit // 20, tl.maximum(tl.minimum(adapted, unit // 5), unit // 8192 + 1))
    change = tl.maximum(tl.minimum(smallest - before, unit), -unit)
    change = tl.where(before == 0, 0, (change.to(tl.float32) * 0.6).to(tl.int32))
    # Added in 64 bits: the largest magnitudes are near the end of the integers.
    bound = tl.minimum(tl.maximum(smallest.to(tl.int64) + change - slack, 1), 2**31 - 2)
    tl.store(following + number, bound.to(tl.int32))
    tl.store(memo + 2 * number, slack)
    tl.store(memo + 2 * number + 1, smallest)


@gpu.kernel
def _select(
    values: tl.tensor,
    table: tl.tensor,
    words: tl.tensor,
    bounds: tl.tensor,
    following: tl.tensor,
    memo: tl.tensor,
    scratch: tl.tensor,
    positions: tl.tensor,
    width: tl.constexpr,
    unit: tl.constexpr,
    columns: tl.constexpr,
    skips: tl.constexpr,
    tile: tl.constexpr,
) -> None:
    """Selects the entries of one range."""
    row = table + tl.program_id(0) * columns
    start = tl.load(row)
    stop = tl.load(row + 1)
    k = tl.load(row + 2)
    own_positions = positions + tl.load(row + 3)
    number = tl.load(row + 4)
    own = scratch + tl.load(row + 5)
    room = tl.load(row + 6)
    count = start * 0
    reached = start * 0
    if number >= 0:
        count = _list(words, start, stop, own, room, tile)
        tl.debug_barrier()  # the list was written by other threads
        if count <= room:
            reached = _reaching(values, own, count, tl.load(bounds + number), width, tile)
    listed = (number >= 0) & (count <= room) & (reached >= k)
    size = tl.where(listed, count, stop - start)
    cut, remaining = _smallest(values, own, start, listed, size, k, width, skips, tile)
    written = start * 0
    ties = start * 0
    for first in range(0, size, tile):
        at = first + tl.arange(0, tile)
        inside = (at < size) & (k > 0)
        position = _place(own, at, inside, start, listed)
        key = _key_or_none(values, position, inside, width, skips)
        tie = (inside & (key == cut)).to(tl.int32)
        chosen = (inside & (key > cut)) | ((tie == 1) & (ties + tl.cumsum(tie, 0) <= remaining))
        one = chosen.to(tl.int32)
        tl.store(own_positions + written + tl.cumsum(one, 0) - one, position, mask=chosen)
        written += tl.sum(one)
        ties += tl.sum(tie)
    if (number >= 0) & (k > 0):
        fits = count <= room
        _store_bound(following, memo, number, tl.max(cut), k, reached, listed, fits, unit)
