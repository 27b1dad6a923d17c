"""Statistics of handles."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo  # as in tests/project/test_api.py
from torch import nn

import spardl
from spardl.clusters import ProcessGroupCluster
from spardl.clusters.ledger import Ledger
from spardl.hooks.averager import Meter, Stats
from spardl.protocol.programs import Phase
from tests.support.harness import run_workers


def step(ledger: Ledger, meter: Meter, seconds: float) -> None:
    ledger.spend(Phase.SELECT, seconds, overlapped=True)
    ledger.count_collective(2, 10, 4)
    meter.step()


def test_the_first_step_takes_no_seconds() -> None:
    ledger = Ledger()
    meter = Meter(ledger, 2)
    assert meter.stats(100, 0).seconds["select"] == 0
    step(ledger, meter, 60)
    assert meter.stats(100, 0).seconds["select"] == 60  # the only step is included
    for _ in range(3):
        step(ledger, meter, 0.5)
    found = meter.stats(100, 2)
    assert (found.steps, found.rounds, found.bytes_sent, found.refused) == (4, 2, 40, 2)
    assert found.seconds["select"] == 0.5


def test_reset_restarts_the_statistics() -> None:
    ledger = Ledger()
    meter = Meter(ledger, 2)
    for seconds in (60, 1, 2):
        step(ledger, meter, seconds)
    meter.reset(refused=2)
    assert meter.stats(100, 2)[:4] == (0, 0, 0, 0)
    step(ledger, meter, 4)
    found = meter.stats(100, 3)
    assert (found.steps, found.rounds, found.bytes_sent, found.refused) == (1, 2, 40, 1)
    assert found.seconds["select"] == 4
    assert meter.steps == 4


def test_reset_before_the_first_step_excludes_it() -> None:
    ledger = Ledger()
    meter = Meter(ledger, 2)
    meter.reset(refused=0)
    for seconds in (60, 1):
        step(ledger, meter, seconds)
    assert meter.stats(100, 0).seconds["select"] == 1


def test_the_table() -> None:
    seconds = {"select": 0.00125, "pack": 0.0, "communicate": 1.5, "merge": 0.0}
    stats = Stats(12, 2.5, 1234.0, 4000.0, 128_000.0, seconds, 3, 5.25, 41.7)
    assert str(stats).splitlines() == [
        "steps        12",
        "rounds       2.5 per step",
        "words        1,234 per step",
        "sent         4,000 bytes per step, 3.12% of dense (128,000)",
        "select       1.250 ms per step",
        "pack         0.000 ms per step",
        "communicate  1,500.000 ms per step",
        "merge        0.000 ms per step",
        "refused      3 gradients",
        "residual     5.25 x the norm of one step, mean age 41.7 steps",
    ]
    assert str(stats._replace(residual_ratio=None)).endswith("residual     unknown")


def test_single_worker_sends_nothing() -> None:
    """A single worker sends nothing."""

    def work(cluster: ProcessGroupCluster) -> Stats:
        found = spardl.all_reduce(torch.ones(10), "spardl", density=0.1).cost
        assert "0 bytes per step, 0.00% of dense (0)" in str(found)
        return found

    (stats,) = run_workers(1, work)
    assert (stats.share, stats.dense_bytes, stats.steps) == (0, 0, 1)


def handles() -> tuple[Any, Any, nn.Parameter, nn.Module]:
    model = nn.Linear(30, 10, bias=False)
    ddp = nn.parallel.DistributedDataParallel(model)
    parameter = nn.Parameter(torch.zeros(10, 30))
    return (
        (spardl.attach(ddp, "topka", density=0.1), spardl.Synchronizer([parameter], "topka", density=0.1)),
        ddp,
        parameter,
        model,
    )


def test_size_of_the_residual() -> None:
    """Relative to the first gradient, which is measured; the residual is the current one."""

    def work(cluster: ProcessGroupCluster) -> list[float]:
        (attached, synchronizer), ddp, parameter, _ = handles()
        inputs = torch.randn(4, 30, generator=torch.Generator().manual_seed(cluster.local_ranks[0]))
        assert attached.stats().residual_ratio is synchronizer.stats().residual_ratio is None
        residual = torch.zeros(300)
        found = []
        gradient = inputs.sum(0).expand(10, 30)
        for _ in range(3):
            ddp.zero_grad()
            ddp(inputs).sum().backward()
            parameter.grad = None
            with synchronizer:
                (parameter * gradient).sum().backward()
            residual += gradient.flatten()
            residual[residual.abs().topk(30).indices] = 0
            expected = float(residual.norm() / gradient.norm())
            age = float(residual.abs().sum() / gradient.abs().sum())
            for stats in (attached.stats(), synchronizer.stats()):
                found += [stats.residual_ratio / expected, stats.residual_age / age]
        attached.reset()
        synchronizer.reset()
        assert attached.stats().steps == synchronizer.stats().steps == 0
        assert attached.steps == 3
        return found

    for found in run_workers(2, work):
        assert found == pytest.approx([1] * 12, rel=1e-5)


def test_a_method_without_a_residual_carries_nothing() -> None:
    def work(cluster: ProcessGroupCluster) -> float | None:
        parameter = nn.Parameter(torch.zeros(10))
        synchronizer = spardl.Synchronizer([parameter], "none")
        with synchronizer:
            parameter.sum().backward()
        return synchronizer.stats().residual_ratio

    assert run_workers(1, work) == [0.0]
