"""Charts of result sheets: one panel per group of rows."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from scripts.exhibits.base import Picture
from scripts.exhibits.charts import style

# Heights in inches: of a row, and of the margins.
ROW, AROUND = 0.24, 0.75
# A sheet as in JSON: title, columns, and rows of a name and its figures.
Figures: TypeAlias = Mapping[str, Any]
# Figures of a panel by row and column.
Rows: TypeAlias = Mapping[str, Mapping[str, float]]


@dataclass(frozen=True)
class Chart(ABC):
    """One way to draw a sheet.

    Attributes:
        unit: Unit of the figures.
        words: Description that follows the sheet's title.
        columns: Names of the columns to draw; empty for all columns with figures.
    """

    unit: str
    words: str = ""
    columns: tuple[str, ...] = ()

    def pictures(self, name: str, made: Figures) -> list[Picture]:
        """One panel for each group of rows, whose names differ only after the last comma; ``name`` is unique."""
        columns = [column for column in made["columns"][1:] if column in self.columns or not self.columns]
        panels = _panels(made, columns)
        caption = f"{made['title']}{self.words}"
        return [
            Picture(
                f"{name} {panel}".strip(),
                caption,
                partial(self.draw, rows, columns),
                panel,
                self.key(rows, columns),
            )
            for panel, rows in panels.items()
            if any(rows.values())
        ]

    @abstractmethod
    def key(self, rows: Rows, columns: Sequence[str]) -> Mapping[str, style.Look]:
        """Entries of the legend of a panel."""

    @abstractmethod
    def draw(self, rows: Rows, columns: Sequence[str], figure: Any) -> None:
        """Draws one panel into a figure of matplotlib."""


def _panels(made: Figures, columns: Sequence[str]) -> dict[str, dict[str, dict[str, float]]]:
    found: defaultdict[str, dict[str, dict[str, float]]] = defaultdict(dict)
    for row in made["rows"]:
        figures = dict(zip(made["columns"], row, strict=True))
        panel, _, own = row[0].rpartition(", ")
        found[panel][own] = {column: figures[column] for column in columns if not isinstance(figures[column], str)}
    return dict(found)


@dataclass(frozen=True)
class Dots(Chart):
    """Dot plot: one line per row, with one marker per column; factors have a logarithmic axis with a line at 1."""

    ratio: bool = False

    def key(self, rows: Rows, columns: Sequence[str]) -> Mapping[str, style.Look]:
        """The columns; none for a single column."""
        del rows
        return style.looks(columns) if len(columns) > 1 else {}

    def draw(self, rows: Rows, columns: Sequence[str], figure: Any) -> None:
        """Draws into a figure of matplotlib."""
        figure.set_size_inches(style.SIZE[0], AROUND + ROW * len(rows))
        axes, looks = figure.subplots(), style.looks(columns)
        style.plain(axes, self.unit, grid="x")
        for place, figures in enumerate(rows.values()):
            axes.plot(
                [min(figures.values(), default=0), max(figures.values(), default=0)], [place] * 2, color=style.LINE
            )
            for column, value in figures.items():
                look = looks[column]
                axes.plot([value], [place], look.marker, color=look.color, markersize=5.5, alpha=0.9, markeredgewidth=0)
        style.rows_from_the_top(axes, list(rows))
        values = [value for figures in rows.values() for value in figures.values()]
        if self.ratio:
            axes.axvline(1, color=style.SOFT, linewidth=0.9)
            style.logarithmic(axes.xaxis, [*values, 1.0], "\u00d7")
        else:
            axes.set_xlim(0, 1.06 * max(values) or 1)
            axes.locator_params(axis="x", nbins=5)


@dataclass(frozen=True)
class Lines(Chart):
    """Line chart: one line per row, over columns whose names contain a number; ``across`` labels the axis."""

    across: str = ""

    def key(self, rows: Rows, columns: Sequence[str]) -> Mapping[str, style.Look]:
        """The rows."""
        del columns
        return style.looks(rows)

    def draw(self, rows: Rows, columns: Sequence[str], figure: Any) -> None:
        """Draws into a figure of matplotlib."""
        axes = figure.subplots()
        style.plain(axes, self.across, self.unit)
        numbers = {column: _number(column) for column in columns}
        for figures, look in zip(rows.values(), style.looks(rows).values(), strict=True):
            places, values = [numbers[column] for column in figures], list(figures.values())
            axes.plot(places, values, color=look.color, linestyle=look.dash, marker=look.marker, markersize=4)
        style.logarithmic(axes.xaxis, numbers.values())
        axes.xaxis.set_ticks(list(numbers.values()))
        axes.locator_params(axis="y", nbins=5)


def _number(column: str) -> float:
    """First number in the name of a column, without which the sheet cannot be drawn as lines."""
    found = re.search(r"\d+(\.\d+)?", column)
    if found is None:
        raise ValueError(f"column {column!r} has no number in its name; draw this sheet with Dots")
    return float(found[0])
