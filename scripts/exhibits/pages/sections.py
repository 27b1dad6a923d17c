"""Sections of exhibits on the page of a report, the files of their tables and figures, and the list of missing runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean

from scripts.exhibits.base import Exhibit, Results
from scripts.exhibits.charts.axes import drawing, drawn
from scripts.exhibits.jobs import Job, Training
from scripts.exhibits.outcomes import NOT_RUN, NOT_RUN_YET
from scripts.exhibits.pages.page import Section, Source, figures, here, in_words, table
from scripts.exhibits.tables import WRITERS, Cell, Row, Table, render
from spardl.basics.files import write_atomically

MOST_SOURCES = 12
ENDINGS = ("png", "pdf")


def sources(row: Row, results: Results) -> list[Source]:
    """Commands and folders behind a row."""
    found = [(job.command, results.of(job)) for job in row.jobs]
    return [
        Source(command, f"{outcome.fault}; see {outcome.where}" if outcome.reason else outcome.origin)
        for command, outcome in found
    ]


def few_sources(row: Row, results: Results) -> Sequence[Source]:
    """The first sources of a row: a page that lists all of them would be too large to send around."""
    found = sources(row, results)
    left = len(found) - MOST_SOURCES
    return found if left <= 1 else [*found[:MOST_SOURCES], Source(f"and {left} more", "listed by --explain")]


def exhibit_section(exhibit: Exhibit, group: str, scale: str, results: Results) -> Section:
    """The section of an exhibit of the paper ``group``; the summary shows the first figure if the exhibit leads."""
    tables, own = without_unrun(exhibit.tables(scale, results)), f"{exhibit.name}-{scale}"
    about = {
        "Source": exhibit.source,
        "Shows": exhibit.shows,
        "What ran": exhibit.what_ran(scale),
    }
    command = f"python scripts/reproduce.py {exhibit.name} --scale {scale}"
    drawn_figures = figures(exhibit.pictures(scale, results), own, exhibit.basis)
    lead = "".join(drawn_figures[:1]) if exhibit.leads else ""
    sheets = [
        table(content, f"{own}-table-{number}", exhibit.basis, lambda row: few_sources(row, results))
        for number, content in enumerate(tables, 1)
    ]
    parts = [*drawn_figures[bool(lead) :], *sheets]
    made = made_with((row for content in tables for row in content.rows), results)
    html = render("exhibit", about=about, command=command, lead=lead, parts=parts, lines=made)
    marks = sum(cell.bad for content in tables for row in content.rows for cell in row.cells)
    return Section(own, group, exhibit.title, scale, marks, html, exhibit.name, lead, exhibit.tried(scale, results))


def made_with(rows: Iterable[Row], results: Results) -> list[str]:
    """When and where a section and the runs behind its rows were made, and the caveats of the runs."""
    jobs = dict.fromkeys(job for row in rows for job in row.jobs)
    found = [results.of(job).data for job in jobs]
    runs = sorted({in_words(data["environment"]) for data in found if "environment" in data})
    caveats = sorted({caveat for data in found for caveat in data.get("caveats", ())})
    return [
        f"Written {here()['Date']}.",
        *(f"Trained with {run}." for run in runs),
        *(f"Caveat: {caveat}." for caveat in caveats),
    ]


def write(exhibit: Exhibit, scale: str, results: Results, folder: Path) -> Sequence[Table]:
    """Writes tables and figures, and returns the tables; rows that were not run are left out."""
    folder.mkdir(parents=True, exist_ok=True)
    tables = without_unrun(exhibit.tables(scale, results))
    for number, content in enumerate(tables, 1):
        for ending, writer in WRITERS.items():
            path = folder / f"{exhibit.name}-{scale}-{number}.{ending}"
            write_atomically(path, writer(content).encode())
    for picture in exhibit.pictures(scale, results):
        with drawing():
            figure = drawn(picture.draw, picture.key, picture.title or picture.caption)
            for ending in ENDINGS:
                figure.savefig(folder / f"{exhibit.name}-{scale}-{picture.file}.{ending}", dpi=200)
    return tables


def without_unrun(tables: Sequence[Table]) -> list[Table]:
    """Tables without the rows of jobs that were not run, and without the tables that this leaves empty."""
    waiting = {NOT_RUN, NOT_RUN_YET}
    kept = [
        replace(old, rows=[row for row in old.rows if not row.cells or {cell.text for cell in row.cells} - waiting])
        for old in tables
    ]
    return [new for new, old in zip(kept, tables, strict=True) if new.rows or not old.rows]


def unrun_table(exhibits: Sequence[Exhibit], scale: str, results: Results) -> Table | None:
    """The list of jobs that were not started, one row per task, if there are any; shared jobs appear once."""
    seen: set[Job] = set()
    lines, total, unknown = list[Row](), 0.0, 0
    for exhibit in exhibits:
        for task, methods in _waiting(exhibit, scale, results).items():
            new = {method: [job for job in jobs if job not in seen] for method, (jobs, _) in methods.items()}
            seen.update(job for own in new.values() for job in own)
            new = {method: own for method, own in new.items() if own}
            if not new:
                continue
            times = [methods[method][1] for method in new]
            needed = [each * len(own) for each, own in zip(times, new.values(), strict=True) if each is not None]
            time = sum(needed) if len(needed) == len(new) else None
            total, unknown = total + (time or 0.0), unknown + (time is None)
            texts = (task or exhibit.title, "; ".join(new), str(sum(map(len, new.values()))), _in_hours(time))
            lines.append(Row(exhibit.name, [*map(Cell, texts)], ()))
    if not lines:
        return None
    untimed = f"{unknown} row{'s' if unknown > 1 else ''} of unknown time"
    words = [f"{_in_hours(total)} core hours"] * bool(total) + [untimed] * bool(unknown)
    runs = f"{len(seen)} run{'s' if len(seen) > 1 else ''}"
    columns = ("exhibit", "task", "methods", "runs", "core hours")
    return Table(f"Not run yet: {runs}, {' and '.join(words)}", columns, lines)


def _waiting(
    exhibit: Exhibit, scale: str, results: Results
) -> dict[str, dict[str, tuple[Sequence[Job], float | None]]]:
    """Jobs that were not started, by task and method, with the core seconds of each job if they are known.

    A job takes the planned seconds, or as long as finished jobs of the same task took.
    """
    jobs = list(dict.fromkeys(exhibit.jobs(scale)))
    paces: dict[str, list[float]] = {}
    waiting: dict[str, dict[str, list[Job]]] = {}
    for job in jobs:
        task, method = _place(job)
        if seconds := results.of(job).data.get("wall_seconds"):
            paces.setdefault(task, []).append(seconds)
        if not results.of(job).started:
            waiting.setdefault(task, {}).setdefault(method, []).append(job)
    found: dict[str, dict[str, tuple[Sequence[Job], float | None]]] = {}
    for task, methods in waiting.items():
        for method, own in methods.items():
            planned = [job.expected for job in own if job.expected is not None]
            times = planned if len(planned) == len(own) else paces.get(task)
            found.setdefault(task, {})[method] = (own, mean(times) if times else None)
    return found


def _place(job: Job) -> tuple[str, str]:
    """Returns the task and method of a job."""
    labels = job.labels if isinstance(job, Training) else None
    return (", ".join(labels.tags), labels.job_type) if labels else ("", job.command)


def _in_hours(seconds: float | None) -> str:
    """Hours with two significant digits, such as 0.5 or 12,000."""
    return "unknown" if seconds is None else f"{float(f'{seconds / 3600:.2g}'):,g}"
