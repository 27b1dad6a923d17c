"""Table cells of jobs without a result: they give the reason, never a blank or a zero, and failures are marked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from scripts.exhibits.jobs import Outcome
from scripts.exhibits.tables import Cell

__all__ = ["NOT_RUN", "NOT_RUN_YET", "any_failed", "failed", "succeeded"]

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
