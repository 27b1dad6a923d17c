"""Exhibits computed by a function: predictions of the timeline model, and whatever else needs no training."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from textwrap import fill
from typing import Any, TypeAlias

from scripts.exhibits.base import Basis, Exhibit, Picture, Results
from scripts.exhibits.failures import failed
from scripts.exhibits.jobs import Computation, Outcome
from scripts.exhibits.tables import Cell, Row, Table

__all__ = ["Computed", "Figures", "sheet"]

# Letters of a name below a group of bars, in one line.
LINE = 13

# A sheet, as JSON holds it: title, columns, and rows of a name and its figures.
Figures: TypeAlias = Mapping[str, Any]


def sheet(title: str, columns: Sequence[str], rows: Mapping[str, Sequence[float | str]]) -> Figures:
    """One table of what a function found.

    Args:
        title: over the table.
        columns: the first is the rows' names.
        rows: name to figures, or words where there is no figure.
    """
    return {"title": title, "columns": list(columns), "rows": [[name, *cells] for name, cells in rows.items()]}


@dataclass(frozen=True)
class Computed(Exhibit):
    """Sheets that a function computes from plain arguments; one bar chart of each.

    Attributes:
        function: returns ``{"sheets": [...]}``, each as :func:`sheet` makes it.
        arguments: by scale.
        shell: what to type to see the same figures.
        words: the caption.
        unit: of the figures, for the charts.
        recipe: see :class:`Computation`.
    """

    name: str
    title: str
    source: str
    shows: str
    basis: Basis
    function: Callable[..., Mapping[str, Any]]
    arguments: Mapping[str, tuple[tuple[str, Any], ...]]
    shell: str
    words: str
    unit: str
    time: str = "seconds"
    recipe: int = 1
    note: str = ""

    def job(self, scale: str) -> Computation:
        """All of it."""
        return Computation(self.name, self.function, self.arguments[scale], self.shell, self.recipe)

    def jobs(self, scale: str) -> Sequence[Computation]:
        """See :meth:`Exhibit.jobs`."""
        return [self.job(scale)]

    def cost(self, scale: str) -> str:
        """See :meth:`Exhibit.cost`."""
        return self.time

    def caption(self, scale: str) -> str:
        """See :meth:`Exhibit.caption`."""
        return self.words

    def tables(self, scale: str, results: Results) -> Sequence[Table]:
        """See :meth:`Exhibit.tables`."""
        job = self.job(scale)
        outcome = results.of(job)
        if outcome.reason is not None:
            row = Row(self.title, failed([outcome], 1), [job])
            return [Table(self.title, ("exhibit", "result"), [row])]
        return [
            Table(made["title"], made["columns"], [Row(name, _cells(cells), [job]) for name, *cells in made["rows"]])
            for made in outcome.data["sheets"]
        ]

    def pictures(self, scale: str, results: Results) -> Sequence[Picture]:
        """See :meth:`Exhibit.pictures`."""
        outcome = results.of(self.job(scale))
        return [
            Picture(f"{number}", made["title"], partial(_draw, made, self.unit))
            for number, made in enumerate(_sheets(outcome), 1)
        ]


def _sheets(outcome: Outcome) -> Sequence[Figures]:
    sheets: Sequence[Figures] = outcome.data.get("sheets", ())
    return sheets


def _cells(values: Sequence[float | str]) -> list[Cell]:
    return [Cell(value) if isinstance(value, str) else Cell(f"{value:.4g}", float(value)) for value in values]


def _draw(made: Figures, unit: str, figure: Any) -> None:
    """Bars in groups, a group for each row; words have no bar."""
    axes = figure.subplots()
    names, columns = [fill(row[0], LINE) for row in made["rows"]], made["columns"][1:]
    width = 0.8 / max(1, len(columns))
    for number, column in enumerate(columns):
        heights = [row[1 + number] if not isinstance(row[1 + number], str) else 0.0 for row in made["rows"]]
        places = [place + (number - (len(columns) - 1) / 2) * width for place in range(len(names))]
        axes.bar(places, heights, width, label=column)
    axes.set_xticks(range(len(names)), names, fontsize=8)
    axes.set_ylabel(unit)
    axes.set_title(made["title"], fontsize=10)
    axes.margins(y=0.2)  # for the legend
    axes.grid(alpha=0.3, axis="y")
    axes.legend(fontsize=7)
