"""How h finds its place: by hand, and of a training."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from matplotlib.figure import Figure

from scripts.exhibits import base, jobs
from scripts.exhibits.kinds import adaptation, watched
from scripts.exhibits.papers.catalogue import catalogue
from tests.support import harness


def test_to_note_changes_nothing() -> None:
    """Bits of averages and what h becomes are those of a method that nobody looks at."""
    watch = adaptation._Watch()
    plain, noted = harness.spardl(0.2, teams=2), watched.Watched.of(harness.spardl(0.2, teams=2), watch)
    benches = [harness.Bench.build(method, 4, 400) for method in (plain, noted)]
    source = torch.Generator().manual_seed(1)
    for _ in range(5):
        gradients = [torch.randn(400, generator=source, dtype=torch.float64) for _ in range(4)]
        one, other = (bench.step([each.clone() for each in gradients]) for bench in benches)
        assert all(harness.same_bits(*pair) for pair in zip(one, other, strict=True))
    for state, rank in zip(benches[0].states, range(4), strict=True):
        assert (state.communication.h, state.communication.step) == (watch.states[rank].h, watch.states[rank].step)
        sent = watch.states[rank].sent
        assert len(sent) == 5
        assert sent[0].h == 20  # the least: k of a block over d
        assert all(each.h <= each.union <= 2 * each.h for each in sent)
        assert {each.k for each in sent} == {40}


def test_tables_and_pictures_by_hand() -> None:
    exhibit = catalogue()["spardl.adaptation"]
    (job,) = exhibit.jobs("smoke")
    unions = [5.0] * 4 + [10.0] * 16
    data = {"h": [[4, 6]] * 10 + [[8, 8]] * 10, "union": [[union] * 2 for union in unions], "k": [[10, 10]] * 20}
    results = base.Results(Path("x"), {job: jobs.Outcome(Path("x"), data)})
    (table,) = exhibit.tables("smoke", results)
    # Of the windows of ten steps, those that begin at 0 and 1 have a mean of 0.8 and 0.85, at 2 of 0.9.
    assert [cell.value for cell in table.rows[0].cells] == pytest.approx([10, 5, 8, 0.5, 1.0, 2])
    for picture, shares in zip(
        exhibit.pictures("smoke", results), ([0.5] * 10 + [0.8] * 10, [union / 10 for union in unions]), strict=True
    ):
        figure = Figure(layout="constrained")
        picture.draw(figure)
        assert list(figure.axes[0].lines[0].get_ydata()) == shares
        assert "d = 2" in picture.key
    (missing,) = exhibit.tables("smoke", base.Results(Path("x"), {}))
    assert missing.rows[0].cells[0].text == "not run yet"


def test_what_never_settles_says_so() -> None:
    assert adaptation._settled([0.5] * 20).text == "not yet"
    assert adaptation._settled([1.0] * 3).value == 0


@pytest.mark.slow
def test_a_training() -> None:
    (job,) = catalogue()["spardl.adaptation"].jobs("smoke")
    found = job.function(**dict(job.arguments))
    assert json.loads(json.dumps(found)) == found
    assert [len(found[name]) for name in ("h", "union", "k")] == [3, 3, 3]
    assert {len(step) for step in found["h"]} == {4}
