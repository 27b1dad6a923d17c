"""Kinds of exhibits."""

from __future__ import annotations

from scripts.exhibits.tables import Cell


def number(value: float, form: str = ".3g", after: str = "") -> Cell:
    """Returns the cell of a figure, in a format and with a text after it."""
    return Cell(f"{value:{form}}{after}", value)
