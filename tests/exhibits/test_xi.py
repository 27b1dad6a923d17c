"""What local selection costs: by hand, and of a training."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from matplotlib.figure import Figure

from scripts.exhibits import base, jobs
from scripts.exhibits.kinds import watched, xi
from scripts.exhibits.papers.catalogue import catalogue
from spardl.communicators import OkTopk
from spardl.compressors import ReusedThreshold
from spardl.method.method import Method
from spardl.method.residuals import PartialResidual
from tests.support import harness


def test_distances_by_hand() -> None:
    vectors = torch.tensor([[4.0, 0, 3, 0], [0, -4.0, 3, 0]])
    average = torch.tensor([0.0, 0.0, 3.0, 0.0])
    gradient = torch.tensor([0.0, 0.0, 0.0, 2.0])
    # The largest of the mean (2, -2, 3, 0) is 3; alone, each worker selects a 4, of whose means 2 one is kept.
    own, sent = xi.distance(vectors, average, gradient, 1)
    assert own == pytest.approx((3**2 + 2**2) ** 0.5 / 2)
    assert sent == 0


def test_thresholds_by_hand() -> None:
    vector = torch.tensor([0.5, -3.0, 2.0, 1.0])
    found = xi.thresholds_of(vector, torch.tensor([1, 2, 3]), 2)
    assert (found["exact"], found["used again"]) == (2.0, 1.0)
    # Half of the entries lie beyond 0.6745 standard deviations of a normal distribution.
    assert found["normal fit"] == pytest.approx(0.125 + 0.67449 * vector.std().item(), rel=1e-4)


def test_gradients_are_told_from_residuals() -> None:
    """Equal workers lose nothing by selecting alone; and the norm is the gradient's, whatever waits."""
    method = Method(ReusedThreshold(0.1, period=1), OkTopk(threshold_period=1), PartialResidual())
    trace = xi._Selections(last=2)
    bench = harness.Bench.build(watched.Watched.of(method, trace), 3, 100)
    source = torch.Generator().manual_seed(1)
    for step in range(3):
        gradient = torch.randn(100, generator=source, dtype=torch.float64)
        bench.step([gradient.clone() for _ in range(3)])
        waiting = trace.vectors[0] - gradient
        assert torch.count_nonzero(waiting) == (0 if step == 0 else pytest.approx(90, abs=10))
    assert trace.wanted == 10
    assert [own for own, _ in trace.xi] == pytest.approx([0, 0, 0])
    assert [sent for _, sent in trace.xi] == pytest.approx([0, 0, 0], abs=1e-9)
    assert sum(trace.picture["counts"]) == 100
    apart = [torch.randn(100, generator=source, dtype=torch.float64) for _ in range(3)]
    before = [state.memory.clone() for state in bench.states]
    bench.step(apart)
    expected = xi.distance(
        torch.stack([one + other for one, other in zip(before, apart, strict=True)]),
        torch.zeros(100, dtype=torch.float64),
        torch.stack(apart).mean(0),
        10,
    )
    assert trace.xi[3][0] == pytest.approx(expected[0])
    assert expected[0] > 0


def test_of_some_steps_only() -> None:
    """What is found of a step does not depend on whether those before it were looked at."""
    method = Method(ReusedThreshold(0.1, period=1), OkTopk(threshold_period=1), PartialResidual())
    watchers = xi._Selections(last=7), xi._Selections(last=7, every=3)
    for watcher in watchers:
        bench = harness.Bench.build(watched.Watched.of(method, watcher), 3, 100)
        source = torch.Generator().manual_seed(2)
        for _ in range(8):
            bench.step([torch.randn(100, generator=source, dtype=torch.float64) for _ in range(3)])
    each, some = watchers
    assert (len(each.xi), len(some.xi)) == (8, 3)
    assert some.xi == each.xi[::3]
    assert some.picture == each.picture


def test_tables_and_pictures_by_hand() -> None:
    exhibit = catalogue()["oktopk.xi"]
    (job,) = exhibit.jobs("smoke")
    cuts = dict(zip(xi.THRESHOLDS, (2.0, 1.0, 3.0), strict=True))
    selected = dict(zip(xi.THRESHOLDS, (10, 15, 5), strict=True))
    last = {"scale": 0.5, "counts": [1.0] * xi.BINS, "cuts": cuts, "selected": selected}
    data = {"k": 10, "xi": [0.1, 0.2, 0.3, 0.4], "sent": [0.2, 0.2, 0.4, 0.6], "last": last}
    results = base.Results(Path("x"), {job: jobs.Outcome(Path("x"), data)})
    losses, places = exhibit.tables("smoke", results)
    assert [cell.value for cell in losses.rows[0].cells] == pytest.approx([0.25, 0.4, 0.35, 0.5])
    assert [cell.value for cell in places.rows[0].cells] == [10, 2.0, 1.0, 3.0, 1.0, 1.5, 0.5]
    assert losses.rows[0].name.startswith("ResNet-20 on digits")
    lines, bars = exhibit.pictures("smoke", results)
    figure = Figure(layout="constrained")
    lines.draw(figure)
    assert list(figure.axes[0].lines[0].get_ydata()) == data["xi"]
    figure = Figure(layout="constrained")
    bars.draw(figure)
    assert sorted(line.get_xdata()[0] for line in figure.axes[0].lines) == [-6, -4, -2, 2, 4, 6]
    missing = exhibit.tables("smoke", base.Results(Path("x"), {}))
    assert missing[0].rows[0].cells[0].text == "not run yet"


@pytest.mark.slow
def test_a_training() -> None:
    (job,) = catalogue()["oktopk.xi"].jobs("smoke")
    found = job.function(**dict(job.arguments))
    assert json.loads(json.dumps(found)) == found
    assert len(found["xi"]) == 3
    assert all(0 < value < 2 for value in found["xi"])
    assert found["last"]["selected"]["exact"] >= found["k"]
