"""Exhibits computed by a function, such as predictions of the timeline model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from scripts.benchmarks import schedules as bench_schedules
from scripts.exhibits.base import ByScale, Exhibit, Picture, Results, at
from scripts.exhibits.charts.sheets import Chart, Dots, Figures
from scripts.exhibits.jobs import Computation, Outcome
from scripts.exhibits.kinds.gpu import basis_of
from scripts.exhibits.outcomes import failed
from scripts.exhibits.passes import MeasuredPasses
from scripts.exhibits.tables import Cell, Row, Table

# Model, file and digest of each --profile.
Files: TypeAlias = Sequence[tuple[str, str, str]]


def sheet(title: str, columns: Sequence[str], rows: Mapping[str, Sequence[float | str]]) -> Figures:
    """One table of results as JSON data.

    Args:
        title: Title of the table.
        columns: Names of the columns; the first one holds the row names.
        rows: Figures by row name, with texts for missing figures.
    """
    return {"title": title, "columns": list(columns), "rows": [[name, *cells] for name, cells in rows.items()]}


def by_network(
    title: str, columns: Sequence[str], rows: Callable[[str], Mapping[str, Sequence[float | str]]]
) -> dict[str, Any]:
    """One sheet for each network of the predictions.

    Args:
        title: Title of the sheets, without the network.
        columns: Names of the columns; the first one holds the row names.
        rows: Returns the figures by row name for the name of a network.
    """
    return {"sheets": [sheet(f"{title}, {network}", columns, rows(network)) for network in bench_schedules.NETWORKS]}


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
        sizes: Number of parameters of the models whose passes the function assumes. If there are any, the function
            accepts ``models`` and ``measured``, with model, file and digest each.
        compresses: Whether the function also assumes the times of compressors.
    """

    function: Callable[..., Mapping[str, Any]]
    arguments: ByScale[tuple[tuple[str, Any], ...]]
    shell: str
    words: str
    charts: tuple[Chart, ...] = (Dots("value"),)
    time: str = "seconds"
    recipe: int = 1
    sizes: Mapping[str, int] = field(default_factory=dict)
    compresses: bool = False

    def assumes(self, scale: str) -> Sequence[str]:
        given = dict(at(scale, self.arguments))
        measured = {model for model, *_ in given.get("measured", ())}
        return [model for model in given.get("models", ()) if model in self.sizes and model not in measured]

    def guesses(self, scale: str) -> bool:
        return self.compresses or not self.sizes or bool(self.assumes(scale))

    def with_passes(self, given: Mapping[str, MeasuredPasses]) -> Computed:
        own = {model: given[model].checked(model, size) for model, size in self.sizes.items() if model in given}
        if not own:
            return self
        files = " ".join(f"--profile {model}={passes.path}" for model, passes in own.items())
        return replace(
            self,
            arguments={scale: _with_passes(each, own) for scale, each in self.arguments.items()},
            shell=f"python scripts/reproduce.py {self.name} {files}",
            basis=basis_of(self.basis, own),
            words=f"{self.words} Passes are measured: {_told(own)}.",
        )

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
            for number, made in enumerate(_sheets(outcome), 1)
            for place, chart in enumerate(self.charts, 1)
            for picture in chart.pictures(f"{number}-{place}", made)
        ]


@dataclass(frozen=True)
class Prediction(Computed):
    """Predictions of the timeline model, from profiles with assumed GPU times."""

    sizes: Mapping[str, int] = field(default_factory=bench_schedules.sizes)


def _with_passes(
    arguments: tuple[tuple[str, Any], ...], own: Mapping[str, MeasuredPasses]
) -> tuple[tuple[str, Any], ...]:
    """Adds the files of the models among the arguments; arguments without such models stay unchanged."""
    models = dict(arguments)["models"]
    measured = tuple((name, str(each.path), each.digest) for name, each in own.items() if name in models)
    return (*arguments, ("measured", measured)) if measured else arguments


def _told(own: Mapping[str, MeasuredPasses]) -> str:
    return "; ".join(f"{model}: {passes.words}" for model, passes in own.items())


def _sheets(outcome: Outcome) -> Sequence[Figures]:
    sheets: Sequence[Figures] = outcome.data.get("sheets", ())
    return sheets


def _cells(values: Sequence[float | str]) -> list[Cell]:
    return [Cell(value) if isinstance(value, str) else Cell(f"{value:.4g}", float(value)) for value in values]
