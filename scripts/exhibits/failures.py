"""How work without a result shows in a table: with the reason, never as a blank or a zero; what failed is marked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from scripts.exhibits.jobs import Outcome
from scripts.exhibits.tables import Cell

__all__ = ["any_failed", "failed", "succeeded"]


def succeeded(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Those of work that has a result."""
    return [outcome for outcome in outcomes if outcome.reason is None]


def any_failed(outcomes: Iterable[Outcome]) -> bool:
    """Whether work has no result though it was begun."""
    return any(outcome.reason is not None and outcome.started for outcome in outcomes)


def failed(outcomes: Sequence[Outcome], count: int) -> list[Cell]:
    """The cells of a row whose work has no result.

    Args:
        outcomes: of which one at least says why.
        count: of cells, at least 1.
    """
    lost = [outcome for outcome in outcomes if outcome.reason is not None]
    told = "; ".join(sorted({outcome.fault for outcome in lost}))
    begun = any_failed(lost)
    return [Cell(told, bad=begun), *[Cell("failed" if begun else "not run", bad=begun)] * (count - 1)]
