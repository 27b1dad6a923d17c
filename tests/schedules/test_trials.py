"""Trials of group sizes during training."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch

from spardl.clusters import Cluster, Network, SimulatedCluster
from spardl.clusters.profile import LayerTimes, Profile
from spardl.schedules import Dear
from spardl.schedules.tuning import Trials
from spardl.vector.flat import FlatGradient
from tests.schedules.loops import Loop, Setting, make_model, momentum
from tests.support.harness import run_workers

LAYERS = FlatGradient(make_model().named_parameters()).layers


class Clock(SimulatedCluster):
    """One worker whose step times the test sets."""

    def __init__(self, durations: Iterable[float]) -> None:
        super().__init__(1, Network(1e-6, 100), count_local=False)
        self._durations = iter(durations)
        self._now = 0.0

    def seconds(self) -> float:
        self._now += next(self._durations)
        return self._now


def test_the_first_steps_after_a_change_do_not_count() -> None:
    # A call ends a step and begins the next one. A skipped step counts as a step, but its time does not.
    trials = Trials(1.0, 64.0, 8.0, 2, 0)
    clock = Clock([0, 9, 9, 1, 2, 3] + [0.5] * 20)
    assert [trials.next(clock) for _ in range(5)] == [None] * 5
    second = trials.next(clock)
    assert second is not None
    assert trials.state_dict() == {"tuner": {"points": [8.0, second], "seconds": [2.0]}, "done": False}
    trials.next(clock)
    trials.skip_step()
    assert [trials.next(clock) for _ in range(3)] == [None] * 3
    assert trials.next(clock) == second  # the faster of the two, and the last word
    assert trials.next(clock) is None
    assert trials.state_dict()["done"]


def test_workers_that_skip_different_steps_decide_in_the_same_one() -> None:
    trials = [Trials(1.0, 64.0, 8.0, 3, 0) for _ in range(3)]
    clocks = [Clock([0.0] + [0.25] * 100) for _ in trials]
    decisions: list[list[int]] = [[], [], []]
    for step in range(20):
        for number, (each, clock) in enumerate(zip(trials, clocks, strict=True)):
            if each.next(clock) is not None:
                decisions[number].append(step)
            if number == 2 or step == 3 * number:  # the last one has no step to measure
                each.skip_step()
    assert decisions == [[5, 10, 15], [5, 10, 15], [5, 10, 15]]
    assert [each.state_dict()["done"] for each in trials] == [True, True, False]


def test_to_save_and_continue() -> None:
    def talk(trials: Trials, steps: int) -> list[float | None]:
        clock = Clock([0.0] + [0.25] * 100)
        return [trials.next(clock) for _ in range(steps)]

    whole, first, second = (Trials(1.0, 64.0, 8.0, 3, 0) for _ in range(3))
    expected = [found for found in talk(whole, 17) if found]
    begun = [found for found in talk(first, 8) if found]
    second.load_state_dict(first.state_dict())
    assert begun + [found for found in talk(second, 12) if found] == expected
    assert len(expected) == 3


def simulated() -> SimulatedCluster:
    """A network on which many small groups and one large group are both slow."""
    layers = tuple(
        LayerTimes(layer.name, layer.entries, 1e-3 * number, 2e-3 * (len(LAYERS) - number))
        for number, layer in enumerate(LAYERS)
    )
    profile = Profile("awkward", "none", 1, layers, forward=7e-3, backward=14e-3, update=0.0)
    return SimulatedCluster(4, Network(3e-4, 0.01), count_local=False, profile=profile)


def seconds_with(threshold: float) -> float:
    cluster = simulated()
    loop = Loop(Dear(threshold_mb=threshold), cluster, Setting(momentum))
    loop.run(range(3))
    before = cluster.seconds()
    loop.run(range(3, 8))
    return cluster.seconds() - before


@pytest.mark.slow
def test_the_tuned_size_is_as_good_as_the_best() -> None:
    loop = Loop(Dear(threshold_mb=0.004, low_mb=0.0002, high_mb=0.02, trials=8), simulated(), Setting(momentum))
    loop.run(range(50))
    sizes = [0.0002 * 10 ** (step / 10) for step in range(21)]
    best = min(map(seconds_with, sizes))
    cluster = loop.cluster
    before = cluster.seconds()
    loop.run(range(50, 55))
    assert cluster.seconds() - before <= best / 0.95
    assert best < 0.97 * seconds_with(0.02)


def test_all_workers_change_in_the_same_step() -> None:
    def work(cluster: Cluster) -> list[list[tuple[int, int]]]:
        loop = Loop(Dear(threshold_mb=0.002, low_mb=0.0002, high_mb=0.02, trials=4), cluster, Setting(momentum))
        found = []
        for step in range(30):
            loop.step(step)
            found.append(loop.synchronizer.partition)
        assert torch.isfinite(loop.run([])).all()
        return found

    one, *others = run_workers(3, work)
    assert all(other == one for other in others)
    assert len({tuple(partition) for partition in one}) > 1
