"""What pages quote of exhibits is what the records give."""

from __future__ import annotations

import re
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from scripts import learning
from scripts.evidence.plans import tasks_in
from scripts.exhibits import base
from scripts.exhibits.measures import metric_curve, shown_interval
from scripts.exhibits.papers.catalogue import catalogue
from scripts.exhibits.records import SHIPPED, RecordStore, on_record
from scripts.exhibits.tables import Cell, Row, Table
from scripts.exhibits.tried import reached
from scripts.pages import quotes
from scripts.pages.marked import without_missing
from spardl.basics.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
PAGE = """# Page
<!-- some.thing, smoke, table 2: written by scripts/docs.py -->
old
<!-- end of some.thing, smoke, table 2 -->
after
"""


class Made:
    """An exhibit with two tables and no work."""

    def jobs(self, scale: str) -> list[Any]:
        return []

    def tables(self, scale: str, results: Any) -> list[Table]:
        return [Table(scale, ("row", "figure"), [Row(name, [Cell("1")], [])]) for name in ("first", "second")]


EXHIBITS: Any = {"some.thing": Made()}


def test_a_table_is_put_between_its_marks(tmp_path: Path) -> None:
    made = quotes.page(PAGE, EXHIBITS, tmp_path)
    assert made == PAGE.replace("old\n", "\n| row | figure |\n| --- | --- |\n| second | 1 |\n\n")
    assert quotes.page(made, EXHIBITS, tmp_path) == made
    assert quotes.page("no marks", EXHIBITS, tmp_path) == "no marks"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (PAGE.replace("some.thing", "other.thing"), "other.thing, smoke, table 2: unknown exhibit or size"),
        (PAGE.replace("smoke", "morning"), "some.thing, morning, table 2: unknown exhibit or size"),
        (PAGE.replace("table 2", "table 3"), "table 3: some.thing has tables 1 to 2 at this size"),
        (PAGE.replace("end of", "the end of"), "a page must have one section"),
    ],
)
def test_marks_that_name_nothing_are_refused(wrong: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        quotes.page(wrong, EXHIBITS, tmp_path)


def test_pages_leave_out_missing_runs() -> None:
    rows = [Row("a", [Cell("1"), Cell("1, not run yet")], []), Row("b", [Cell("not run yet"), Cell("not run")], [])]
    found = without_missing(Table("", ("row", "mean", "seeds"), rows))
    assert [(row.name, *(cell.text for cell in row.cells)) for row in found.rows] == [("a", "1", "1")]


def test_intervals_stay_in_the_range_of_the_metric() -> None:
    assert shown_interval([0.99, 1.0, 1.0], "accuracy").endswith(" to 1")
    assert shown_interval([0.99, 1.0, 1.0], "loss").endswith(" to 1.011")


def test_the_readme_table_has_the_figures_of_the_records() -> None:
    text = (ROOT / "README.md").read_text()
    rows = re.findall(r"^\| (.+) \| \**([\d.]+)\** \| \**([\d.]+)%?\** \|$", text, re.MULTILINE)
    assert [name for name, _, _ in rows] == list(README_ROWS)
    task = next(task for task in tasks_in(learning.PLANS) if task.name == "gpt_chars_long")
    records = on_record(ROOT / SHIPPED / "learning.jsonl")
    for name, loss, sent in rows:
        found = task.results(task.line(README_ROWS[name]), records)
        assert found, name
        runs = found[1].values()
        assert f"{mean(each.final('loss') for each in runs):.3f}" == loss, name
        digits = len(sent.partition(".")[2])
        assert round(100 * mean(each.share for each in runs), digits) == float(sent), name


def test_the_readme_speedups_are_those_of_the_records() -> None:
    """Mean and range over seeds of the seconds that DDP needs to reach the target, relative to SparDL."""
    race = catalogue()["spardl.time_to_accuracy"]
    course = base.at("evening", race.courses)
    results = base.Results.on_disk(ROOT, race.jobs("evening"), RecordStore(ROOT / SHIPPED))
    entrants = {entrant.name: entrant for entrant in course.entrants}
    target, curves = race.target(course, results), {}
    assert target is not None
    for name in ("dense DDP", "PowerSGD (torch)", "SparDL, our recipe"):
        outcomes = race.outcomes(course, min(course.gbits), entrants[name], results)
        curves[name] = [reached(metric_curve(each.data, each.events("eval")), target) for each in outcomes]
    dense, power, ours = (curves[name] for name in curves)
    ratios = [one / other for one, other in zip(dense, ours, strict=True)]
    text = (ROOT / "README.md").read_text()
    assert f"{mean(dense) / mean(ours):.1f}x faster than DDP ({min(ratios):.1f}x to {max(ratios):.1f}x by seed)" in text
    assert f"{mean(power) / mean(ours):.1f}x faster than PowerSGD" in text


# The rows of the README's table, in order, and their names in scripts/evidence/learning.yaml.
README_ROWS = {
    "dense": "dense",
    "torch PowerSGD, rank 4": "powersgd",
    "SparDL, 1%": "Adam moved, beta2 of 0.99, decay 0.98, quota per chunk",
    "SparDL, 1%, values in 4 bits": "Adam moved, decay 0.98, values in 4 bits",
    "single worker, no communication": "alone",
}
