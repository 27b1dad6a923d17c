"""Puts runs side by side, of real and of simulated clusters: tables, curves, and what differs between them.

python scripts/report.py outputs/*
python scripts/report.py outputs --html report.html
python scripts/report.py outputs/* --plot comparison.png
python scripts/report.py docs/results/learning.jsonl

Prints Markdown. Records of trainings stand for run folders. Runs that differ in their seeds only share a row; runs of
different tasks, or with different metrics, go to different tables. Folders without a finished run are named with their
state. --html writes a page that needs nothing but itself, --plot only the curves.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

from markupsafe import Markup

from scripts import choices
from scripts.exhibits.base import Basis, Picture
from scripts.exhibits.charts.axes import SIZE, check_drawing, drawing
from scripts.exhibits.charts.curves import draw_means, key_of
from scripts.exhibits.charts.labels import explain
from scripts.exhibits.measures import Curve
from scripts.exhibits.pages import page
from scripts.exhibits.pages.runs import Comparison, Finished, Method, Unfinished, caveats, collect, compare, differences
from scripts.exhibits.papers.small import VIRTUAL
from scripts.exhibits.statistics import INTERVAL, shown_interval, spread
from scripts.exhibits.tables import Cell, Row, Table, markdown
from spardl.basics.errors import ConfigError
from spardl.basics.files import write_atomically

FINISHED, BAD_INPUT = 0, 2
COLUMNS = (
    "method",
    "metric",
    INTERVAL,
    "every seed",
    "train loss, last epoch",
    "sent / dense",
    "seconds",
    "clock",
)
CLOCKS: Mapping[bool, str] = {True: "virtual", False: "real"}
BARE = Basis("", "", "")  # of tables that hold no results
UNKNOWN = "the command was not recorded; config.yaml holds every setting"


def results(comparison: Comparison) -> Table:
    """What the runs of one task reached, and what it cost; one row per method."""
    return Table(comparison.title, COLUMNS, [_row(method) for method in comparison.methods])


def _row(method: Method) -> Row:
    values = [run.metric for run in method.runs]
    losses = [run.train_loss for run in method.runs if run.train_loss is not None]
    share, seconds = mean(run.share for run in method.runs), [run.seconds for run in method.runs]
    cells = [
        Cell(spread(values), mean(values)),
        Cell(shown_interval(values)),
        Cell(", ".join(f"{value:.4g}" for value in values)),
        Cell(spread(losses), mean(losses)) if losses else Cell("not logged"),
        Cell(f"{share:.2%}", share),
        Cell(spread(seconds), mean(seconds)),
        Cell(", ".join(sorted({CLOCKS[run.simulated] for run in method.runs}))),
    ]
    return Row(method.name, cells, ())


def settings(comparison: Comparison) -> Table | None:
    """The settings that differ between the methods, if any do; one row per setting."""
    found = differences(comparison.methods)
    rows = [Row(key, [Cell(value) for value in values], ()) for key, values in found.items()]
    names = [method.name for method in comparison.methods]
    return Table(f"What differs: {comparison.title}", ("setting", *names), rows) if rows else None


def without_result(folders: Sequence[Unfinished]) -> Table:
    """Folders that no other table has, and why."""
    rows = [Row(str(folder), [Cell(state, bad=True)], ()) for folder, state in folders]
    return Table("Folders without a finished run", ("folder", "state"), rows)


def warnings(runs: Sequence[Finished]) -> Table | None:
    """What the runs warn of, if they do."""
    rows = [Row(words, [Cell(", ".join(folders))], ()) for words, folders in caveats(runs).items()]
    return Table("Caveats", ("caveat", "runs"), rows) if rows else None


def basis(runs: Sequence[Finished]) -> Basis:
    """What of the runs is simulated, measured and assumed."""
    virtual = sum(run.simulated for run in runs)
    if not virtual:
        return Basis("nothing", "training, and its seconds", "nothing")
    if virtual == len(runs):
        return VIRTUAL
    some = f"of {virtual} of {len(runs)} runs, those with the virtual clock: "
    return Basis(some + VIRTUAL.simulated, "training; the seconds of the other runs", some + VIRTUAL.assumed)


def pictures(comparison: Comparison) -> list[Picture]:
    """The metric against steps, and against seconds."""
    clocks = sorted({CLOCKS[run.simulated] for method in comparison.methods for run in method.runs})
    words = {"steps": "steps", "seconds": f"{' or '.join(clocks)} seconds"}
    names = [method.name for method in comparison.methods]
    caption, key = f"{comparison.title}: means of all seeds, bands from the least to the most", key_of(names)
    return [
        Picture(clock, caption, partial(draw, comparison, clock, label), f"against {label}", key)
        for clock, label in words.items()
    ]


def draw(comparison: Comparison, clock: str, label: str, figure: Any) -> None:
    """Draws the metric of all runs of a task.

    Args:
        comparison: them.
        clock: what it is drawn against, a field of :class:`Curve`.
        label: of that axis.
        figure: matplotlib's, or a part of it.
    """
    axes = figure.subplots()
    curves: dict[str, list[Curve]] = {method.name: [run.curve for run in method.runs] for method in comparison.methods}
    draw_means(axes, curves, clock, label, comparison.methods[0].runs[0].summary["metric"])


def plot(comparisons: Sequence[Comparison], path: Path) -> None:
    """Draws every task's metric against seconds, one above the other, to a file."""
    # Only who asks for a picture needs it.
    from matplotlib.figure import Figure  # noqa: PLC0415 - only figures need it

    with drawing():
        figure = Figure(figsize=(1.4 * SIZE[0], 1.4 * SIZE[1] * len(comparisons)), layout="constrained")
        parts = figure.subfigures(len(comparisons), squeeze=False)[:, 0]
        for comparison, part in zip(comparisons, parts, strict=True):
            picture = pictures(comparison)[-1]
            part.suptitle(comparison.title)
            explain(part, picture.key)
            picture.draw(part)
        figure.savefig(path, dpi=200)


def section(number: int, comparison: Comparison) -> page.Section:
    """What the page says of one task."""
    own = f"task-{number}"
    runs = [run for method in comparison.methods for run in method.runs]
    sources = {method.name: [source(run) for run in method.runs] for method in comparison.methods}
    parts = [page.table(results(comparison), f"{own}-results", basis(runs), lambda row: sources[row.name])]
    parts += page.figures(pictures(comparison), own, basis(runs))
    differing = settings(comparison)
    if differing:
        parts.append(page.table(differing, f"{own}-settings", BARE, lambda row: ()))
    return page.Section(own, "", comparison.title, "", 0, Markup("").join(parts))


def source(run: Finished) -> page.Source:
    """Where a run's figures come from."""
    where = page.in_words(run.summary.get("environment", {}))
    return page.Source(run.command or UNKNOWN, f"{run.folder}; {where}" if where else str(run.folder))


def write_page(
    path: Path, comparisons: Sequence[Comparison], finished: Sequence[Finished], others: Sequence[Unfinished]
) -> None:
    """Writes the page."""
    sections = [section(number, comparison) for number, comparison in enumerate(comparisons, 1)]
    warned = warnings(finished)
    if warned:
        body = page.table(warned, "caveats-table", BARE, lambda row: ())
        sections.append(page.Section("caveats", "", "What the runs warn of", "", 0, body))
    if others:
        body = page.table(without_result(others), "others-table", BARE, lambda row: ())
        sections.append(page.Section("others", "", "Folders without a finished run", "", len(others), body))
    lead = f"Finished runs: {len(finished)}; folders without one: {len(others)}. Mean ± half of {INTERVAL} over seeds."
    facts = {"Command": shlex.join(["python", "scripts/report.py", *sys.argv[1:]]), **page.here()}
    write_atomically(path, page.page("Runs side by side", lead, facts, sections).encode())


def printed(
    comparisons: Sequence[Comparison], finished: Sequence[Finished], others: Sequence[Unfinished]
) -> list[Table]:
    """All tables, as they are printed."""
    found = [table for comparison in comparisons for table in (results(comparison), settings(comparison)) if table]
    warned = warnings(finished)
    return [*found, *([warned] if warned else []), *([without_result(others)] if others else [])]


def main() -> int:
    """Reads the folders on the command line.

    Returns:
        The exit code.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, help="run folders, records (.jsonl), or folders of these")
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write a page")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="also draw the metric against seconds")
    arguments = parser.parse_args()
    with choices.composing():
        finished, others = collect(arguments.folders)
    comparisons = compare(finished)
    print("\n".join(f"{table.title}\n\n{markdown(table)}" for table in printed(comparisons, finished, others)))
    if not finished:
        print("error: none of these folders holds a finished run; python train.py makes one", file=sys.stderr)
        return BAD_INPUT
    try:
        if arguments.html or arguments.plot:
            check_drawing()
        if arguments.html:
            write_page(arguments.html, comparisons, finished, others)
        if arguments.plot:
            plot(comparisons, arguments.plot)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT
    except (OSError, ValueError) as error:
        print(f"error: the report cannot be written ({error}); name other files", file=sys.stderr)
        return BAD_INPUT
    return FINISHED


if __name__ == "__main__":
    sys.exit(main())
