"""The simulated cluster and the timeline model agree on the seconds of a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from spardl.clusters import Network, SimulatedCluster
from spardl.clusters.profile import LayerTimes, Profile
from spardl.diagnostics.timeline.model import Timeline, after_backward, halves, in_backward, in_halves, whole
from spardl.method.method import Method
from spardl.schedules import AfterBackward, Dear, Schedule, Wfbp
from spardl.vector.flat import FlatGradient
from tests.schedules.loops import Loop, make_model
from tests.support.harness import dense, spardl

LAYERS = FlatGradient(make_model().named_parameters()).layers
# The scale is registered first and used second to last, after the call of the recurrent layer.
NEEDED = (3e-3, 0.0, 6e-3, 1e-3, 1e-3, 3e-3, 5.5e-3)
READY = (2e-3, 12e-3, 12e-3, 8e-3, 8e-3, 6e-3, 1e-3)
PROFILE = Profile(
    "awkward",
    "none",
    2,
    tuple(LayerTimes(layer.name, layer.entries, *times) for layer, *times in zip(LAYERS, NEEDED, READY, strict=True)),
    forward=6e-3,
    backward=12e-3,
    update=0.0,
)
WORKERS = 4


def predicted(name: str, method: Method, network: Network, groups: Any) -> Timeline:
    def free(entries: int) -> float:
        return 0.0

    first, second = halves(method, WORKERS, network, free, torch.float64)
    at_once = whole(method, WORKERS, network, free, torch.float64)
    make: dict[str, Callable[[], Timeline]] = {
        "after_backward": lambda: after_backward(PROFILE, at_once),
        "wfbp": lambda: in_backward(PROFILE, groups, at_once),
        "dear": lambda: in_halves(PROFILE, groups, first, second),
    }
    return make[name]()


@pytest.mark.slow
@pytest.mark.parametrize("gbit", [0.002, 0.01, 1.0], ids=["network bound", "balanced", "compute bound"])
@pytest.mark.parametrize("method", [dense(), spardl(0.3)], ids=["dense", "spardl"])
@pytest.mark.parametrize(
    "schedule",
    [AfterBackward(), Wfbp(bucket_mb=0), Wfbp(bucket_mb=0.0008), Dear(threshold_mb=0), Dear(layers=2)],
    ids=str,
)
def test_seconds_of_a_step(schedule: Schedule, method: Method, gbit: float) -> None:
    network = Network(alpha=1e-4, gbit=gbit)
    cluster = SimulatedCluster(WORKERS, network, count_local=False, profile=PROFILE)
    loop = Loop(schedule, cluster, method=method)
    loop.run(range(3))
    marks = []
    for step in range(3, 6):
        loop.step(step)
        marks.append(cluster.seconds())
    expected = predicted(schedule.name, method, network, loop.synchronizer.partition).seconds
    assert marks[2] - marks[1] == pytest.approx(marks[1] - marks[0], rel=1e-3)
    # Blocks differ by an entry where P does not divide a group, and a slot's padding is not in the formula.
    assert marks[2] - marks[1] == pytest.approx(expected, rel=0.04)


def test_overlap_pays() -> None:
    """On a balanced network, DeAR is faster than WFBP, and WFBP is faster than one synchronization at the end."""
    seconds = {}
    for schedule in (AfterBackward(), Wfbp(bucket_mb=0), Dear(threshold_mb=0)):
        cluster = SimulatedCluster(WORKERS, Network(alpha=1e-5, gbit=0.004), count_local=False, profile=PROFILE)
        Loop(schedule, cluster).run(range(5))
        seconds[schedule.name] = cluster.seconds()
    assert seconds["dear"] < seconds["wfbp"] < seconds["after_backward"]
