"""Exhibits that compare methods by training with each of them, several times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from statistics import mean
from typing import Any

from exhibits.base import Basis, Exhibit, Picture, Results
from exhibits.jobs import Outcome, Training
from exhibits.statistics import interval, spread
from exhibits.tables import Cell, Row, Table

__all__ = ["Case", "MethodComparison", "Plan"]

COLUMNS = ("method", "metric", "95% interval", "every seed", "sent / dense", "virtual seconds", "seconds / first row's")


@dataclass(frozen=True)
class Case:
    """One task that all methods are trained on.

    Attributes:
        name: as the paper calls it.
        words: of train.py: model, data, how long.
        what: what that is, for the caption.
    """

    name: str
    words: tuple[str, ...]
    what: str


@dataclass(frozen=True)
class Plan:
    """What a scale means for one exhibit.

    Attributes:
        cases: the tasks.
        words: what all trainings share.
        seeds: one training each.
        cost: about how long all of it takes.
    """

    cases: tuple[Case, ...]
    words: tuple[str, ...]
    seeds: tuple[int, ...]
    cost: str


@dataclass(frozen=True)
class MethodComparison(Exhibit):
    """Methods x cases x seeds, all trained; one table and one picture for each case.

    Attributes:
        methods: name to words of train.py; times are compared with those of the first one.
        plans: by scale.
        network: words that choose the virtual network.
    """

    name: str
    title: str
    source: str
    shows: str
    basis: Basis
    methods: Mapping[str, tuple[str, ...]]
    plans: Mapping[str, Plan]

    def job(self, plan: Plan, case: Case, method: str, seed: int) -> Training:
        """One training."""
        return Training((*plan.words, *case.words, *self.methods[method], f"seed={seed}"))

    def jobs(self, scale: str) -> Sequence[Training]:
        """See :meth:`Exhibit.jobs`."""
        plan = self.plans[scale]
        return [self.job(plan, *choice) for choice in product(plan.cases, self.methods, plan.seeds)]

    def cost(self, scale: str) -> str:
        """See :meth:`Exhibit.cost`."""
        return f"{len(self.jobs(scale))} trainings, {self.plans[scale].cost}"

    def caption(self, scale: str) -> str:
        """See :meth:`Exhibit.caption`."""
        plan = self.plans[scale]
        cases = "; ".join(f"{case.name}: {case.what}" for case in plan.cases)
        return f"{cases}. Seeds {', '.join(map(str, plan.seeds))}; mean ± standard deviation. {' '.join(plan.words)}"

    def tables(self, scale: str, results: Results) -> Sequence[Table]:
        """See :meth:`Exhibit.tables`."""
        return [self._table(self.plans[scale], case, results) for case in self.plans[scale].cases]

    def _table(self, plan: Plan, case: Case, results: Results) -> Table:
        rows: list[Row] = []
        first: float | None = None
        for method in self.methods:
            jobs = [self.job(plan, case, method, seed) for seed in plan.seeds]
            outcomes = [results.of(job) for job in jobs]
            good = [outcome for outcome in outcomes if outcome.reason is None]
            seconds = mean(outcome.data["cluster_seconds"] for outcome in good) if good else None
            first = first if rows else seconds
            rows.append(Row(method, _cells(outcomes, good, first), jobs))
        return Table(f"{self.title}: {case.name}", COLUMNS, rows)

    def pictures(self, scale: str, results: Results) -> Sequence[Picture]:
        """See :meth:`Exhibit.pictures`."""
        plan = self.plans[scale]
        return [
            Picture(
                case.name.lower().replace(" ", "-"),
                f"{case.name}: the metric against virtual seconds, one line a seed",
                partial(self._draw, plan, case, results),
            )
            for case in plan.cases
        ]

    def _draw(self, plan: Plan, case: Case, results: Results, figure: Any) -> None:
        axes = figure.subplots()
        for number, method in enumerate(self.methods):
            outcomes = [results.of(self.job(plan, case, method, seed)) for seed in plan.seeds]
            for outcome in outcomes:
                if outcome.reason is None:
                    axes.plot(*_curve(outcome), color=f"C{number}", alpha=0.8, linewidth=1.2)
                    axes.set_ylabel(outcome.data["metric"])
            axes.plot([], [], color=f"C{number}", label=method)
        axes.set_xlabel("virtual seconds")
        axes.set_title(case.name)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)


def _cells(outcomes: Sequence[Outcome], good: Sequence[Outcome], first: float | None) -> list[Cell]:
    failures = {outcome.reason for outcome in outcomes if outcome.reason}
    if not good:
        return [Cell(f"failed: {'; '.join(sorted(failures))}", bad=True), *[Cell("failed", bad=True)] * 5]
    values = [outcome.data["final"][outcome.data["metric"]] for outcome in good]
    seconds = mean(outcome.data["cluster_seconds"] for outcome in good)
    bounds = interval(values)
    dense = good[0].data["step_bytes_dense"]
    share = mean(outcome.data["step_bytes"] for outcome in good) / dense if dense else 1.0
    seeds = ", ".join("failed: " + o.reason if o.reason else f"{_metric(o):.4g}" for o in outcomes)
    return [
        Cell(f"{good[0].data['metric']} {spread(values)}", mean(values), bad=bool(failures)),
        Cell("too few seeds" if bounds is None else f"{bounds[0]:.4g} to {bounds[1]:.4g}"),
        Cell(seeds, bad=bool(failures)),
        Cell(f"{share:.2%}", share),
        Cell(f"{seconds:.4g}", seconds),
        Cell(f"{seconds / first:.3g}" if first else "unknown", seconds / first if first else None),
    ]


def _metric(outcome: Outcome) -> float:
    value: float = outcome.data["final"][outcome.data["metric"]]
    return value


def _curve(outcome: Outcome) -> tuple[list[float], list[float]]:
    """Virtual seconds and metric of every evaluation; steps take equally long."""
    pace = outcome.data["cluster_seconds"] / outcome.data["steps"]
    points = [(event["step"] * pace, event[outcome.data["metric"]]) for event in outcome.events("eval")]
    return [seconds for seconds, _ in points], [value for _, value in points]
