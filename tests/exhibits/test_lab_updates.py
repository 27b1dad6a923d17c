"""Whole updates in the network lab: ratios turn by turn, at several numbers of workers."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from scripts.exhibits import base, jobs
from scripts.exhibits.kinds import lab, lab_updates
from scripts.exhibits.kinds.gpu import MODELS
from scripts.exhibits.papers.catalogue import catalogue
from spardl.clusters.profile import Profile
from tests.support.labs import in_a_lab

ROOT = Path(__file__).resolve().parents[2]
EXHIBIT = catalogue()["spardl.lab_updates"]


def answer(ours: list[float], other: list[float]) -> dict[str, Any]:
    seconds = {"spardl": ours, "oktopk": other, "topka": ours, "none": [10 * each for each in ours]}
    rows = [{"method": name, "seconds": each, "predicted": sum(each) / 10} for name, each in seconds.items()]
    return {"rows": rows, "cores": 2}


def results_of(folder: Path, scale: str, *answers: Any) -> base.Results:
    pairs = zip(EXHIBIT.jobs(scale), answers, strict=False)
    return base.Results(folder, {job: jobs.Outcome(folder, data) for job, data in pairs})


def test_ratios_are_turn_by_turn(tmp_path: Path) -> None:
    results = results_of(tmp_path, "smoke", answer([0.1, 0.2, 0.4], [0.3, 0.4, 0.4]))
    ratios, seconds = EXHIBIT.tables("smoke", results)
    (row,) = ratios.rows
    cells = dict(zip(ratios.columns[1:], row.cells, strict=True))
    assert row.name == "P = 2, 1 Gbit/s"
    # 3, 2 and 1 times as long: their median, where medians of seconds would have it, too, but not least and most.
    assert cells["SparDL over Ok-Topk"].text == "2x (1..3)"
    assert cells["SparDL over dense"].value == pytest.approx(10)
    assert cells["SparDL over Ok-Topk, predicted"].value == pytest.approx(0.11 / 0.07)
    assert cells["cores"].value == 2
    cells = dict(zip(seconds.columns[1:], seconds.rows[0].cells, strict=True))
    assert cells["SparDL, ms"].value == pytest.approx(200)
    assert cells["Ok-Topk, predicted"].value == pytest.approx(110)
    assert cells["every turn"].text.startswith("SparDL: 100, 200, 400; Ok-Topk: ")


def test_what_was_not_measured_says_so(tmp_path: Path) -> None:
    results = results_of(tmp_path, "laptop", answer([0.1] * 3, [0.3] * 3))
    for table in EXHIBIT.tables("laptop", results):
        assert [row.cells[0].text == "not run yet" for row in table.rows] == [False, *[True] * 5]
    (picture,) = EXHIBIT.pictures("laptop", results)
    assert picture.title == "1 Gbit/s"


def test_the_picture_has_measured_and_predicted_ratios(tmp_path: Path) -> None:
    answers = [answer([0.1, 0.1, 0.2], [0.1 * place, 0.2 * place, 0.2 * place]) for place in range(1, 7)]
    fast, slow = EXHIBIT.pictures("laptop", results_of(tmp_path, "laptop", *answers))
    assert (fast.title, slow.title) == ("1 Gbit/s", "0.1 Gbit/s")
    figure = Figure(layout="constrained")
    slow.draw(figure)
    (axes,) = figure.axes
    assert set(slow.key) == {"Ok-Topk", "TopkA", "dense"}
    assert axes.get_yscale() == "log"
    lines = [line for line in axes.lines if line.get_linestyle() == ":"]
    assert [list(line.get_xdata()) for line in lines] == [[4, 8, 14]] * 3
    assert list(lines[0].get_ydata()) == pytest.approx([0.5 * place / 0.4 for place in (2, 4, 6)])


def test_jobs_can_be_typed_and_sleep_as_long_as_the_map_assumes() -> None:
    places = [lab.netlab.parse(shlex.split(job.command)[2:]) for job in EXHIBIT.jobs("evening")]
    assert [(each.workers, each.gbit) for each in places] == [(4, 1), (4, 0.1), (8, 1), (8, 0.1), (14, 1), (14, 0.1)]
    words = places[0].command
    assert float(words[words.index("--compute") + 1]) == pytest.approx(MODELS["lstm_imdb"].seconds, rel=0.01)
    path = words[words.index("--model") + 1].removeprefix("profile:")
    assert sum(Profile.read(ROOT / path).entries) == MODELS["lstm_imdb"].entries
    assert all(job.alone for job in EXHIBIT.jobs("evening"))
    names = [*catalogue()]
    assert names.index("spardl.lab_updates") == names.index("spardl.regimes") + 1


@in_a_lab
def test_updates_in_a_lab() -> None:
    (job,) = EXHIBIT.jobs("smoke")
    found = lab_updates.timed_updates(**dict(job.arguments))
    assert json.loads(json.dumps(found)) == found
    by_name = {row["method"]: row for row in found["rows"]}
    assert list(by_name) == list(EXHIBIT.methods.values())
    for row in by_name.values():
        assert len(row["seconds"]) == 2
        assert min(row["seconds"]) > 0.02  # the passes
        assert row["predicted"] > 0.02
