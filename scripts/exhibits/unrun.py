"""Jobs that were not run; one list shows them with the time they would need, instead of the result tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import mean
from typing import NamedTuple

from scripts.exhibits.base import Exhibit, Results
from scripts.exhibits.jobs import Job, Training
from scripts.exhibits.outcomes import NOT_RUN, NOT_RUN_YET
from scripts.exhibits.tables import Cell, Row, Table
from scripts.exhibits.tried import marks


class Unrun(NamedTuple):
    """Jobs of one row that were not run.

    Attributes:
        exhibit: Name of the exhibit.
        task: Name of the task.
        method: Name of the row.
        jobs: Marks of the jobs.
        seconds: Estimated core seconds of each job; ``None`` if unknown.
    """

    exhibit: str
    task: str
    method: str
    jobs: Sequence[str]
    seconds: float | None


def unrun(exhibit: Exhibit, scale: str, results: Results) -> list[Unrun]:
    """Returns the jobs of an exhibit that were not started, by task and method.

    A job takes the planned seconds, or as long as finished jobs of the same task took.
    """
    jobs = list(dict.fromkeys(exhibit.jobs(scale)))
    paces: dict[str, list[float]] = {}
    for job in jobs:
        if seconds := results.of(job).data.get("wall_seconds"):
            paces.setdefault(_place(job)[0], []).append(seconds)
    waiting: dict[tuple[str, str], list[Job]] = {}
    for job in jobs:
        if not results.of(job).started:
            waiting.setdefault(_place(job), []).append(job)
    found = []
    for (task, method), own in waiting.items():
        planned = [job.expected for job in own if job.expected is not None]
        times = planned if len(planned) == len(own) else paces.get(task)
        found.append(Unrun(exhibit.name, task or exhibit.title, method, marks(own), mean(times) if times else None))
    return found


def _place(job: Job) -> tuple[str, str]:
    """Returns the task and method of a job."""
    labels = job.labels if isinstance(job, Training) else None
    return (", ".join(labels.tags), labels.job_type) if labels else ("", job.command)


def without_unrun(tables: Sequence[Table]) -> list[Table]:
    """Tables without the rows of jobs that were not run, and without the tables that this leaves empty."""
    kept = list(map(ran, tables))
    return [new for new, old in zip(kept, tables, strict=True) if new.rows or not old.rows]


def ran(table: Table) -> Table:
    """Returns a table without the rows of jobs that were not run."""
    waiting = {NOT_RUN, NOT_RUN_YET}
    rows = [row for row in table.rows if not row.cells or not {cell.text for cell in row.cells} <= waiting]
    return replace(table, rows=rows)


def unrun_table(found: Sequence[Unrun]) -> Table | None:
    """Returns the list of jobs that were not run, if there are any; a job of several exhibits appears once."""
    seen: set[str] = set()
    tasks: dict[tuple[str, str], list[tuple[Unrun, int]]] = {}
    for each in found:
        own = [mark for mark in each.jobs if mark not in seen]
        seen.update(own)
        if own:
            tasks.setdefault((each.exhibit, each.task), []).append((each, len(own)))
    if not tasks:
        return None
    lines, total, unknown = list[Row](), 0.0, 0
    for (exhibit, task), rows in tasks.items():
        needed = [each.seconds * count for each, count in rows if each.seconds is not None]
        time = sum(needed) if len(needed) == len(rows) else None
        total, unknown = total + (time or 0.0), unknown + (time is None)
        methods = "; ".join(each.method for each, _ in rows)
        texts = (task, methods, str(sum(count for _, count in rows)), in_hours(time))
        lines.append(Row(exhibit, [*map(Cell, texts)], ()))
    untimed = f"{unknown} row{'s' if unknown > 1 else ''} of unknown time"
    words = [f"{in_hours(total)} core hours"] * bool(total) + [untimed] * bool(unknown)
    runs = f"{len(seen)} run{'s' if len(seen) > 1 else ''}"
    columns = ("exhibit", "task", "methods", "runs", "core hours")
    return Table(f"Not run yet: {runs}, {' and '.join(words)}", columns, lines)


def in_hours(seconds: float | None) -> str:
    """Hours with two significant digits, such as 0.5 or 12,000."""
    return "unknown" if seconds is None else f"{float(f'{seconds / 3600:.2g}'):,g}"
