"""Table cells of jobs without a result: they give the reason, never a blank or a zero, and failures are marked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from scripts.exhibits.jobs import Job, Outcome
from scripts.exhibits.tables import Cell, Row

__all__ = ["NOT_RUN", "NOT_RUN_YET", "any_failed", "failed", "row_of", "succeeded"]

# Cells of a row of which no job was started.
NOT_RUN_YET, NOT_RUN = "not run yet", "not run"


def succeeded(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Outcomes that have a result."""
    return [outcome for outcome in outcomes if outcome.reason is None]


def any_failed(outcomes: Iterable[Outcome]) -> bool:
    """Whether a job that was started has no result."""
    return any(outcome.reason is not None and outcome.started for outcome in outcomes)


def failed(outcomes: Sequence[Outcome], count: int) -> list[Cell]:
    """Cells of a row without a result.

    Args:
        outcomes: Outcomes of the row's jobs, at least one without a result.
        count: Number of cells, at least 1.
    """
    lost = [outcome for outcome in outcomes if outcome.reason is not None]
    reasons = "; ".join(sorted({outcome.fault for outcome in lost}))
    begun = any_failed(lost)
    return [Cell(reasons, bad=begun), *[Cell("failed" if begun else NOT_RUN, bad=begun)] * (count - 1)]


def row_of(
    name: str, job: Job, outcome: Outcome, count: int, cells: Callable[[Mapping[str, Any]], Sequence[Cell]]
) -> Row:
    """Row of one job, also of a failed one.

    Args:
        name: Name of the row.
        job: The job.
        outcome: Its outcome.
        count: Number of cells, at least 1.
        cells: Function that makes the cells from the result.
    """
    return Row(name, failed([outcome], count) if outcome.reason is not None else cells(outcome.data), [job])
