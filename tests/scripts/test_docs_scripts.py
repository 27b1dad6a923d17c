"""Generated pages are current: scripts/docs.py, quoted tables, and break-even bandwidths."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from scripts import docs, learning
from scripts.exhibits import base
from scripts.exhibits.catalogue import catalogue
from scripts.exhibits.measures import metric_curve, reached, shown_interval
from scripts.exhibits.records import SHIPPED, RecordStore, on_record
from scripts.exhibits.tables import Cell, Row, Table, without_missing
from scripts.pages import break_even as tables
from scripts.pages.exhibits import quoting_page
from spardl.basics.errors import ConfigError
from spardl.clusters import Network
from spardl.clusters.profile import Profile
from spardl.diagnostics import Advice, Choice
from spardl.schedules.fusion import Linear

# These pages take from ten seconds to minutes.
SLOW = ("methods", "tables/break-even", "tables/claims", "tables/measurements", "tables/results")
NAMES = "spardl/method/names.py"
HOOKS = "docs/tables/torch-hooks.md"


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two generated files in a tree of their own."""
    for name in (NAMES, HOOKS):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text((ROOT / name).read_text())
    monkeypatch.setattr(docs, "ROOT", tmp_path)
    return tmp_path


def _marked(name: str) -> object:
    slow = [pytest.mark.slow, pytest.mark.timeout(900)] if name in {f"docs/{page}.md" for page in SLOW} else []
    return pytest.param(name, marks=slow)


@pytest.mark.parametrize("name", [_marked(name) for name in docs.pages()])
def test_the_page_is_current(name: str, program: Any) -> None:
    assert program("docs", "--check", name) == (0, "", "")


def test_an_edited_page_is_reported_and_written_again(tree: Path, program: Any) -> None:
    before, edited = (tree / HOOKS).read_text(), "| 1.00 |"
    assert edited in before
    (tree / HOOKS).write_text(before.replace(edited, "| 0.50 |"))
    command = f"python scripts/docs.py --write {HOOKS}"
    reported = f"error: {HOOKS} is out of date; write it with {command}\n"
    assert program("docs", "--check", NAMES, HOOKS) == (1, "", reported)
    inode = (tree / NAMES).stat().st_ino
    assert program("docs", "--write", NAMES, HOOKS).code == 0
    assert (tree / HOOKS).read_text() == before
    assert (tree / NAMES).stat().st_ino == inode
    assert program("docs", "--check", NAMES, HOOKS) == (0, "", "")


def test_missing_files_are_reported(tree: Path, program: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    figure = "docs/images/frontier.png"
    (tree / NAMES).unlink()
    done = program("docs", "--check", NAMES, figure)
    assert done.code == 1
    assert [line.split("; ")[0] for line in done.err.splitlines()] == [
        f"error: {NAMES} is out of date",
        f"error: {figure} does not exist",
    ]
    (tree / "docs" / "images").mkdir()
    monkeypatch.setattr(docs, "FIGURES", {figure: lambda: b"drawn"})
    assert program("docs", "--write", NAMES, figure).code == 0
    assert (tree / figure).read_bytes() == b"drawn"
    assert (tree / NAMES).read_text() == (ROOT / NAMES).read_text()


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("README.md", "README.md is not a generated file; choose one from python scripts/docs.py --list"),
        (HOOKS, "a page must have one section '<!-- hooks: ... -->', got 0; add or remove one"),
    ],
)
def test_wrong_input_is_one_line(name: str, complaint: str, tree: Path, program: Any) -> None:
    (tree / HOOKS).write_text("no marks")
    assert program("docs", "--check", name) == (2, "", f"error: {complaint}\n")


def test_list_names_every_page_with_marks(program: Any) -> None:
    listed = {line.split()[0] for line in program("docs", "--list").out.splitlines()}
    pages = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    marked = {
        path.relative_to(ROOT).as_posix() for path in pages if ": written by scripts/docs.py -->" in path.read_text()
    }
    assert marked <= listed
    assert {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs" / "tables").glob("*.md")} <= listed
    templates = {path.relative_to(ROOT).as_posix().removesuffix(".j2") for path in (ROOT / "docs").rglob("*.j2")}
    assert templates <= listed
    assert all((ROOT / name).is_file() for name in listed)


def test_a_page_has_one_renderer(tree: Path) -> None:
    mark = "<!-- x.y, smoke, table 1: written by scripts/docs.py -->"
    (tree / HOOKS).write_text(mark)
    with pytest.raises(ConfigError, match=f"{HOOKS} is generated, so it must not quote tables of exhibits"):
        docs.pages()


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
    made = quoting_page(PAGE, EXHIBITS, tmp_path)
    assert made == PAGE.replace("old\n", "\n| row | figure |\n| --- | --- |\n| second | 1 |\n\n")
    assert quoting_page(made, EXHIBITS, tmp_path) == made
    assert quoting_page("no marks", EXHIBITS, tmp_path) == "no marks"


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
        quoting_page(wrong, EXHIBITS, tmp_path)


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
    task = next(task for task in learning.tasks_in(learning.PLANS) if task.name == "gpt_chars_long")
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


def advice(**seconds: float) -> Advice:
    """Returns advice about methods with these times, in seconds."""
    choices = [Choice(name, {}, "wfbp", taken, 0.0, 0.0) for name, taken in seconds.items()]
    ordered = tuple(sorted(choices, key=lambda choice: choice.seconds))
    return Advice(ordered, Network(0, 1), 4, 1000, 1.0, baseline=ordered[0])


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        ({"none": 4.0, "bf16": 3.0, "topka": 2.0, "spardl": 1.0}, "4x spardl"),
        ({"none": 4.0, "bf16": 2.0, "spardl": 1.95}, "2x bf16"),
        ({"none": 4.0, "bf16": 5.0, "spardl": 3.9}, "dense"),
        ({"none": 4.0, "bf16": 5.0, "spardl": 3.8}, "1.05x spardl"),
        ({"none": 4.0, "bf16": 3.9, "spardl": 9.0}, "dense"),
    ],
)
def test_the_least_that_is_lost_for_a_clear_gain(seconds: dict[str, float], said: str) -> None:
    assert tables.winner(advice(**seconds)) == said


def profile() -> Profile:
    return Profile.read(ROOT / "scripts" / "profiles" / "resnet50.json").scaled(0.2)


def line(fixed: float, per_entry: float) -> Callable[[str, Mapping[str, Any]], Linear]:
    """Of sparse methods; a cast takes nothing."""
    return lambda name, options: Linear(0.0, 0.0) if name == "bf16" else Linear(fixed, per_entry)


@pytest.mark.slow
def test_below_the_break_even_bandwidth_a_sparse_method_wins() -> None:
    found = float(tables.break_even(profile(), 8, line(1e-3, 2e-9)))
    below, above = (
        tables.winner(tables.advise(profile(), Network(tables.ALPHA, gbit), 8, compressing=line(1e-3, 2e-9)))
        for gbit in (0.9 * found, 1.1 * found)
    )
    assert below.endswith(("spardl", "teams", "oktopk", "topka"))
    assert above.endswith(("dense", "bf16"))
    assert float(tables.break_even(profile(), 8, line(1e-3, 4e-9))) < found


def test_what_always_pays_and_what_never_does() -> None:
    assert tables.break_even(profile(), 8, line(1e9, 0.0)) == "never"
    assert tables.break_even(profile().scaled(1e-9), 8, line(0.0, 0.0)) == "400 and more"
