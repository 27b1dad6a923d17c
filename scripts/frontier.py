"""Writes the page of the frontier, docs/tables/frontier.md, and its figure, from the records in the repository.

python scripts/frontier.py --write
python scripts/frontier.py --check      exit code 1 if the page is not that of the records

Runs nothing: missing results read "not run yet" until scripts/reproduce.py frontier --scale laptop --record makes them.
"""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Sequence
from pathlib import Path

from scripts.docs.marked import replace
from scripts.docs.settling import add_options, settle
from scripts.exhibits.base import Results
from scripts.exhibits.charts.axes import SIZE, TEXT, check_drawing, drawing
from scripts.exhibits.charts.labels import explain
from scripts.exhibits.kinds.frontier import Frontier
from scripts.exhibits.papers.frontier import FRONTIER
from scripts.exhibits.records import SHIPPED, RecordStore
from scripts.exhibits.tables import Table, markdown
from scripts.exhibits.working import answer
from spardl.basics.files import write_atomically

ROOT = Path(__file__).resolve().parents[1]
PAGE, FIGURE = Path("docs", "tables", "frontier.md"), Path("docs", "images", "frontier.png")
SCALE = "laptop"


def page(text: str, exhibit: Frontier, results: Results, scale: str = SCALE) -> str:
    """A page with the tables of today's records between its marks.

    Args:
        text: of the page.
        exhibit: whose tables.
        results: of its jobs.
        scale: of these.

    Raises:
        ValueError: if a section is not there.
    """
    courses = exhibit.courses[scale]
    sections: dict[str, list[Table]] = {
        "where": [exhibit.advice(each, goal, results) for each in courses for goal in exhibit.goals(each, results)],
        "links": [exhibit.link(each, gbit, results) for each in courses for gbit in each.gbits],
        "rates": [exhibit.rates(each, results) for each in courses],
        "checks": [exhibit.check(each, results) for each in courses],
    }
    for name, tables in sections.items():
        text = replace(text, name, f"\n{_shown(tables)}")
    return text


def _shown(tables: Sequence[Table]) -> str:
    none = "There are no results yet.\n"
    return "\n".join(f"{table.title}:\n\n{markdown(table)}" for table in tables) or none


def figure(exhibit: Frontier, results: Results, scale: str = SCALE) -> bytes:
    """All panels in one picture, a row for each task, as PNG; see :func:`page` for the arguments."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - only figures need it

    pictures, courses = exhibit.pictures(scale, results), exhibit.courses[scale]
    rows, columns = len(courses), max(len(course.gbits) for course in courses)
    with drawing():
        whole = Figure(figsize=(0.75 * columns * SIZE[0], 1.1 * rows * SIZE[1]), layout="constrained")
        panels = whole.subfigures(rows, columns, squeeze=False).flat
        for panel, picture in zip(panels, pictures, strict=True):
            picture.draw(panel)
            panel.suptitle(picture.title, fontsize=TEXT)
        explain(whole, pictures[0].key)
        out = io.BytesIO()
        whole.savefig(out, format="png", dpi=150, metadata={"Software": None})
    return out.getvalue()


def act(arguments: argparse.Namespace) -> int:
    """Writes or checks the page.

    Raises:
        ConfigError: if a record is invalid, or the page lacks a section.
        OSError: if the page cannot be read or written.
    """
    if arguments.write:
        check_drawing()
    results = Results.on_disk(arguments.records, FRONTIER.jobs(SCALE), RecordStore(arguments.records))
    text = page((ROOT / PAGE).read_text(), FRONTIER, results)
    code = settle({ROOT / PAGE: text}, "python scripts/frontier.py --write", check=arguments.check)
    if arguments.write:
        write_atomically(ROOT / FIGURE, figure(FRONTIER, results))
    return code


def main() -> int:
    """Runs the command line.

    Returns:
        The exit code: 1 if the page is to be made again.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, "the page")
    parser.add_argument("--records", type=Path, default=ROOT / SHIPPED, help=f"folder of the records ({SHIPPED})")
    return answer(act, parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
