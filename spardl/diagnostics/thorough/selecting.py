"""How long a selection takes, beside a copy of the vector and torch's own top-k."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor

from spardl.diagnostics.thorough.outcome import Outcome, Place, ok, warned
from spardl.vector import entries
from spardl.vector.candidates import Candidates
from spardl.vector.layout import Part

__all__ = ["check_selection"]

_DENSITY, _GOAL = 0.01, 3.0
# Turns before anything is timed, and timed turns: at least, and at most; the share of the time that each thing gets.
_WARM, _LEAST, _MOST, _SHARE = 6, 15, 50, 0.15
# Vectors of a gradient's size, at most, that are in memory at the same time.
_VECTORS = 8


def check_selection(length: int) -> Callable[[Place], Outcome]:
    """The check for vectors of so many entries in float32."""

    def check(place: Place) -> Outcome:
        named = f"selection of 1% of {length:,} entries"
        free, needed = _free(place), 4 * _VECTORS * length
        if free < needed:
            return warned(
                f"{named}: left out, as it takes {needed / 1e9:.2g} GB of memory and {free / 1e9:.2g} GB are free on "
                f"{place.device}; end what else uses it, and run this again",
                {"entries": length, "free": free, "needed": needed},
            )
        return _verdict(named, place, _figures(length, place))

    return check


def _free(place: Place) -> int:
    """Bytes."""
    if place.on_gpu:
        return int(torch.cuda.mem_get_info()[0])
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _verdict(named: str, place: Place, figures: dict[str, float]) -> Outcome:
    ratio = figures["select"] / figures["copy"]
    text = (
        f"{named}: {1e3 * figures['select']:.3g} ms with the addition of the gradient on {place.device}, {ratio:.2g} "
        f"times a copy ({1e3 * figures['copy']:.3g} ms); torch.topk {1e3 * figures['topk']:.3g} ms"
    )
    told = {**figures, "ratio": ratio, "goal": _GOAL}
    if figures["turns"] < _LEAST:
        return warned(
            f"{text}; medians of {figures['turns']:.0f} turns only, as there was no time for more: do not rely on them",
            told,
        )
    if ratio > _GOAL:
        return warned(f"{text}; more than {_GOAL:g} times a copy is slower than meant: send the file of --json", told)
    return ok(text, told)


def _figures(length: int, place: Place) -> dict[str, float]:
    """Median seconds; in each turn the gradient comes again, and what was selected before is zero, as in training."""
    device = place.torch_device
    random = torch.Generator(device).manual_seed(1)
    gradient = torch.randn(length, generator=random, device=device)
    values, copy = torch.zeros_like(gradient), torch.empty_like(gradient)
    kept = max(1, int(_DENSITY * length))
    candidates, parts, found = Candidates(), [Part(0, length, kept)], list[Tensor]()

    def select() -> None:
        candidates.add(values, gradient)
        found[:] = [candidates.largest(values, parts, [])]

    def settle() -> None:
        entries.cut(values, found[0])

    turns: dict[str, list[float]] = {
        "select": _timed(place, select, settle),
        "copy": _timed(place, lambda: copy.copy_(gradient)),
        "topk": _timed(place, lambda: gradient.abs().topk(kept, sorted=False)),
    }
    medians = {name: median(seconds) for name, seconds in turns.items()}
    return {"entries": length, "kept": kept, "turns": min(map(len, turns.values())), **medians}


def _timed(place: Place, work: Callable[[], object], after: Callable[[], object] = lambda: None) -> list[float]:
    """Seconds of each turn, warm; what is done after it does not count."""
    until, seconds = time.perf_counter() + _SHARE * place.seconds, list[float]()
    clock = _gpu_seconds if place.on_gpu else _cpu_seconds
    for turn in range(_WARM + _MOST):
        took = clock(work)
        after()
        late = time.perf_counter() > until
        if late or turn >= _WARM:
            seconds.append(took)
        if late:
            break
    return seconds


def _cpu_seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _gpu_seconds(work: Callable[[], object]) -> float:
    """What the stream took, waits of the host in between included."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    work()
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop)) / 1e3
