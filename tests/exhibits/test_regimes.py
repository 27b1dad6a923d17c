"""Where a method is how much faster: by hand, as tables and as maps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from scripts.exhibits import base, jobs
from scripts.exhibits.charts import curves
from scripts.exhibits.kinds import gpu, regimes
from scripts.exhibits.papers.catalogue import catalogue
from spardl.clusters import Network
from spardl.clusters.network import PRESETS

EXHIBIT = catalogue()["spardl.regimes"]
# Rounds, and bytes for each entry.
COUNTED = {
    "SparDL, d = 1": (8, 0.08),
    "SparDL, B-SAG, d = 7": (5, 0.1),
    "Ok-Topk": (16, 0.1),
    "TopkDSA": (16, 0.4),
    "TopkA": (4, 0.7),
    "gTopk": (8, 0.4),
    "dense": (26, 7.4),
}


@pytest.fixture(params=["smoke", "laptop"])
def results(request: pytest.FixtureRequest) -> Iterator[tuple[str, base.Results]]:
    found = {}
    for name, (rounds, each) in COUNTED.items():
        line = {"fixed": 0.0, "per_entry": each}
        kinds = [{"share": 1.0, "rounds": rounds, "words": line, "bytes": line}]
        found[EXHIBIT.job(request.param, name)] = jobs.Outcome(Path("x"), {"kinds": kinds})
    return request.param, base.Results(Path("x"), found)


def rows_of(table: Any) -> dict[str, dict[str, Any]]:
    return {row.name: dict(zip(table.columns[1:], row.cells, strict=True)) for row in table.rows}


def test_formulas_by_hand() -> None:
    """14 workers, k = n/100: rounds, and words that a worker sends."""
    found = {name: (each.rounds, 100 * each.words) for name, each in EXHIBIT.formulas.items()}
    assert found["SparDL, d = 1"] == pytest.approx((8, 4 * 13 / 14))
    assert found["SparDL, B-SAG, d = 7"] == pytest.approx((5, 40 / 14))
    assert found["Ok-Topk"] == pytest.approx((35.61, 6 * 13 / 14), rel=1e-3)
    (kind,) = EXHIBIT.formulas["Ok-Topk"].cycle
    assert kind["bytes"]["per_entry"] == 4 * kind["words"]["per_entry"]


@pytest.mark.parametrize(
    ("gains", "wanted"),
    [
        ((1, 1, 1), "nowhere"),
        ((5, 5, 5), "everywhere"),
        ((1, 5, 5), "from 2 on"),
        ((5, 5, 1), "up to 2"),
        ((1, 5, 1), "from 2 on up to 2"),
        ((5, 1, 5), "up to 1, and from 3 on"),
    ],
)
def test_where_a_gain_is_reached(gains: tuple[float, ...], wanted: str) -> None:
    assert regimes.reached(4.9, list(enumerate(gains, 1)), str) == wanted


def test_the_fastest_of_ours_counts(results: tuple[str, base.Results]) -> None:
    costs = EXHIBIT.costs(*results)
    assert costs is not None
    free = Network(alpha=0, gbit=1)
    assert costs.gain("Ok-Topk", "communication", "bert", free) == pytest.approx(0.1 / 0.08)
    slow = Network(alpha=10, gbit=1000)
    assert costs.gain("Ok-Topk", "communication", "bert", slow) == pytest.approx(16 / 5, rel=1e-3)
    assert costs.strongest("communication", "bert", free) == "Ok-Topk"
    assert costs.strongest("communication", "bert", slow) == "TopkA"
    assert costs.gain("dense", "total", "vgg16", free) < costs.gain("dense", "communication", "vgg16", free)


def test_tables_by_hand(results: tuple[str, base.Results]) -> None:
    reach, published = EXHIBIT.tables(*results)
    found = rows_of(reach)
    assert list(found) == ["Ok-Topk", "Ok-Topk, by formulas", "TopkDSA", "TopkA", "gTopk", "dense"]
    only = [cell.value for cell in found["TopkA"].values()][:2]
    assert only == pytest.approx([0.7 / 0.08, 4 / 5])
    shares = {name: cells["4.9x: latency over the gradient's seconds on a link"].text for name, cells in found.items()}
    assert shares["Ok-Topk"] == "nowhere"
    assert shares["dense"] == "everywhere"
    # 35.6 t + 0.0557 = 4.9 (5 t + 0.02857): the seconds of the gradient's bytes are 1, and a word is four of them.
    share = (4.9 * 0.0285714 - 0.0557143) / (35.6147 - 4.9 * 5)
    assert shares["Ok-Topk, by formulas"] == f"from {100 * share:.2g}% on"
    assert shares["TopkDSA"].startswith("up to ")
    cells = rows_of(published)["VGG-16 on CIFAR-10, ethernet_1g"]
    entries, alpha, beta = gpu.MODELS["vgg16"].entries, 50e-6, 8e-9
    ours = 5 * alpha + 0.1 * entries * beta, 8 * alpha + 0.08 * entries * beta
    rival = 16 * alpha + 0.1 * entries * beta
    assert cells["messages, over Ok-Topk"].value == pytest.approx(rival / min(ours))
    assert cells["messages, over the fastest sparse method"].text.endswith("(Ok-Topk)")
    assert cells["updates, over dense"].value < cells["messages, over dense"].value
    assert len(published.rows) == len(EXHIBIT.settings) == 9


def test_counts_are_those_of_the_breakdown() -> None:
    """So nothing is counted twice."""
    breakdown = catalogue()["spardl.breakdown"]
    assert {job.id for job in EXHIBIT.jobs("laptop")} == {job.id for job in breakdown.jobs("laptop")}


def test_a_failure_shows(results: tuple[str, base.Results]) -> None:
    scale, good = results
    lost = EXHIBIT.job(scale, "gTopk")
    partly = replace(good, found={job: outcome for job, outcome in good.found.items() if job != lost})
    (table,) = EXHIBIT.tables(scale, partly)
    assert [row.name for row in table.rows] == ["gTopk"]
    assert table.rows[0].cells[0].text == "not run yet"
    assert EXHIBIT.pictures(scale, partly) == []


def test_pictures(results: tuple[str, base.Results]) -> None:
    reach, *maps = EXHIBIT.pictures(*results)
    assert len({picture.file for picture in (reach, *maps)}) == 1 + 5 * len(EXHIBIT.models)
    figure = Figure(layout="constrained")
    reach.draw(figure)
    (axes,) = figure.axes
    assert set(reach.key) >= {
        "Ok-Topk",
        "Ok-Topk, by formulas",
        "dense",
        "4.9\u00d7, published",
    }
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    costs = EXHIBIT.costs(*results)
    assert costs is not None
    for picture, rival in ((maps[4], "Ok-Topk"), (maps[8], "dense")):
        assert picture.title == "2.56 million parameters: LSTM on IMDB"
        figure = Figure(layout="constrained")
        picture.draw(figure)
        figure.draw_without_rendering()
        (axes,) = figure.axes
        written = [text.get_text() for text in axes.texts]
        assert len(written) == len(EXHIBIT.latencies) * len(EXHIBIT.bandwidths)
        gain = costs.gain(rival, "communication", "lstm_imdb", PRESETS["ethernet_1g"])
        place = EXHIBIT.latencies.index(50e-6) * len(EXHIBIT.bandwidths) + EXHIBIT.bandwidths.index(1)
        assert written[place] == f"{gain:.3g}\u00d7"
        (frame,) = [patch for patch in axes.patches if not patch.get_fill()]
        assert frame.get_bbox().contains(*axes.texts[place].get_position())
        boxes = [text.get_window_extent() for text in axes.texts]
        assert not any(one.overlaps(other) for one, other in combinations(boxes, 2))


def test_equal_factors_have_equal_colours_in_all_panels() -> None:
    drawn = []
    for values in ([[1.0, 2.0]], [[2.0, 4.0]]):
        figure = Figure(layout="constrained")
        curves.draw_fields(figure, curves.Fields(values, ("a", "b"), ("c",), [["", ""]]), ("x", "y"), span=(1.0, 4.0))
        figure.draw_without_rendering()
        drawn.append([tuple(each) for each in figure.axes[0].collections[0].get_facecolors()])
    assert drawn[0][1] == drawn[1][0]
    assert drawn[0][0] != drawn[1][1]
