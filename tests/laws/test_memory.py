"""A synchronization needs memory for what it sends, not for the gradient."""

from __future__ import annotations

import statistics
import tracemalloc
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support.harness import Bench, spardl

LENGTH, DENSITY = 2_000_000, 0.01
GRADIENT = 4 * LENGTH


class Need(NamedTuple):
    """Bytes that a step takes beyond what exists before it.

    Attributes:
        peak: at once, in torch's memory.
        largest: of one tensor.
        beside: at once, in numpy's and numba's memory.
    """

    peak: int
    largest: int
    beside: int


def needed(bench: Bench, gradients: list[Tensor]) -> Need:
    tracemalloc.start()
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            bench.step(gradients)
        # The profiler's own Python objects come after the step.
        beside = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    results: Any = profile.profiler.kineto_results
    events = [event for event in results.events() if event.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return Need(peak, max(event.nbytes() for event in events), beside)


def steady(workers: int) -> Need:
    """Of the third to fifth step; the median, since a step can find too few candidates listed."""
    bench = Bench.build(spardl(DENSITY), workers, LENGTH, torch.float32)
    source = torch.Generator().manual_seed(0)
    gradients = [torch.randn(LENGTH, generator=source) for _ in range(workers)]
    for _ in range(5):
        bench.step(gradients)
    found = [needed(bench, gradients) for _ in range(3)]
    return Need(*map(statistics.median, zip(*found, strict=True)))


@pytest.mark.parametrize(
    # A selection in torch looks at blocks of 2^17 entries, whatever the gradient's length.
    ("name", "workers", "peak", "largest"),
    [("compiled", 2, 0.15, 0.025), ("compiled", 4, 0.15, 0.025), ("portable", 2, 0.25, 0.07)],
)
def test_nothing_as_long_as_the_gradient(
    name: str, workers: int, peak: float, largest: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Per worker, at density 1%: an entry, 12 bytes with its position, is there in a few forms at once."""
    if name == "compiled":
        pytest.importorskip("numba")
    monkeypatch.setenv("SPARDL_KERNELS", name)
    need = steady(workers)
    assert need.peak <= peak * workers * GRADIENT
    assert need.largest <= largest * GRADIENT
    assert need.beside <= 0.06 * workers * GRADIENT


def test_what_is_measured_is_seen() -> None:
    """Memory in torch, in numpy and in compiled code."""
    numba = pytest.importorskip("numba")

    @numba.njit
    def total(length: int) -> float:
        values = np.empty(length, np.float32)
        values[:] = 1
        return values.sum()

    total(1)

    class Wasteful:
        def step(self, gradients: list[Tensor]) -> None:
            (gradients[0] + 1).sum()
            total(LENGTH)

    need = needed(Wasteful(), [torch.zeros(LENGTH)])  # type: ignore[arg-type]
    assert GRADIENT <= need.largest <= need.peak <= 1.01 * GRADIENT
    assert GRADIENT <= need.beside <= 1.01 * GRADIENT
