"""One table of any run folders: mean and standard deviation over seeds, time, bytes and path of each method."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean, stdev

from scripts.exhibits.machines import machine_of
from scripts.exhibits.pages.runs import Comparison, Finished, Method
from scripts.exhibits.tables import Cell, Row, Table

__all__ = ["CLOCKS", "run_machines", "run_table", "seconds_by_machine"]

COLUMNS = (
    "method",
    "task",
    "seeds",
    "metric",
    "mean",
    "standard deviation",
    "seconds",
    "seconds, standard deviation",
    "clock",
    "machine",
    "bytes per step",
    "sent / dense",
    "path",
)
CLOCKS = {True: "virtual", False: "real"}


def run_table(comparisons: Sequence[Comparison]) -> Table:
    """One row per method and task.

    Args:
        comparisons: Runs by task.
    """
    rows = [_row(comparison, method) for comparison in comparisons for method in comparison.methods]
    return Table("Runs", COLUMNS, rows)


def _row(comparison: Comparison, method: Method) -> Row:
    runs = method.runs
    seconds = [run.seconds for run in runs] if len(run_machines(runs)) == 1 else []
    sent = mean(run.summary["step_bytes"] for run in runs)
    share = mean(run.share for run in runs)
    cells = [
        Cell(comparison.title),
        Cell(str(len(runs)), len(runs)),
        Cell(str(runs[0].summary["metric"])),
        _mean([run.metric for run in runs]),
        _deviation([run.metric for run in runs]),
        _mean(seconds) if seconds else Cell(seconds_by_machine(runs)),
        _deviation(seconds),
        Cell(", ".join(sorted({CLOCKS[run.simulated] for run in runs}))),
        Cell("; ".join(run_machines(runs))),
        Cell(f"{sent:.4g}", sent),
        Cell(f"{share:.2%}", share),
        Cell("; ".join(str(run.folder) for run in runs)),
    ]
    return Row(method.name, cells, ())


def _mean(values: Sequence[float]) -> Cell:
    return Cell(f"{mean(values):.4g}", mean(values))


def _deviation(values: Sequence[float]) -> Cell:
    """Sample standard deviation; a dash for fewer than two values."""
    if len(values) < 2:
        return Cell("-")
    found = stdev(values)
    return Cell(f"{found:.2g}", found)


def run_machines(runs: Sequence[Finished]) -> list[str]:
    """Names of the machines of runs, in alphabetical order."""
    return sorted({_machine(run) for run in runs})


def seconds_by_machine(runs: Sequence[Finished]) -> str:
    """Mean seconds of each machine, in the order of :func:`run_machines`: they have no common mean."""
    groups = [[run.seconds for run in runs if _machine(run) == name] for name in run_machines(runs)]
    return "; ".join(f"{mean(group):.4g}" for group in groups)


def _machine(run: Finished) -> str:
    return machine_of(run.summary.get("environment", {}))
