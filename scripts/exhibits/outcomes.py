"""Outcomes by success and by machine; cells of jobs without a result give the reason, and failures are marked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from scripts.exhibits.jobs import Job, Outcome
from scripts.exhibits.tables import Cell, Row

# Cells of a row of which no job was started.
NOT_RUN_YET, NOT_RUN = "not run yet", "not run"


def succeeded(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Outcomes that have a result."""
    return [outcome for outcome in outcomes if outcome.reason is None]


def any_failed(outcomes: Iterable[Outcome]) -> bool:
    """Whether a job that was started has no result."""
    return any(outcome.reason is not None and outcome.started for outcome in outcomes)


def failed(outcomes: Sequence[Outcome], count: int) -> list[Cell]:
    """A number of cells, at least 1, of a row whose jobs have at least one outcome without a result."""
    lost = [outcome for outcome in outcomes if outcome.reason is not None]
    reasons = "; ".join(sorted({outcome.fault for outcome in lost}))
    begun = any_failed(lost)
    return [Cell(reasons, bad=begun), *[Cell("failed" if begun else NOT_RUN, bad=begun)] * (count - 1)]


def row_of(
    name: str, job: Job, outcome: Outcome, count: int, cells: Callable[[Mapping[str, Any]], Sequence[Cell]]
) -> Row:
    """Row of one job, with a number of cells that a function makes from the result; also of a failed job."""
    return Row(name, failed([outcome], count) if outcome.reason is not None else cells(outcome.data), [job])


UNKNOWN = "unknown machine"


def machine_of(made: Mapping[str, Any]) -> str:
    """Returns the processor and torch version of an environment; both change how long local work takes."""
    torch = str(made.get("torch") or "").partition("+")[0]
    parts = [str(made.get("cpu") or ""), f"torch {torch}" if torch else ""]
    return ", ".join(part for part in parts if part) or UNKNOWN


def by_machine(outcomes: Sequence[Outcome]) -> dict[str, list[Outcome]]:
    """Outcomes that succeeded, by machine in alphabetical order."""
    good = succeeded(outcomes)
    return {name: [outcome for outcome in good if machine_of(outcome.made) == name] for name in machines(good)}


def machines(outcomes: Iterable[Outcome]) -> list[str]:
    """Returns the names of the machines of outcomes, in alphabetical order."""
    return sorted({machine_of(outcome.made) for outcome in outcomes})


def common(one: Sequence[Outcome], other: Sequence[Outcome]) -> tuple[Sequence[Outcome], Sequence[Outcome]] | None:
    """Returns the outcomes of both on the machine that they share with most results; ``None`` if they share none."""
    ours, theirs = by_machine(one), by_machine(other)
    shared = [name for name in ours if name in theirs]
    if not shared:
        return None
    most = max(shared, key=lambda name: min(len(ours[name]), len(theirs[name])))
    return ours[most], theirs[most]
