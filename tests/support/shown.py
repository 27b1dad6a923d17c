"""Results made of plain data, and what tables and pictures of exhibits show of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scripts.exhibits.base import Picture, Results
from scripts.exhibits.jobs import Job, Outcome
from scripts.exhibits.tables import Cell, Table

NOTHING = Results(Path("x"), {})


def results(found: Mapping[Job, Mapping[str, Any]]) -> Results:
    """Results of jobs from their data."""
    return Results(Path("x"), {job: Outcome(Path("x"), data) for job, data in found.items()})


def cells(table: Table, name: str) -> dict[str, Cell]:
    """The cells of the row of this name, by column."""
    (row,) = (row for row in table.rows if row.name == name)
    return dict(zip(table.columns[1:], row.cells, strict=True))


def texts(table: Table, name: str) -> dict[str, str]:
    """The texts of the row of this name, by column."""
    return {column: cell.text for column, cell in cells(table, name).items()}


def axes(picture: Picture) -> Any:
    """The axes of a picture, drawn by matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(layout="constrained")
    picture.draw(figure)
    figure.draw_without_rendering()
    (found,) = figure.axes
    return found
