"""A synchronization needs memory for what it sends, not for the gradient."""

from __future__ import annotations

import gc
import statistics
import tracemalloc
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from spardl.clusters import ProcessGroupCluster
from spardl.hooks.hook import attach
from tests.support.harness import Bench, run_workers, spardl

LENGTH, DENSITY = 2_000_000, 0.01
GRADIENT = 4 * LENGTH


class Need(NamedTuple):
    """Bytes that a step takes beyond what exists before it.

    Attributes:
        peak: at once, in torch's memory.
        largest: of one tensor.
        outside_torch: at once, in numpy's and numba's memory.
    """

    peak: int
    largest: int
    outside_torch: int


def needed(bench: Bench, gradients: list[Tensor]) -> Need:
    tracemalloc.start()
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            bench.step(gradients)
        # The profiler's own Python objects come after the step.
        outside_torch = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    results: Any = profile.profiler.kineto_results
    events = [event for event in results.events() if event.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return Need(peak, max(event.nbytes() for event in events), outside_torch)


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
    assert need.outside_torch <= 0.06 * workers * GRADIENT


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
    assert GRADIENT <= need.outside_torch <= 1.01 * GRADIENT


def held(model: nn.Module) -> int:
    """Bytes of the tensors of this process, and of the gradients of a model; each storage counts once."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if issubclass(type(each), Tensor)]
    tensors += [each.grad for each in model.parameters() if each.grad is not None]
    return sum({each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}.values())


@pytest.mark.slow
def test_bytes_per_parameter_with_adamw() -> None:
    """The residual and the gradients in flight; the second moment takes the place of the optimizer's."""

    def work(cluster: ProcessGroupCluster) -> list[float]:
        found = []
        for attaches in (False, True):
            model = nn.Linear(1000, 1000, bias=False)
            ddp = DistributedDataParallel(model)
            optimizer = torch.optim.AdamW(model.parameters())
            before = held(model)
            handle = attach(ddp, "spardl", density=0.01, optimizer=optimizer) if attaches else None
            if not attaches:
                ddp.register_comm_hook(None, allreduce_hook)  # Python sees the buckets only in a hook
            for _ in range(3):
                optimizer.zero_grad()
                ddp(torch.ones(2, 1000)).square().mean().backward()
                optimizer.step()
            found.append((held(model) - before) / model.weight.numel())
            del handle, ddp, model, optimizer
        return found

    for plain, attached in run_workers(2, work):
        assert plain == pytest.approx(16, abs=0.1)  # gradient, bucket and both moments, but not the weights
        assert 3.9 < attached - plain < 4.6
