"""Jobs that were not run; one list shows them with the time they would need, instead of the result tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import mean
from typing import NamedTuple

from scripts.exhibits.base import Exhibit, Results
from scripts.exhibits.jobs import Job, Training
from scripts.exhibits.outcomes import NOT_RUN, NOT_RUN_YET
from scripts.exhibits.tables import Cell, Row, Table
from scripts.exhibits.tried import marks

__all__ = ["Unrun", "in_hours", "ran", "unrun", "unrun_table", "without_unrun"]


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

    Args:
        exhibit: Exhibit with the jobs.
        scale: Size preset of the runs.
        results: Results of the runs.
    """
    jobs = list(dict.fromkeys(exhibit.jobs(scale)))
    paces = _paces(jobs, results)
    waiting: dict[tuple[str, str], list[Job]] = {}
    for job in jobs:
        if not results.of(job).started:
            waiting.setdefault(_place(job), []).append(job)
    return [
        Unrun(exhibit.name, task or exhibit.title, method, marks(own), _seconds(own, paces.get(task)))
        for (task, method), own in waiting.items()
    ]


def _place(job: Job) -> tuple[str, str]:
    """Returns the task and method of a job."""
    labels = job.labels if isinstance(job, Training) else None
    return (", ".join(labels.tags), labels.job_type) if labels else ("", job.command)


def _paces(jobs: Iterable[Job], results: Results) -> dict[str, float]:
    """Returns the mean wall-clock seconds of the finished trainings, by task."""
    found: dict[str, list[float]] = {}
    for job in jobs:
        if seconds := results.of(job).data.get("wall_seconds"):
            found.setdefault(_place(job)[0], []).append(seconds)
    return {task: mean(values) for task, values in found.items()}


def _seconds(jobs: Sequence[Job], pace: float | None) -> float | None:
    """Returns the estimated seconds of a job: as planned, or as long as finished jobs of the same task took."""
    planned = [job.expected for job in jobs if job.expected is not None]
    return mean(planned) if len(planned) == len(jobs) else pace


def without_unrun(tables: Sequence[Table]) -> list[Table]:
    """Tables without the rows of jobs that were not run, and without the tables that this leaves empty."""
    kept = list(map(ran, tables))
    return [new for new, old in zip(kept, tables, strict=True) if new.rows or not old.rows]


def ran(table: Table) -> Table:
    """Returns a table without the rows of jobs that were not run."""
    return replace(table, rows=[row for row in table.rows if not _is_unrun(row)])


def _is_unrun(row: Row) -> bool:
    return bool(row.cells) and all(cell.text in (NOT_RUN, NOT_RUN_YET) for cell in row.cells)


def unrun_table(found: Sequence[Unrun]) -> Table | None:
    """Returns the list of jobs that were not run; a job of several exhibits appears once."""
    seen: set[str] = set()
    tasks: dict[tuple[str, str], list[tuple[Unrun, int]]] = {}
    for each in found:
        own = [mark for mark in each.jobs if mark not in seen]
        seen.update(own)
        if own:
            tasks.setdefault((each.exhibit, each.task), []).append((each, len(own)))
    if not tasks:
        return None
    times = {task: _together(own) for task, own in tasks.items()}
    total, unknown = sum(time or 0.0 for time in times.values()), sum(time is None for time in times.values())
    untimed = f"{unknown} row{'s' if unknown > 1 else ''} of unknown time"
    words = [f"{in_hours(total)} core hours"] * bool(total) + [untimed] * bool(unknown)
    columns = ("exhibit", "task", "methods", "runs", "core hours")
    lines = [
        Row(
            exhibit,
            [
                Cell(text)
                for text in (
                    task,
                    "; ".join(each.method for each, _ in own),
                    str(sum(count for _, count in own)),
                    in_hours(times[exhibit, task]),
                )
            ],
            (),
        )
        for (exhibit, task), own in tasks.items()
    ]
    runs = f"{len(seen)} run{'s' if len(seen) > 1 else ''}"
    return Table(f"Not run yet: {runs}, {' and '.join(words)}", columns, lines)


def _together(found: Sequence[tuple[Unrun, int]]) -> float | None:
    """Core seconds of these numbers of jobs; ``None`` if those of a row are unknown."""
    needed = [each.seconds * count for each, count in found if each.seconds is not None]
    return sum(needed) if len(needed) == len(found) else None


def in_hours(seconds: float | None) -> str:
    """Hours with two significant digits, such as 0.5 or 12,000."""
    return "unknown" if seconds is None else f"{float(f'{seconds / 3600:.2g}'):,g}"
