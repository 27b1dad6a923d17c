"""How work that failed shows in a table: with its reason, never as a blank or a zero."""

from __future__ import annotations

from exhibits.jobs import Outcome
from exhibits.tables import Cell

__all__ = ["failed"]


def failed(outcome: Outcome, count: int) -> list[Cell]:
    """The cells of a row whose work failed.

    Args:
        outcome: says why.
        count: of cells, at least 1.
    """
    return [Cell(f"failed: {outcome.reason}", bad=True), *[Cell("failed", bad=True)] * (count - 1)]
