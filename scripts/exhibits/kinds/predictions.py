"""Exhibits computed by a function, such as predictions of the timeline model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scripts.exhibits.base import ByScale, Exhibit, Picture, Results, at
from scripts.exhibits.charts.sheets import Chart, Dots, Figures
from scripts.exhibits.jobs import Computation
from scripts.exhibits.kinds import gpu, number
from scripts.exhibits.tables import Cell, Row, Table, failed


def sheet(title: str, columns: Sequence[str], rows: Mapping[str, Sequence[float | str]]) -> Figures:
    """One table of results as JSON data, with texts for missing figures; the first column has the names of the rows."""
    return {"title": title, "columns": list(columns), "rows": [[name, *cells] for name, cells in rows.items()]}


def by_network(
    title: str, columns: Sequence[str], rows: Callable[[str], Mapping[str, Sequence[float | str]]]
) -> dict[str, Any]:
    """One sheet for each network of the predictions; ``rows`` returns its figures by the name of the network."""
    return {"sheets": [sheet(f"{title}, {network}", columns, rows(network)) for network in gpu.NETWORKS]}


@dataclass(frozen=True)
class Computed(Exhibit):
    """Sheets that a function computes from plain arguments, each drawn as one or several charts.

    Attributes:
        function: Function that returns ``{"sheets": [...]}`` with results of :func:`sheet`.
        arguments: Arguments of the function by size preset.
        shell: Command that prints the same figures.
        words: Caption.
        charts: Charts of each sheet.
        recipe: Recipe of the job, see :class:`Computation`.
        time: Approximate duration.
    """

    function: Callable[..., Mapping[str, Any]]
    arguments: ByScale[tuple[tuple[str, Any], ...]]
    shell: str
    words: str
    charts: tuple[Chart, ...] = (Dots("value"),)
    time: str = "seconds"
    recipe: int = 1

    def job(self, scale: str) -> Computation:
        """Job of the whole computation."""
        return Computation(self.name, self.function, at(scale, self.arguments), self.shell, self.recipe)

    def jobs(self, scale: str) -> Sequence[Computation]:
        return [self.job(scale)]

    def cost(self, scale: str) -> str:
        return self.time

    def caption(self, scale: str) -> str:
        return self.words

    def tables(self, scale: str, results: Results) -> Sequence[Table]:
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
        outcome = results.of(self.job(scale))
        return [
            picture
            for sheet_number, made in enumerate(outcome.data.get("sheets", ()), 1)
            for place, chart in enumerate(self.charts, 1)
            for picture in chart.pictures(f"{sheet_number}-{place}", made)
        ]


def _cells(values: Sequence[float | str]) -> list[Cell]:
    return [Cell(value) if isinstance(value, str) else number(float(value), ".4g") for value in values]
