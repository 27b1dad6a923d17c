"""Tables of exhibits that pages quote, the figure of the README, and docs/tables/frontier.md with its figure.

All are from the records in the repository. A page quotes a table between two marks, which name the exhibit, the size
and the number of the table:

<!-- spardl.residuals, evening, table 1: written by scripts/docs.py -->
<!-- end of spardl.residuals, evening, table 1 -->

Rows that were not run are left out until scripts/reproduce.py makes them. Missing results of the frontier read "not run
yet" until scripts/reproduce.py frontier --scale laptop --record makes them.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from scripts.exhibits.base import SCALES, Exhibit, Results, at
from scripts.exhibits.charts.curves import band
from scripts.exhibits.charts.style import SIZE, TEXT, check_drawing, drawing, explain, png
from scripts.exhibits.kinds.frontier import Frontier
from scripts.exhibits.kinds.races import Race
from scripts.exhibits.measures import metric_curve
from scripts.exhibits.records import RecordStore
from scripts.exhibits.tables import Table, markdown, replace_section, without_missing
from spardl.basics.errors import ConfigError

# Curves of the README's figure: entrant of the exhibit, label, color, and offset of the label in points.
CURVES = (
    ("SparDL, our recipe", "spardl, 1% of the gradient", "#1f4fd8", (-4, 30)),
    ("PowerSGD (torch)", "torch PowerSGD", "#b4530a", (0, 9)),
    ("bf16 (torch)", "torch bf16 hook", "#1b7f5c", (0, 9)),
    ("dense DDP", "DDP", "#555555", (0, 9)),
)
MARK = re.compile(r"<!-- (?!end of )(?P<section>(?P<exhibit>\S+), (?P<scale>\w+), table (?P<number>\d+)): ")


def quoting_page(text: str, exhibits: Mapping[str, Exhibit], records: Path) -> str:
    """Returns a page with the current tables of the exhibits between its marks, from a folder of records.

    Raises:
        ConfigError: If an exhibit, a size or a table does not exist, or a mark has no end.
    """
    for mark in MARK.finditer(text):
        text = replace_section(text, mark["section"], f"\n{_table(mark, exhibits, records)}")
    return text


def _table(mark: re.Match[str], exhibits: Mapping[str, Exhibit], records: Path) -> str:
    exhibit, scale, number = exhibits.get(mark["exhibit"]), mark["scale"], int(mark["number"])
    if exhibit is None or scale not in SCALES:
        raise ConfigError(f"{mark['section']}: unknown exhibit or size; see scripts/reproduce.py --list")
    found = exhibit.tables(scale, Results.on_disk(records, exhibit.jobs(scale), RecordStore(records)))
    if not 1 <= number <= len(found):
        raise ConfigError(f"{mark['section']}: {mark['exhibit']} has tables 1 to {len(found)} at this size")
    return markdown(without_missing(found[number - 1]))


def accuracy_figure(exhibit: Race, records: Path) -> bytes:
    """Returns the test accuracy against seconds at 100 Mbit/s as PNG: means over seeds, with labels at the lines."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - only figures need it

    course = at("evening", exhibit.courses)
    results = Results.on_disk(records, exhibit.jobs("evening"), RecordStore(records))
    whole = Figure(figsize=(7, 3.6), layout="constrained", dpi=160)
    axes = whole.subplots()
    entrants = {entrant.name: entrant for entrant in course.entrants}
    for name, label, color, offset in CURVES:
        outcomes = exhibit.outcomes(course, min(course.gbits), entrants[name], results)
        curve = band([metric_curve(each.data, each.events("eval")) for each in outcomes], "seconds")
        axes.plot(curve.places, curve.middle, color=color, linewidth=2)
        end = (curve.places[-1], curve.middle[-1])
        axes.annotate(label, end, xytext=offset, textcoords="offset points", color=color, va="center")
    if target := exhibit.target(course, results):
        axes.axhline(target.value, color="#999999", linewidth=1, linestyle=":")
        axes.annotate(f"target {target.value:.3f}", (130, target.value), xytext=(0, -12), textcoords="offset points")
    axes.set(xlabel="seconds of training", ylabel="test accuracy", xlim=(0, 150), ylim=(0.5, 0.9))
    axes.spines[["top", "right"]].set_visible(False)
    out = io.BytesIO()
    whole.savefig(out, format="png")
    return out.getvalue()


FRONTIER_SCALE = "laptop"


def frontier_page(text: str, exhibit: Frontier, results: Results, scale: str = FRONTIER_SCALE) -> str:
    """Returns a page with the tables of an exhibit and its results between the page's marks.

    Raises:
        ConfigError: If the page lacks a section.
    """
    courses = exhibit.courses[scale]
    sections: dict[str, list[Table]] = {
        "where": [exhibit.advice(each, goal, results) for each in courses for goal in exhibit.goals(each, results)],
        "links": [exhibit.link(each, gbit, results) for each in courses for gbit in each.gbits],
        "rates": [exhibit.rates(each, results) for each in courses],
        "checks": [exhibit.check(each, results) for each in courses],
    }
    for name, tables in sections.items():
        text = replace_section(text, name, f"\n{_shown(tables)}")
    return text


def _shown(tables: Sequence[Table]) -> str:
    none = "There are no results yet.\n"
    return "\n".join(f"{table.title}:\n\n{markdown(table)}" for table in tables) or none


def frontier_figure(exhibit: Frontier, results: Results, scale: str = FRONTIER_SCALE) -> bytes:
    """Returns all panels in one picture, a column for each link, as PNG; arguments as in :func:`frontier_page`."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - only figures need it

    check_drawing()
    pictures, courses = exhibit.pictures(scale, results), exhibit.courses[scale]
    columns = max(len(course.gbits) for course in courses)
    rows = len(pictures) // columns
    with drawing():
        whole = Figure(figsize=(0.75 * columns * SIZE[0], rows * SIZE[1]), layout="constrained")
        for number, row in enumerate(whole.subfigures(rows, 1, squeeze=False)[:, 0]):
            own = pictures[number * columns : (number + 1) * columns]
            for panel, picture in zip(row.subfigures(1, columns, squeeze=False).flat, own, strict=True):
                picture.draw(panel)
                panel.suptitle(picture.title, fontsize=TEXT)
            explain(row, own[0].key)
        return png(whole)
