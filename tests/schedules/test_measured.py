"""Schedules that measure first: their measurements, and equal decisions on all workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from spardl.clusters import Cluster, Network, SimulatedCluster
from spardl.clusters.profile import LayerTimes, Profile
from spardl.method.warmup import Warmup
from spardl.schedules import LayerFusion, MgWfbp, Schedule, Training
from spardl.schedules.fusion import Linear, Range, finish
from spardl.schedules.measured import Measured, measure_cost
from spardl.vector.flat import FlatGradient
from tests.schedules.loops import Loop, Setting, make_model, momentum
from tests.support.harness import NETWORK, dense, run_workers, spardl

ENTRIES = [layer.entries for layer in FlatGradient(make_model().named_parameters()).layers]


def profile(ready: Sequence[float]) -> Profile:
    layers = tuple(
        LayerTimes(f"{n}", size, 0.0, when) for n, (size, when) in enumerate(zip(ENTRIES, ready, strict=True))
    )
    return Profile("awkward", "none", 2, layers, forward=1.0, backward=max(ready), update=0.0)


def test_ready_times_are_those_of_the_profile() -> None:
    ready = [0.25, 0.6, 0.1, 0.4, 0.4, 0.3, 0.2]
    cluster = SimulatedCluster(3, NETWORK, count_local=False, profile=profile(ready))
    seen: list[Any] = []

    def decide(entries: Sequence[int], times: Sequence[float], cost: Linear) -> list[Range]:
        seen.extend([entries, times, cost])
        return [(0, 2), (2, 7)]

    class Spy(Schedule):
        def make(self, method: Any, cluster: Cluster, training: Training) -> Measured:
            return Measured(method, cluster, training, decide)

    loop = Loop(Spy(), cluster)
    loop.run(range(6))
    assert loop.synchronizer.partition == [(0, 7)]
    loop.run(range(6, 8))
    assert loop.synchronizer.partition == [(0, 2), (2, 7)]
    assert seen[0] == ENTRIES
    # The unused layer has no gradient and therefore no time.
    assert seen[1] == pytest.approx([0.25, 0.6, 0.0, 0.4, 0.4, 0.3, 0.2])
    assert seen[2].per_entry > 0


def test_the_cost_is_the_networks() -> None:
    """Dense, 4 workers: 6 rounds, and 12 bytes an entry of 8 bytes."""
    found = measure_cost(dense(), SimulatedCluster(4, Network(1e-3, 1), count_local=False), torch.zeros(6400).double())
    assert found.fixed == pytest.approx(6e-3)
    assert found.per_entry == pytest.approx(12 * 8e-9)
    tiny = measure_cost(dense(), SimulatedCluster(2, Network(1e-3, 1), count_local=False), torch.zeros(1).double())
    assert tiny.fixed == pytest.approx(2e-3, rel=1e-3)
    assert tiny.per_entry == 0


def test_the_dense_warm_up_is_left_out() -> None:
    cluster, gradient = SimulatedCluster(4, Network(1e-3, 1), count_local=False), torch.zeros(6400).double()
    sparse = spardl(0.01)
    warmed = replace(sparse, warmup=Warmup(100))
    assert measure_cost(warmed, cluster, gradient) == measure_cost(sparse, cluster, gradient)


@pytest.mark.parametrize("schedule", [MgWfbp(), LayerFusion()], ids=lambda schedule: schedule.name)
def test_the_chosen_groups_end_no_later_than_one_group_or_many(schedule: Schedule) -> None:
    ready = [1e-4, 2e-3, 0.0, 1.5e-3, 1.5e-3, 1e-3, 1e-4]
    cluster = SimulatedCluster(3, Network(1e-4, 0.01), count_local=False, profile=profile(ready))
    loop = Loop(schedule, cluster)
    loop.run(range(8))
    cost = measure_cost(dense(), cluster, loop.gradient.vector)
    chosen = finish(loop.synchronizer.partition, ENTRIES, ready, cost)
    alone = [(layer, layer + 1) for layer in range(7)]
    assert chosen <= min(finish(groups, ENTRIES, ready, cost) for groups in (alone, [(0, 7)]))
    assert 1 < len(loop.synchronizer.partition) < 7


def test_real_workers_decide_alike() -> None:
    def work(cluster: Cluster) -> tuple[list[Range], list[float]]:
        loop = Loop(LayerFusion(), cluster, method=spardl(0.2))
        found = loop.run()
        return loop.synchronizer.partition, found.tolist()

    found = run_workers(3, work)
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("stop", [3, 9])
def test_a_decision_is_kept(stop: int) -> None:
    def loop(ready: Sequence[float]) -> Loop:
        cluster = SimulatedCluster(3, Network(1e-4, 0.01), count_local=False, profile=profile(ready))
        return Loop(LayerFusion(), cluster, Setting(momentum, steps=12), spardl(0.2))

    first = loop([1e-4, 2e-3, 0.0, 1.5e-3, 1.5e-3, 1e-3, 1e-4])
    first.run(range(stop))
    # On another machine, where all gradients arrive at once, there would be only one group.
    second = loop([0.0] * 7)
    second.load(first.state())
    assert second.synchronizer.partition == first.synchronizer.partition
    second.run(range(stop, 12))
    assert second.synchronizer.partition == ([(0, 7)] if stop == 3 else first.synchronizer.partition)
    assert (len(first.synchronizer.partition) > 1) == (stop == 9)
