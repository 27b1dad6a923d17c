"""Thorough checks of kernels: bit-by-bit comparison with their portable versions, and the speed of selection."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spardl.diagnostics.thorough.outcome import Outcome, Place, failed, judged, ok, warned
from spardl.diagnostics.timeline.measure import Clock
from spardl.vector import sparse
from spardl.vector.bits import INTEGERS
from spardl.vector.candidates import Candidates
from spardl.vector.layout import Range
from spardl.vector.packing import Slot, pack, unpack
from spardl.vector.selection import ListingRanges, PortableFinder, top_k
from spardl.vector.sparse import SparseVector, merge

__all__ = ["check_messages", "check_selection", "check_triton", "vectors"]


# Speed of a selection, compared with a copy of the vector and with torch.topk.


_DENSITY, _GOAL = 0.01, 3.0
# Warm-up repetitions; least and most measured repetitions; share of the time limit for each measurement.
_WARM, _LEAST, _MOST, _SHARE = 6, 15, 50, 0.15
# Most vectors of the gradient's size that are in memory at the same time.
_VECTORS = 8


def check_selection(length: int) -> Callable[[Place], Outcome]:
    """Returns the check of the speed of selection, for float32 vectors of ``length`` entries."""

    def check(place: Place) -> Outcome:
        named = f"selection of 1% of {length:,} entries"
        free, needed = _free_bytes(place), 4 * _VECTORS * length
        if free < needed:
            return warned(
                f"{named}: skipped, because it needs {needed / 1e9:.2g} GB of memory and {free / 1e9:.2g} GB are free "
                f"on {place.device}; stop other programs that use it, and run this again",
                {"entries": length, "free": free, "needed": needed},
            )
        return _verdict(named, place, _figures(length, place))

    return check


def _free_bytes(place: Place) -> int:
    if place.on_gpu:
        return int(torch.cuda.mem_get_info()[0])
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _verdict(named: str, place: Place, figures: dict[str, float]) -> Outcome:
    ratio = figures["select"] / figures["copy"]
    text = (
        f"{named}: {1e3 * figures['select']:.3g} ms including the addition of the gradient on {place.device}, "
        f"{ratio:.2g} x a copy ({1e3 * figures['copy']:.3g} ms); torch.topk {1e3 * figures['topk']:.3g} ms"
    )
    report = {**figures, "ratio": ratio, "goal": _GOAL}
    if figures["turns"] < _LEAST:
        return warned(
            f"{text}; these are medians of only {figures['turns']:.0f} repetitions; run this again on an idle machine",
            report,
        )
    if ratio > _GOAL:
        return warned(f"{text}; this exceeds the goal of {_GOAL:g} x a copy; report it with the file of --json", report)
    return ok(text, report)


def _figures(length: int, place: Place) -> dict[str, float]:
    """Returns median seconds; each repetition adds the gradient and clears the selected entries, as in training."""
    device = place.torch_device
    random = torch.Generator(device).manual_seed(1)
    gradient = torch.randn(length, generator=random, device=device)
    values, copy = torch.zeros_like(gradient), torch.empty_like(gradient)
    kept = max(1, int(_DENSITY * length))
    candidates, parts, found = Candidates(), [Range(0, length, kept)], list[Tensor]()

    def select() -> None:
        candidates.add(values, gradient)
        found[:] = [candidates.largest(values, parts, [])]

    # Without this the values would grow, and later selections would differ from the first.
    def settle() -> None:
        sparse.cut(values, found[0])

    turns: dict[str, list[float]] = {
        "select": _timed(place, select, settle),
        "copy": _timed(place, lambda: copy.copy_(gradient)),
        "topk": _timed(place, lambda: gradient.abs().topk(kept, sorted=False)),
    }
    medians = {name: median(seconds) for name, seconds in turns.items()}
    return {"entries": length, "kept": kept, "turns": min(map(len, turns.values())), **medians}


def _timed(place: Place, work: Callable[[], object], after: Callable[[], object] = lambda: None) -> list[float]:
    """Returns the seconds of each repetition after the warm-up; ``after`` is not measured."""
    until, seconds = time.perf_counter() + _SHARE * place.seconds, list[float]()
    clock = Clock(place.torch_device)
    for turn in range(_WARM + _MOST):
        clock.settle()
        began = clock.mark()
        work()
        ended = clock.mark()
        clock.settle()
        took = clock.between(began, ended)
        after()
        late = time.perf_counter() > until
        if late or turn >= _WARM:
            seconds.append(took)
        if late:
            break
    return seconds


_GPU_SIZES, _SMALL_SIZES = (1, 1000, 1_000_000, 14_700_000), (1, 1000, 20_000)
_FIX = "set SPARDL_KERNELS=portable, and report a bug with the file of --json"


def vectors(length: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Returns difficult inputs of a kernel by name, shape (length,) each, on the CPU; all but one are finite."""
    random = torch.Generator().manual_seed(length)
    normal = torch.randn(length, generator=random).to(dtype)
    ties = (torch.randint(-4, 5, (length,), generator=random) / 2).to(dtype)
    tiny = torch.finfo(dtype).smallest_normal * torch.rand(length, generator=random, dtype=torch.float64) / 4
    zeros = torch.zeros(length, dtype=dtype)
    zeros[::2] = -0.0
    infinite = normal.clone()
    infinite[:: max(1, length // 7)] = torch.inf
    infinite[1 :: max(1, length // 5)] = -torch.inf
    return {"normal": normal, "ties": ties, "zeros": zeros, "subnormal": tiny.to(dtype), "infinite": infinite}


def check_triton(dtype: torch.dtype) -> Callable[[Place], Outcome]:
    """Returns the check of the Triton kernel that adds a gradient and lists entries, for vectors of ``dtype``."""

    def check(place: Place) -> Outcome:
        how = "on the GPU" if place.on_gpu else "in Triton's interpreter"
        named = str(dtype).removeprefix("torch.")
        if not find_spec("triton"):
            return failed(f"Triton kernels, {named}: triton is not installed; pip install triton", {})
        sizes = _GPU_SIZES if place.on_gpu else _SMALL_SIZES
        problems, tried = [], 0
        for length in sizes:
            for kind, values in vectors(length, dtype).items():
                # Without a gradient, with a different one, and with one that doubles or cancels all values.
                for gradient in (None, values.flip(0) / 2, -values if kind == "zeros" else values):
                    tried += 1
                    problems += [
                        f"Triton kernels, {named}: {what} of {length:,} {kind} entries differ from the portable "
                        f"version, {how}"
                        for what in _differences(values, gradient, place.torch_device)
                    ]
        good = f"Triton kernels, {named}: match the portable version bitwise in all {tried} cases, {how}"
        return judged(good, problems, _FIX, {"sizes": sizes, "cases": tried, "interpreted": not place.on_gpu})

    return check


def _differences(values: Tensor, gradient: Tensor | None, device: torch.device) -> list[str]:
    """Names the results in which the kernel differs from the portable version."""
    from spardl.vector.kernels.gpu import add_and_list  # noqa: PLC0415 - TRITON_INTERPRET must be set first

    ranges = _ranges(values, gradient)
    memory, portable = values.to(device, copy=True), values.to(device, copy=True)
    added = None if gradient is None else gradient.to(device)
    finder = PortableFinder()
    wanted = finder.add(portable, added, ranges)
    numbers = ranges.starts.tolist(), ranges.stops.tolist(), ranges.bounds.tolist()
    positions, counts = add_and_list(memory, added, *numbers, int(ranges.capacities.sum()))
    listed = torch.cat([finder.listed(start, stop) for start, stop in zip(*numbers[:2], strict=True)])
    whole = INTEGERS[values.itemsize]
    same = {
        # NaN has many bit patterns, which may differ between devices.
        "the sums": _equal(memory.view(whole)[~memory.isnan()], portable.view(whole)[~portable.isnan()]),
        "the counts": counts == wanted.tolist(),
        "the positions": _equal(positions, listed),
    }
    return [what for what, equal in same.items() if not equal]


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one, other)


def _ranges(values: Tensor, gradient: Tensor | None) -> ListingRanges:
    """Returns three ranges with a gap, space for all entries, and thresholds that some of the sums just reach."""
    length = values.numel()
    edges = np.array([0, length // 3, length // 3, length // 2, length // 2 + length // 9, length], np.int64)
    sums = (values if gradient is None else values + gradient).abs()
    least = torch.finfo(values.dtype).tiny
    usable = sums[sums.isfinite()].clamp(min=least) if sums.isfinite().any() else sums.new_full((1,), least)
    bounds = usable[torch.linspace(0, usable.numel() - 1, 3).long()]
    starts, stops = edges[::2].copy(), edges[1::2].copy()
    return ListingRanges(starts, stops, bounds, stops - starts)


@contextmanager
def _portable() -> Iterator[None]:
    """Disables compiled kernels inside the ``with`` block."""
    before = os.environ.get("SPARDL_KERNELS")
    os.environ["SPARDL_KERNELS"] = "portable"
    try:
        yield
    finally:
        os.environ.pop("SPARDL_KERNELS")
        if before is not None:
            os.environ["SPARDL_KERNELS"] = before


def check_messages(place: Place) -> Outcome:
    """Compares selections, messages and sums of sparse vectors on the device with those of compiled CPU kernels."""
    how = "on the GPU" if place.on_gpu else "portable, on the CPU"
    problems, tried = [], 0
    sizes = _GPU_SIZES[:-1] if place.on_gpu else _SMALL_SIZES
    for length in sizes:
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            for kind, values in vectors(length, dtype).items():
                if kind == "infinite":
                    continue  # training rejects non-finite gradients before selection
                tried += 1
                here, there = _stages(values), _on_device(values, place)
                named = str(dtype).removeprefix("torch.")
                problems += [
                    f"messages: {what} of {length:,} {kind} entries, {named}, differ from the CPU kernels, {how}"
                    for what, mine in here.items()
                    if not _equal(mine, there[what])
                ]
    good = f"messages: selections, messages and merges match the CPU kernels bitwise in all {tried} cases, {how}"
    return judged(good, problems, _FIX, {"sizes": sizes, "cases": tried})


def _on_device(values: Tensor, place: Place) -> dict[str, Tensor]:
    if place.on_gpu:
        return _stages(values.to(place.torch_device))
    with _portable():
        return _stages(values)


def _stages(values: Tensor) -> dict[str, Tensor]:
    """Returns the stages of a vector that is sent to another worker (selection, message, sum), as bits on the CPU."""
    length, whole = values.numel(), INTEGERS[values.itemsize]
    positions = top_k(values, max(1, length // 100))
    picked = SparseVector(positions, values[positions], length)
    slot = Slot(len(picked) + 3, length + 5)
    longer = SparseVector(picked.indices, picked.values, slot.length)
    message = pack(longer, slot, values.dtype)
    read = unpack(message, slot, values.dtype, values.dtype)
    other = SparseVector(top_k(values.flip(0), max(1, length // 50)), values[: max(1, length // 50)], slot.length)
    merged = merge([read, other, longer])
    found: dict[str, Any] = {
        "the selections": positions,
        "the messages": message,
        "the unpacked messages": torch.cat((read.indices, read.values.view(whole).long())),
        "the merges": torch.cat((merged.indices, merged.values.view(whole).long())),
    }
    return {what: tensor.cpu() for what, tensor in found.items()}
