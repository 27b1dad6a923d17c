"""Tables and figure of docs/tables/frontier.md, from the records in the repository.

Missing results read "not run yet" until scripts/reproduce.py frontier --scale laptop --record makes them.
"""

from __future__ import annotations

import io
from collections.abc import Sequence

from scripts.exhibits.base import Results
from scripts.exhibits.charts.style import SIZE, TEXT, check_drawing, drawing, explain
from scripts.exhibits.kinds.frontier import Frontier
from scripts.exhibits.tables import Table, markdown, replace_section

SCALE = "laptop"


def page(text: str, exhibit: Frontier, results: Results, scale: str = SCALE) -> str:
    """Returns a page with the tables of an exhibit and its results between the page's marks.

    Raises:
        ValueError: If a section is not there.
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


def figure(exhibit: Frontier, results: Results, scale: str = SCALE) -> bytes:
    """Returns all panels in one picture, a column for each link, as PNG; see :func:`page` for the arguments."""
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
        out = io.BytesIO()
        whole.savefig(out, format="png", dpi=100, metadata={"Software": None})
    return out.getvalue()
