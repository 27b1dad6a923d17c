"""State of runs, determined from their folders, the queue and their logs, and its table."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table
from rich.text import Text

from scripts.submission.site import Job, Queued
from scripts.submission.submissions import Entry, Submission
from spardl.basics.files import read_tail
from trainer.display import table_console
from trainer.runs import Run, final_metric, finished_run, runs_of

__all__ = ["FINISHED", "GOOD", "Standing", "print_table", "standing"]

FINISHED, RUNNING, QUEUED = "finished", "running", "queued"
GOOD = frozenset({FINISHED, RUNNING, QUEUED})
# Bytes to search at the end of logs and metrics.
_END = 1 << 20
# Errors of train.py come first, because Slurm only adds that a task has ended.
_STOPPED = re.compile(r"^stopped(?:, as asked,| on request) (.*)", re.MULTILINE)
_ERRORS = (re.compile(r"^error: (.*)", re.MULTILINE), re.compile(r"\berror: (.*)"))


class Standing(NamedTuple):
    """State of one run.

    Attributes:
        state: One of finished, running, queued, failed, stopped, interrupted, died, not begun, unknown.
        note: The result, the last step, or the reason of the state.
        live: Whether the job is waiting or running.
    """

    state: str
    note: str
    live: bool


def standing(submission: Submission, entry: Entry, queue: Mapping[str, Job]) -> Standing:
    """Determines the state of a run, with the jobs in the queue."""
    job = queue.get(entry.job or "")
    run = _run(submission, entry)
    summary = run.read_summary() if run else {}
    status = str(summary.get("status", ""))
    if status == FINISHED and run:
        return Standing(FINISHED, _result(summary), False)
    if job is None:
        return Standing(*_gone(status, run, summary, submission.log(entry)), False)
    if job.state is Queued.UNKNOWN:
        return Standing(status or "unknown", "the queue does not answer", True)
    if job.state is Queued.WAITING:
        known = (str(summary.get("reason") or _progress(run)), job.reason)
        return Standing(QUEUED, "; ".join(filter(None, known)), True)
    return Standing(RUNNING, _progress(run) if status == RUNNING else "starting", True)


def _run(submission: Submission, entry: Entry) -> Run | None:
    """Returns the finished run of an entry, otherwise the newest; with force, only runs since the submission."""
    runs = runs_of(submission.outputs, entry.id)
    if submission.force:
        runs = [run for run in runs if _touched(run) >= submission.since]
        return runs[0] if runs else None
    return finished_run(submission.outputs, entry.id) or (runs[0] if runs else None)


def _touched(run: Run) -> float:
    with suppress(OSError):
        return run.summary_file.stat().st_mtime
    return run.folder.stat().st_mtime


def _result(summary: Mapping[str, Any]) -> str:
    value = final_metric(summary)
    return f"{summary.get('steps')} steps" if value is None else f"{summary['metric']} {value:.4g}"


def _progress(run: Run | None) -> str:
    step = _last_step(run) if run else None
    return "" if step is None else f"step {step}"


def _last_step(run: Run) -> int | None:
    with suppress(OSError, ValueError, LookupError, TypeError, RecursionError):
        last = read_tail(run.metrics_file, _END).rpartition(b"}")[0].splitlines()[-1] + b"}"
        return int(json.loads(last)["step"])
    return None


def _gone(status: str, run: Run | None, summary: Mapping[str, Any], log: Path | None) -> tuple[str, str]:
    """Returns the state and the note of a run without a job, by the status in its summary."""
    if status in ("failed", "stopped", "interrupted"):
        return status, str(summary.get("reason") or _last_error(log) or _progress(run))
    if status == RUNNING:
        return "died", "; ".join(filter(None, (_progress(run), _last_error(log)))) or "its log has no error"
    if log is None or not log.exists():
        return "not begun", "its job has left the queue"
    stops = _STOPPED.findall(_read(log))
    return ("stopped", stops[-1]) if stops else ("failed", _last_error(log) or "it ended before it began")


def _last_error(log: Path | None) -> str | None:
    found = next(filter(None, (pattern.findall(_read(log)) for pattern in _ERRORS)), [""])
    return str(found[-1]).strip(" *") or None


def _read(log: Path | None) -> str:
    with suppress(OSError):
        lines = read_tail(log, _END).splitlines() if log else []
        return "\n".join(line.decode(errors="replace") for line in lines)
    return ""


_COLOURS = {"finished": "green", "running": "cyan", "queued": "blue"}
_OTHERWISE = "red"
# Width for files and pipes, so that lines are not wrapped.
_WIDE = 10_000


def print_table(submission: Submission, found: Sequence[Standing]) -> None:
    """Prints one line per run and the number of runs in each state."""
    console = table_console(_WIDE)
    table = Table("", "id", "state", "", "job", "run", box=None, pad_edge=False)
    for number, (entry, one) in enumerate(zip(submission.entries, found, strict=True), 1):
        state = Text(one.state, style=_COLOURS.get(one.state, _OTHERWISE))
        table.add_row(str(number), entry.id, state, Text(one.note), entry.job or "", Text(submission.label(entry)))
    console.print(table)
    counts = Counter(one.state for one in found)
    console.print(f"{submission.name}: " + ", ".join(f"{count} {state}" for state, count in counts.items()))
