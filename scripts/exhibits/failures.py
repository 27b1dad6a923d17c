"""How work without a result shows in a table: with the reason, never as a blank or a zero."""

from __future__ import annotations

from collections.abc import Sequence

from scripts.exhibits.jobs import Outcome
from scripts.exhibits.tables import Cell

__all__ = ["failed"]


def failed(outcomes: Sequence[Outcome], count: int) -> list[Cell]:
    """The cells of a row whose work has no result.

    Args:
        outcomes: of which one at least says why.
        count: of cells, at least 1.
    """
    lost = [outcome for outcome in outcomes if outcome.reason is not None]
    told = "; ".join(sorted({outcome.fault for outcome in lost}))
    rest = "failed" if any(outcome.started for outcome in lost) else "not run"
    return [Cell(told, bad=True), *[Cell(rest, bad=True)] * (count - 1)]
