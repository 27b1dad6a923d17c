"""The figure and the tables of several tasks, from records of a toy task."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from scripts import docs, learning
from scripts.evidence import overviews
from scripts.evidence.overviews import gap, losses_of
from scripts.evidence.plans import Line, Overview, Task, first_recorded, overview_in
from scripts.exhibits.charts.style import looks
from scripts.exhibits.records import Record, Records, on_record
from scripts.exhibits.tables import markdown
from spardl.basics.errors import ConfigError
from tests.support.driver import ROOT

NAMES = ("dense", "alone", "published", "1%", "4 bits")
LINES = tuple(Line(name, (f"row={number}",), (0.1,)) for number, name in enumerate(NAMES))
TOY = Task("toy", "a toy", ("x=1",), "loss", True, (1, 2), LINES)
PICTURES = Task("pictures", "pictures", ("x=2",), "accuracy", False, (1,), LINES[:4])
OVERVIEW = Overview(
    {"toy": "Toy, 3 steps", "pictures": "Pictures"},
    [TOY, PICTURES],
    {"SparDL": [["4 bits", "1%"], ["published"]], "PowerSGD": [["1%"]]},
    [TOY, PICTURES],
    {"1%": ["1%"], "best": ["4 bits", "1%"]},
    [TOY, PICTURES],
    ["dense", "1%", "4 bits", "alone"],
)


def made(task: Task, finals: dict[str, list[float]]) -> Records:
    """Records of some rows, one value of the metric per seed; 1.3% of dense's bytes are sent."""
    found = {}
    for name, values in finals.items():
        for seed, value in zip(task.seeds, values, strict=False):
            command = task.training(task.line(name), 0.1, seed).command
            figures = {"final": {task.metric: value}, "step_bytes": 13.0, "step_bytes_dense": 1000.0}
            found[command] = Record(command, {"id": hashlib.sha256(command.encode()).hexdigest(), **figures})
    return found


TOYS = made(TOY, {"dense": [1.0, 2.0], "alone": [2.0, 3.0], "1%": [1.25, 2.75], "published": [2.5]})
RECORDS = {**TOYS, **made(PICTURES, {"dense": [0.9], "alone": [0.7], "1%": [0.85]})}


def test_marks_and_levels_of_each_panel() -> None:
    toy, pictures = overviews.panels(OVERVIEW, RECORDS)
    assert (toy.title, toy.metric, toy.dense, toy.alone) == ("Toy, 3 steps", "loss", 1.5, 2.5)
    assert toy.marks["SparDL"] == [(pytest.approx(1.3), [1.25, 2.75]), (pytest.approx(1.3), [2.5])]
    assert list(pictures.marks) == ["SparDL", "PowerSGD"]
    assert (pictures.dense, pictures.alone) == (0.9, 0.7)


@pytest.mark.parametrize("gone", ["dense", "alone"])
def test_no_panel_without_dense_and_a_single_worker(gone: str) -> None:
    kept = {command: each for command, each in RECORDS.items() if f"row={NAMES.index(gone)} " not in command}
    assert overviews.panels(OVERVIEW, kept) == []


def test_what_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure

    drawn: list[Any] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, out, **_: (drawn.append(self), out.write(b"PNG")))
    assert overviews.figure(OVERVIEW, RECORDS) == b"PNG"
    toy, pictures, empty = drawn[0].axes
    assert [line.get_ydata()[0] for line in toy.lines] == [1.5, 2.5, 2.0, 2.5, 2.0]
    assert [list(line.get_ydata()) for line in pictures.lines[:2]] == [[0.9, 0.9], [0.7, 0.7]]
    assert (toy.get_xscale(), toy.get_title(loc="left")) == ("log", "Toy, 3 steps\nloss")
    low, high = toy.get_xlim()
    assert low < 1.3 < high
    assert pictures.get_xlim() == (low, high)
    assert not empty.axison
    assert [text.get_text() for text in drawn[0].legends[0].get_texts()] == [
        "SparDL",
        "PowerSGD",
        "dense",
        "single worker",
    ]


def test_the_page_shows_its_figure() -> None:
    plan, name = overview_in(learning.PLANS), "docs/images/learning.png"
    assert len({look.color for look in looks(plan.marks).values()}) == len(plan.marks) <= 5
    assert name in docs.FIGURES
    assert "(../images/learning.png)" in (ROOT / learning.PAGE).read_text()
    assert len(overviews.panels(plan, on_record(ROOT / "docs" / "results" / "learning.jsonl"))) >= 11


def test_costs_over_shared_seeds() -> None:
    lines = markdown(overviews.costs(OVERVIEW, RECORDS)).splitlines()
    assert lines[0] == "| training | 1% | best |"
    assert lines[2:] == [
        "| Toy, 3 steps | +0.500 nats (2 seeds), 50% | +0.500 nats (2 seeds), 50% |",
        "| Pictures | +5.0 points (1 seed), 75% | +5.0 points (1 seed), 75% |",
    ]
    assert markdown(overviews.costs(OVERVIEW, {})).splitlines()[2:] == []
    fewer = {**RECORDS, **made(TOY, {"alone": [2.0]})}
    del fewer[TOY.training(TOY.line("alone"), 0.1, 2).command]
    (toy, _) = markdown(overviews.costs(OVERVIEW, fewer)).splitlines()[2:]
    assert toy.startswith("| Toy, 3 steps | +0.500 nats (2 seeds), 75% (1 seed) | ")


def test_an_ablation_compares_first_seeds() -> None:
    pictures = PICTURES.training(LINES[3], 0.1, 1).command
    kept = {command: each for command, each in RECORDS.items() if command != pictures}
    plan = OVERVIEW._replace(ablation=["dense", "1%", "published", "4 bits", "alone"])
    assert markdown(overviews.ablation(plan, kept)).splitlines() == [
        "|  | Toy, 3 steps | Pictures | sent / dense |",
        "| --- | --- | --- | --- |",
        "| dense | 1 | 0.9 | 1.30% |",
        "| 1% | 1.25 (75%) |  | 1.30% |",
        "| published | 2.5 (worse than a single worker) |  | 1.30% |",
        "| alone | 2 | 0.7 | 0 |",
    ]


def test_the_first_row_with_a_record() -> None:
    assert first_recorded(TOY, ["4 bits", "none", "published", "1%"], RECORDS) == "published"
    assert first_recorded(TOY, ["4 bits"], RECORDS) is None


def test_the_gap_needs_a_seed_of_all_three() -> None:
    losses = losses_of(TOY, RECORDS)
    assert gap("1%", losses) == "50%"
    assert gap("published", losses) == "worse than a single worker"
    assert gap("dense", losses) == gap("4 bits", losses) == ""


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"titles": {"toy": "", "b": ""}}, "refers to task 'b', which does not exist"),
        ({"titles": {}}, "refers to title 'toy'"),
        ({"figure": {"SparDL": [["x"]]}}, "refers to row 'x'"),
        ({"costs": {"tasks": [], "methods": {"1%": ["y"]}}}, "refers to row 'y'"),
        ({"ablation": {"tasks": ["toy"], "rows": ["published"]}}, "refers to row of the ablation 'published'"),
    ],
)
def test_overviews_of_what_does_not_exist(tmp_path: Path, changed: dict[str, Any], words: str) -> None:
    task = {"title": "", "words": "", "metric": "loss", "lower": True, "seeds": [1], "compared": {}}
    content = {
        "rows": {"dense": "", "alone": "", "published": ""},
        "titles": {"toy": "Toy"},
        "figure": {"SparDL": [["published"]]},
        "costs": {"tasks": ["toy"], "methods": {"1%": ["published"]}},
        "ablation": {"tasks": ["toy"], "rows": ["dense"]},
        "tasks": {"toy": {**task, "rates": {"dense": [1], "alone": [1]}}},
    }
    plan = tmp_path / "plan.yaml"
    plan.write_text(json.dumps(content))
    assert [each.name for each in overview_in(plan).panels] == ["toy"]
    plan.write_text(json.dumps({**content, **changed}))
    with pytest.raises(ConfigError, match=words):
        overview_in(plan)
