"""Writes tables of exhibits, made from the records in the repository, into the pages that quote them.

python scripts/quotes.py --write
python scripts/quotes.py --check        exit code 1 if a page is out of date

A page quotes a table between two marks, which name the exhibit, the size and the number of the table:

<!-- spardl.residuals, evening, table 1: written by scripts/quotes.py --write -->
<!-- end of spardl.residuals, evening, table 1 -->

Runs nothing: rows that were not run are left out until scripts/reproduce.py makes them. --write also draws the figure
of the README.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import cast

from scripts import choices
from scripts.docs.marked import replace, without_missing
from scripts.docs.settling import add_options, settle
from scripts.exhibits.base import SCALES, Exhibit, Results, at
from scripts.exhibits.charts.curves import band
from scripts.exhibits.kinds.races import Race
from scripts.exhibits.measures import metric_curve
from scripts.exhibits.papers.catalogue import catalogue
from scripts.exhibits.records import SHIPPED, RecordStore
from scripts.exhibits.tables import markdown
from scripts.exhibits.working import answer
from spardl.basics.errors import ConfigError

ROOT = Path(__file__).resolve().parents[1]
FIGURE = ROOT / "docs" / "images" / "time-to-accuracy.png"
# Curves of the README's figure: entrant of the exhibit, label, color, and offset of the label in points.
CURVES = (
    ("SparDL, our recipe", "spardl, 1% of the gradient", "#1f4fd8", (-4, 30)),
    ("PowerSGD (torch)", "torch PowerSGD", "#b4530a", (0, 9)),
    ("bf16 (torch)", "torch bf16 hook", "#1b7f5c", (0, 9)),
    ("dense DDP", "DDP", "#555555", (0, 9)),
)
MARK = re.compile(r"<!-- (?!end of )(?P<section>(?P<exhibit>\S+), (?P<scale>\w+), table (?P<number>\d+)): ")


def page(text: str, exhibits: Mapping[str, Exhibit], records: Path) -> str:
    """A page with the current tables between its marks.

    Args:
        text: Text of the page.
        exhibits: All exhibits by name.
        records: Folder of the records.

    Raises:
        ConfigError: if an exhibit, a size or a table does not exist, or a mark has no end.
    """
    for mark in MARK.finditer(text):
        text = replace(text, mark["section"], f"\n{_table(mark, exhibits, records)}")
    return text


def _table(mark: re.Match[str], exhibits: Mapping[str, Exhibit], records: Path) -> str:
    exhibit, scale, number = exhibits.get(mark["exhibit"]), mark["scale"], int(mark["number"])
    if exhibit is None or scale not in SCALES:
        raise ConfigError(f"{mark['section']}: unknown exhibit or size; see scripts/reproduce.py --list")
    found = exhibit.tables(scale, Results.on_disk(records, exhibit.jobs(scale), RecordStore(records)))
    if not 1 <= number <= len(found):
        raise ConfigError(f"{mark['section']}: {mark['exhibit']} has tables 1 to {len(found)} at this size")
    return markdown(without_missing(found[number - 1]))


def draw_figure(exhibit: Race, records: Path) -> None:
    """Draws test accuracy against seconds at 100 Mbit/s: means over seeds, with labels at the lines."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - only figures need it

    course = at("evening", exhibit.courses)
    results = Results.on_disk(records, exhibit.jobs("evening"), RecordStore(records))
    figure = Figure(figsize=(7, 3.6), layout="constrained", dpi=160)
    axes = figure.subplots()
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
    figure.savefig(FIGURE)


def act(arguments: argparse.Namespace) -> int:
    """Writes or checks all pages.

    Returns:
        The exit code.

    Raises:
        ConfigError: if a mark or a record is invalid.
        OSError: if a page cannot be read or written.
    """
    with choices.composing():
        exhibits = catalogue()
        texts = {path: path.read_text() for path in sorted(arguments.pages.rglob("*.md"))}
        made = {path: page(text, exhibits, arguments.records) for path, text in texts.items() if MARK.search(text)}
        if arguments.write:
            draw_figure(cast(Race, exhibits["spardl.time_to_accuracy"]), arguments.records)
    return settle(made, "python scripts/quotes.py --write", check=arguments.check)


def main() -> int:
    """Runs the command line.

    Returns:
        The exit code: 1 if a page is out of date.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, "the pages")
    parser.add_argument("--pages", type=Path, default=ROOT / "docs", help="folder of the pages (default: docs)")
    parser.add_argument("--records", type=Path, default=ROOT / SHIPPED, help=f"folder of the records ({SHIPPED})")
    return answer(act, parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
