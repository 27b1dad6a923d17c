"""Compares runs of real and simulated clusters: tables, curves, and the settings that differ.

python scripts/report.py outputs/*
python scripts/report.py outputs --html report.html
python scripts/report.py outputs/* --plot comparison.png
python scripts/report.py docs/results/learning.jsonl
python scripts/report.py runs outputs/* --csv > runs.csv
python scripts/report.py runs outputs/* --latex --png curves.png

Prints Markdown. Records of trainings can be given instead of run folders. Runs that differ only in their seeds share a
row; runs of different tasks or metrics go to different tables. Folders without a finished run are listed with their
state. --html writes a self-contained page, --plot only the curves. "report.py runs" prints one table of all runs: mean
and standard deviation over seeds, time, bytes and path (a folder of this name is ./runs).
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

from markupsafe import Markup

from scripts import choices
from scripts.exhibits.base import Basis, Picture
from scripts.exhibits.charts.axes import SIZE, check_drawing, drawing, explain
from scripts.exhibits.charts.curves import draw_means, panel_pictures
from scripts.exhibits.charts.palette import looks
from scripts.exhibits.kinds.trainings import VIRTUAL
from scripts.exhibits.measures import INTERVAL, Curve, shown_interval, spread
from scripts.exhibits.pages import page
from scripts.exhibits.pages.runs import (
    CLOCKS,
    Comparison,
    Finished,
    Method,
    Unfinished,
    collect,
    compare,
    differences,
    run_machines,
    run_table,
    seconds_by_machine,
)
from scripts.exhibits.tables import WRITERS, Cell, Row, Table, markdown
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
    "machine",
)
BARE = Basis("", "", "")  # basis of tables without results
RUNS = "runs"
UNKNOWN = "the command was not recorded; config.yaml holds every setting"


def results(comparison: Comparison) -> Table:
    """Returns the metric and cost of the runs of one task, one row per method."""
    return Table(comparison.title, COLUMNS, [_row(method) for method in comparison.methods])


def _row(method: Method) -> Row:
    values = [run.metric for run in method.runs]
    losses = [run.train_loss for run in method.runs if run.train_loss is not None]
    share, machines = mean(run.share for run in method.runs), run_machines(method.runs)
    seconds = [run.seconds for run in method.runs]
    time = Cell(spread(seconds), mean(seconds)) if len(machines) == 1 else Cell(seconds_by_machine(method.runs))
    cells = [
        Cell(spread(values), mean(values)),
        Cell(shown_interval(values)),
        Cell(", ".join(f"{value:.4g}" for value in values)),
        Cell(spread(losses), mean(losses)) if losses else Cell("not logged"),
        Cell(f"{share:.2%}", share),
        time,
        Cell(", ".join(sorted({CLOCKS[run.simulated] for run in method.runs}))),
        Cell("; ".join(machines)),
    ]
    return Row(method.name, cells, ())


def settings(comparison: Comparison) -> Table | None:
    """Settings that differ between the methods, one row per setting; ``None`` if all are equal."""
    found = differences(comparison.methods)
    rows = [Row(key, [Cell(value) for value in values], ()) for key, values in found.items()]
    names = [method.name for method in comparison.methods]
    return Table(f"What differs: {comparison.title}", ("setting", *names), rows) if rows else None


def remarks(finished: Sequence[Finished], others: Sequence[Unfinished]) -> list[Table]:
    """Caveats with the runs that have them, and folders without a finished run with the reason, if there are any."""
    warned: dict[str, list[str]] = {}
    for run in finished:
        for caveat in run.summary.get("caveats", ()):
            warned.setdefault(caveat, []).append(run.folder.name)
    caveats = [Row(caveat, [Cell(", ".join(names))], ()) for caveat, names in warned.items()]
    missing = [Row(str(folder), [Cell(state, bad=True)], ()) for folder, state in others]
    tables = [
        Table("Caveats", ("caveat", RUNS), caveats),
        Table("Folders without a finished run", ("folder", "state"), missing),
    ]
    return [table for table in tables if table.rows]


def basis(runs: Sequence[Finished]) -> Basis:
    """Returns the simulated, measured and assumed quantities of the runs."""
    virtual = sum(run.simulated for run in runs)
    if not virtual:
        return Basis("nothing", "training, and its seconds", "nothing")
    if virtual == len(runs):
        return VIRTUAL
    some = f"of {virtual} of {len(runs)} runs, those with the virtual clock: "
    return Basis(some + VIRTUAL.simulated, "training; the seconds of the other runs", some + VIRTUAL.assumed)


def pictures(comparison: Comparison, wanted: Sequence[str] = ("steps", "seconds")) -> list[Picture]:
    """Returns the metric of a task against some fields of :class:`Curve`, in panels of a few methods."""
    names = [method.name for method in comparison.methods]
    clocks = sorted({CLOCKS[run.simulated] for method in comparison.methods for run in method.runs})
    labels = {"steps": "steps", "seconds": f"{' or '.join(clocks)} seconds"}
    caption = f"{comparison.title}: means of all seeds, bands from the least to the most"
    curves: dict[str, list[Curve]] = {method.name: [run.curve for run in method.runs] for method in comparison.methods}

    def draw(clock: str, shown: Sequence[str], figure: Any) -> None:
        metric = comparison.methods[0].runs[0].summary["metric"]
        draw_means(figure.subplots(), curves, clock, labels[clock], metric, shown=shown)

    whole = [Picture(clock, caption, partial(draw, clock), f"against {labels[clock]}") for clock in wanted]
    return panel_pictures(whole, names, looks(names))


def plot(comparisons: Sequence[Comparison], path: Path) -> None:
    """Draws the metric of every task against seconds to a file, one panel above the other."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - only figures need it

    shown = [(each.title, picture) for each in comparisons for picture in pictures(each, ["seconds"])]
    with drawing():
        figure = Figure(figsize=(1.4 * SIZE[0], 1.4 * SIZE[1] * len(shown)), layout="constrained")
        for (title, picture), part in zip(shown, figure.subfigures(len(shown), squeeze=False)[:, 0], strict=True):
            part.suptitle(title)
            explain(part, picture.key)
            picture.draw(part)
        figure.savefig(path, dpi=200)


def source(run: Finished) -> page.Source:
    """Returns the origin of the figures of a run."""
    where = page.in_words(run.summary.get("environment", {}))
    return page.Source(run.command or UNKNOWN, f"{run.folder}; {where}" if where else str(run.folder))


def section(number: int, comparison: Comparison) -> page.Section:
    """Returns the section of one task."""
    own = f"task-{number}"
    known = basis([run for method in comparison.methods for run in method.runs])
    sources = {method.name: [source(run) for run in method.runs] for method in comparison.methods}
    parts = [page.table(results(comparison), f"{own}-results", known, lambda row: sources[row.name])]
    parts += page.figures(pictures(comparison), own, known)
    if differing := settings(comparison):
        parts.append(page.table(differing, f"{own}-settings", BARE, lambda row: ()))
    return page.Section(own, "", comparison.title, "", 0, Markup("").join(parts))


def write_page(
    path: Path, comparisons: Sequence[Comparison], finished: Sequence[Finished], others: Sequence[Unfinished]
) -> None:
    """Writes the page."""
    sections = [section(number, comparison) for number, comparison in enumerate(comparisons, 1)]
    for number, remark in enumerate(remarks(finished, others), 1):
        body = page.table(remark, f"remark-{number}-table", BARE, lambda row: ())
        marks = sum(cell.bad for row in remark.rows for cell in row.cells)
        sections.append(page.Section(f"remark-{number}", "", remark.title, "", marks, body))
    lead = f"Finished runs: {len(finished)}; folders without one: {len(others)}. Mean ± half of {INTERVAL} over seeds."
    facts = {"Command": shlex.join(["python", "scripts/report.py", *sys.argv[1:]]), **page.here()}
    write_atomically(path, page.page("Comparison of runs", lead, facts, sections).encode())


def main() -> int:
    """Runs the command line, and returns the exit code."""
    one_table = sys.argv[1:2] == [RUNS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, help="run folders, records (.jsonl), or folders of these")
    if one_table:
        form = parser.add_mutually_exclusive_group()
        form.add_argument("--csv", dest="form", action="store_const", const="csv", help="print CSV with full precision")
        form.add_argument("--latex", dest="form", action="store_const", const="tex", help="print a LaTeX table")
    else:
        parser.add_argument("--html", type=Path, metavar="FILE", help="also write a page to FILE")
    name = "--png" if one_table else "--plot"
    parser.add_argument(
        name, dest="plot", type=Path, metavar="FILE", help="also draw the metric against seconds to FILE"
    )
    arguments = parser.parse_args(sys.argv[1 + one_table :])
    with choices.composing():
        finished, others = collect(arguments.folders)
    comparisons = compare(finished)
    if one_table:
        sys.stderr.writelines(f"skipped {folder}: {state}\n" for folder, state in others)
        if finished:
            print(WRITERS[arguments.form or "md"](run_table(comparisons)), end="")
    else:
        found = [table for each in comparisons for table in (results(each), settings(each)) if table]
        found += remarks(finished, others)
        print("\n".join(f"{table.title}\n\n{markdown(table)}" for table in found))
    if not finished:
        print("error: none of these folders contains a finished run; create one with python train.py", file=sys.stderr)
        return BAD_INPUT
    html = None if one_table else arguments.html
    try:
        if html or arguments.plot:
            check_drawing()
        if html:
            write_page(html, comparisons, finished, others)
        if arguments.plot:
            plot(comparisons, arguments.plot)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT
    except (OSError, ValueError) as error:
        print(f"error: cannot write the report ({error}); choose another file", file=sys.stderr)
        return BAD_INPUT
    return FINISHED


if __name__ == "__main__":
    sys.exit(main())
