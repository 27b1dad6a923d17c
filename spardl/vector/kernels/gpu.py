"""Selection with a reused threshold on a GPU: one pass over memory adds the gradient and marks large entries.

Memory traffic limits such a step: it reads the gradient, and reads and writes the residual. Selection should not read
any entry again. The pass that adds therefore writes one bit per entry (1/32 of a float32 vector) and the number of set
bits in each tile. The prefix sums of these numbers say where in the result each tile's positions begin. The result is
in vector order without sorting. Programs (thread blocks, in Triton's terms) do not wait for each other, and results are
reproducible, because there are no atomic operations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["add_and_list", "below", "grid", "kernel", "launch", "ones", "packed", "rounded", "segment_at", "stream_of"]

_TILE = 4096  # entries per program: 16 per thread and vector, enough loads in flight with a few programs per SM
_GROUP = 8  # tiles whose bits one program turns into positions: one tile has only 512 bytes of bits
_WARPS = 8
_EXACT = False  # disables fused multiply-add; passing it explicitly avoids a Triton warning
_END = 2**63 - 1  # end of the last segment, after all positions


def add_and_list(
    memory: Tensor,
    gradient: Tensor | None,
    starts: Sequence[int],
    stops: Sequence[int],
    bounds: Sequence[float],
    capacity: int,
) -> tuple[Tensor, list[int]]:
    """Adds a gradient to a residual in place, and lists the entries of some ranges that reach a magnitude.

    The sum is bit-identical to ``memory.add_(gradient)``. Entries outside all ranges are added as well, but not listed.
    Infinities are listed, NaNs are not. The host waits for the device once, to read the counts. When this function
    returns, the kernel that writes the positions may still be running on the current stream. Scratch space is n/8
    bytes.

    Args:
        memory: float32, bfloat16 or float64 GPU tensor of shape (n,), contiguous; modified in place.
        gradient: Tensor like ``memory``, shape (n,); ``None`` to add nothing.
        starts: Starts of the ranges, which are in order and do not overlap.
        stops: Ends of the ranges, exclusive.
        bounds: Least magnitude to list for each range, exactly representable in the dtype of ``memory``.
        capacity: Maximum number of positions in all ranges together.

    Returns:
        The listed positions as int64, shape (found,), strictly increasing, and the number of positions in each range. A
        range with more entries than the capacity left by earlier ranges has the number -1 and no positions.
    """
    with torch.cuda.device_of(memory):
        tiles = triton.cdiv(memory.numel(), _TILE)
        edges = _on(memory, [-_END, *(edge for both in zip(starts, stops, strict=True) for edge in both), _END])
        words, before = _add(memory, gradient, edges, bounds, tiles)
        hits = torch.empty(2 * len(starts), dtype=torch.int64, device=memory.device)
        if hits.numel():
            _count_below[(hits.numel(),)](
                words, before, tiles, edges, hits, _TILE, num_warps=1, enable_fp_fusion=_EXACT
            )
        return _positions(words, before, starts, stops, hits.tolist(), capacity)


def _on(memory: Tensor, numbers: list[int] | list[float], dtype: torch.dtype = torch.int64) -> Tensor:
    """Copies a table to the device of ``memory``. From pageable memory, this neither races nor blocks the host."""
    return torch.tensor(numbers, dtype=dtype).to(memory.device, non_blocking=True)


def _add(
    memory: Tensor, gradient: Tensor | None, edges: Tensor, bounds: Sequence[float], tiles: int
) -> tuple[Tensor, Tensor]:
    """Runs the kernel that adds and marks entries.

    Returns:
        One bit per entry, int32, shape (tiles * _TILE / 32,), and the number of set bits before each tile and in
        total, int64, shape (tiles + 1,).
    """
    # The edges of the ranges split the vector into segments: alternating gaps and ranges, some of them empty. Gaps, and
    # positions after the end of the vector, have the bound NaN, which no entry reaches.
    nan = float("nan")
    by_segment = [nan, *(bound for both in ((bound, nan) for bound in bounds) for bound in both)]
    wide = torch.float64 if memory.dtype == torch.float64 else torch.float32
    words = torch.empty(tiles * (_TILE // 32), dtype=torch.int32, device=memory.device)
    counts = torch.zeros(tiles + 1, dtype=torch.int32, device=memory.device)
    if tiles:
        _add_tile[(tiles,)](
            memory,
            gradient,
            memory.numel(),
            edges,
            _on(memory, by_segment, wide),
            len(by_segment),
            words,
            counts[1:],
            _TILE,
            num_warps=_WARPS,
            enable_fp_fusion=_EXACT,
        )
    return words, counts.cumsum(0)


def _positions(
    words: Tensor, before: Tensor, starts: Sequence[int], stops: Sequence[int], hits: list[int], capacity: int
) -> tuple[Tensor, list[int]]:
    """Turns bits into positions, for all ranges that fit.

    Args:
        words: One bit per entry.
        before: Number of set bits before each tile, and in total.
        starts: Starts of the ranges.
        stops: Ends of the ranges.
        hits: Number of set bits before each start and stop, range by range.
        capacity: Maximum number of positions.

    Returns:
        The positions, and the number of positions in each range, or -1.
    """
    tiles, counts, used = len(before) - 1, [], 0
    for index in range(len(starts)):
        count = hits[2 * index + 1] - hits[2 * index]
        counts.append(count if used + count <= capacity else -1)
        used += max(counts[-1], 0)
    positions = torch.empty(used, dtype=torch.int64, device=words.device)
    listed = 0
    # Adjacent ranges that fit share one launch: no bits are set in the gaps between them.
    for fits, members in groupby(range(len(counts)), key=lambda index: counts[index] >= 0):
        first, *others = members
        last = others[-1] if others else first
        if not fits or hits[2 * first] == hits[2 * last + 1]:
            continue
        lower, upper = starts[first], stops[last]
        offset = lower // (_GROUP * _TILE)
        _list_group[(triton.cdiv(upper, _GROUP * _TILE) - offset,)](
            words,
            before,
            tiles,
            offset,
            lower,
            upper,
            hits[2 * first],
            positions[listed:],
            _TILE,
            _GROUP,
            enable_fp_fusion=_EXACT,
        )
        listed += hits[2 * last + 1] - hits[2 * first]
    return positions, counts


def launch(function: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Launches a kernel on the current stream of the device of its first argument.

    Args:
        function: Function decorated with ``kernel``.
        grid: Number of programs (thread blocks) along each axis.
        *arguments: Arguments of the kernel, the first one a tensor of any shape.
        **options: Options of the launch, such as ``num_warps``.
    """
    with torch.cuda.device_of(arguments[0]):
        function[grid](*arguments, enable_fp_fusion=_EXACT, **options)


def grid(count: int, tile: int) -> tuple[int, ...]:
    """Returns the number of programs for ``count`` entries with ``tile`` entries each, for ``launch``."""
    return (triton.cdiv(count, tile),)


def stream_of(device: torch.device) -> int:
    """Returns a number that identifies the current stream of ``device``; 0 for devices without streams.

    A tensor that is cached for several steps is complete only for launches on the stream that copied it.
    """
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def kernel(function: Callable[..., object]) -> Any:
    """Compiles a function for the device at its first launch.

    Args:
        function: Kernel in Triton's language. It is not compiled again for each value of parameters that are annotated
            as ``int``.

    Returns:
        The kernel, for ``launch``.
    """
    # Specialization on integers (equal to 1, multiple of 16) would recompile the kernel: they differ from call to call.
    integers = [name for name, kind in function.__annotations__.items() if kind == "int"]
    return triton.jit(function, do_not_specialize=integers)


@kernel
def _add_tile(
    memory: tl.tensor,
    gradient: tl.tensor | None,
    length: int,
    edges: tl.tensor,
    bounds: tl.tensor,
    segments: int,
    words: tl.tensor,
    counts: tl.tensor,
    tile: tl.constexpr,
) -> None:
    """Adds one tile; stores its bits and their number. Segment i starts at ``edges[i]``."""
    number = tl.program_id(0)
    start = number.to(tl.int64) * tile
    stop = start + tile
    at = start + tl.arange(0, tile)
    wide: tl.constexpr = bounds.dtype.element_ty
    # Only full tiles avoid the mask, which may end anywhere and would prevent 16-byte loads.
    if stop <= length:
        magnitude = _added(memory, gradient, at, None, wide)
    else:
        magnitude = _added(memory, gradient, at, at < length, wide)
    segment = segment_at(edges, segments, start)
    bits = packed(magnitude, tl.load(bounds + segment), tile)
    edge = tl.load(edges + segment + 1)
    first = start + 32 * tl.arange(0, tile // 32)
    while edge < stop:  # a tile across edges: each further segment decides the bits after its start
        segment += 1
        settled = below(edge - first)
        behind = packed(magnitude, tl.load(bounds + segment), tile)
        bits = behind ^ ((bits ^ behind) & settled)  # avoids ~, which fails for unsigned numbers in the interpreter
        edge = tl.load(edges + segment + 1)
    tl.store(words + first // 32, bits.to(tl.int32, bitcast=True))
    tl.store(counts + number, tl.sum(ones(bits)))


@kernel
def segment_at(edges: tl.tensor, segments: int, start: tl.tensor) -> tl.tensor:
    """Finds the number of the segment that contains a position; segment i starts at ``edges[i]``."""
    segment = 0
    beyond = segments
    while beyond - segment > 1:
        middle = (segment + beyond) // 2
        is_left = tl.load(edges + middle) <= start
        segment = tl.where(is_left, middle, segment)
        beyond = tl.where(is_left, beyond, middle)
    return segment


@kernel
def _added(
    memory: tl.tensor, gradient: tl.tensor | None, at: tl.tensor, inside: tl.tensor | None, wide: tl.constexpr
) -> tl.tensor:
    """Adds in place; returns the stored magnitudes in the dtype of the bounds."""
    stored = tl.load(memory + at, mask=inside)
    value = _widened(stored, wide)
    if gradient is not None:
        stored, value = rounded(value + _widened(tl.load(gradient + at, mask=inside), wide), stored.dtype)
        tl.store(memory + at, stored, mask=inside)
    return tl.abs(value)


@kernel
def _widened(stored: tl.tensor, wide: tl.constexpr) -> tl.tensor:
    """Converts a value to the dtype of the bounds."""
    value = stored
    if stored.dtype != wide:
        value = (stored.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(wide, bitcast=True)
    return value


@kernel
def rounded(value: tl.tensor, narrow: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Rounds a sum to the dtype ``narrow`` of the memory; returns it in that dtype and in the dtype of the sum."""
    # bfloat16 is rounded in integer arithmetic, because Triton's interpreter rounds conversions differently from a GPU
    # and the tests run in the interpreter. Adding 0x7FFF, plus 1 if the last kept bit is set, carries into that bit
    # exactly where rounding to nearest, ties to even, goes up. NaNs are kept: the carry would destroy them.
    stored = value
    if value.dtype != narrow:
        raw = value.to(tl.uint32, bitcast=True)
        raw = tl.where(value == value, raw + 0x7FFF + ((raw >> 16) & 1), 0x7FC00000) & 0xFFFF0000  # noqa: PLR0124
        stored = (raw >> 16).to(tl.uint16).to(narrow, bitcast=True)
        value = raw.to(value.dtype, bitcast=True)
    return stored, value


@kernel
def packed(magnitude: tl.tensor, bound: tl.tensor, tile: tl.constexpr) -> tl.tensor:
    """One bit per entry that reaches the bound, shape (tile / 32,); the lowest bit of the first word comes first."""
    rows = tl.reshape(magnitude >= bound, [tile // 32, 32])
    return tl.sum(rows.to(tl.uint32) << tl.arange(0, 32).to(tl.uint32)[None, :], axis=1)


@kernel
def ones(word: tl.tensor) -> tl.tensor:
    """Number of set bits in each 32-bit word, as int32. Source: Warren, Hacker's Delight, 2nd edition, section 5-1."""
    word = word - ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F
    word = word + (word >> 8)
    return ((word + (word >> 16)) & 63).to(tl.int32)


@kernel
def below(bit: tl.tensor) -> tl.tensor:
    """Returns a 32-bit word in which the bits below number ``bit`` are set; ``bit`` may be negative or above 31."""
    # In 64 bits, because a shift by 32 is undefined in a 32-bit word.
    one = tl.full([1], 1, tl.int64)
    return ((one << tl.minimum(tl.maximum(bit, 0), 32)) - 1).to(tl.uint32)


@kernel
def _bits(
    words: tl.tensor, first: tl.tensor, tiles: int, size: tl.constexpr, tile: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Loads words from ``first`` on, 0 after the last tile; returns them and the position of their first bits."""
    # Declared non-contiguous like the positions. Otherwise, threads would hold neighboring words, for wide loads of few
    # bytes, and exchange them at every store.
    at = tl.max_contiguous(first + tl.arange(0, size), 1)
    word = tl.load(words + at, mask=at < tl.cast(tiles, tl.int64) * (tile // 32), other=0)
    return word.to(tl.uint32, bitcast=True), at * 32


@kernel
def _count_below(
    words: tl.tensor, before: tl.tensor, tiles: int, edges: tl.tensor, hits: tl.tensor, tile: tl.constexpr
) -> None:
    """Counts the set bits before one edge of a range (edge 0 belongs to no range)."""
    number = tl.program_id(0)
    edge = tl.load(edges + number + 1)
    block = edge // tile
    # An edge at the end of the vector may be outside of all tiles.
    word, start = _bits(words, block * (tile // 32), tiles, tile // 32, tile)
    inside = tl.sum(ones(word & below(edge - start)))
    tl.store(hits + number, tl.load(before + block) + inside)


@kernel
def _list_group(
    words: tl.tensor,
    before: tl.tensor,
    tiles: int,
    offset: int,
    lower: int,
    upper: int,
    earlier: int,
    positions: tl.tensor,
    tile: tl.constexpr,
    group: tl.constexpr,
) -> None:
    """Lists the positions in [lower, upper) of one group of tiles; ``earlier`` bits are set before ``lower``."""
    first = (tl.program_id(0) + offset).to(tl.int64) * group
    rank = tl.load(before + first)
    if tl.load(before + tl.minimum(first + group, tiles)) > rank:  # most groups are empty if little is listed
        word, start = _bits(words, first * (tile // 32), tiles, group * (tile // 32), tile)
        word = word & (below(upper - start) ^ below(lower - start))
        count = ones(word)
        place = tl.maximum(rank - earlier, 0) + tl.cumsum(count) - count
        for _ in range(tl.max(count)):  # each iteration takes the lowest bit of every word
            lowest = ones((word - 1) ^ (word & (word - 1)))
            tl.store(positions + place, start + lowest, mask=word != 0)
            word = word & (word - 1)
            place += 1
