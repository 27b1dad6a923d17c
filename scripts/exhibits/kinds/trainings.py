"""Exhibits that compare methods by training with each of them, several times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from statistics import mean
from typing import Any

from scripts.exhibits.base import Basis, Exhibit, Picture, Results
from scripts.exhibits.failures import failed
from scripts.exhibits.jobs import Labels, Outcome, Training
from scripts.exhibits.measures import draw_curves, final_metric, metric_curve, share_of_bytes
from scripts.exhibits.statistics import interval, spread
from scripts.exhibits.tables import Cell, Row, Table

__all__ = ["Case", "MethodComparison", "Plan"]

COLUMNS = ("method", "metric", "95% interval", "every seed", "sent / dense", "virtual seconds", "seconds / first row's")


@dataclass(frozen=True)
class Case:
    """One task that all methods are trained on.

    Attributes:
        name: as the paper calls it.
        words: of train.py: model, data, how long.
        what: what that is, for the caption.
        lower: whether a lower metric is a better one.
    """

    name: str
    words: tuple[str, ...]
    what: str
    lower: bool = False

    @property
    def title(self) -> str:
        """Over tables and figures: what the paper has, and what was trained for it."""
        return f"{self.name}: {self.what}"


@dataclass(frozen=True)
class Plan:
    """What a scale means for one exhibit.

    Attributes:
        cases: the tasks.
        words: what all trainings share.
        seeds: one training each.
        cost: about how long all of it takes.
        cluster: choice of ``cluster=``.
        only: names of the methods that are trained; ``None``: all.
    """

    cases: tuple[Case, ...]
    words: tuple[str, ...]
    seeds: tuple[int, ...]
    cost: str
    cluster: str = "simulated"
    only: tuple[str, ...] | None = None


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
    note: str = field(default="", kw_only=True)

    def compared(self, plan: Plan) -> Sequence[str]:
        """The methods that are trained."""
        return tuple(self.methods) if plan.only is None else plan.only

    def job(self, plan: Plan, case: Case, method: str, seed: int) -> Training:
        """One training."""
        words = ("recipe=published", *plan.words, *case.words, *self.methods[method], f"seed={seed}")
        return Training(words, Labels(self.name, method, (case.name,)), plan.cluster)

    def jobs(self, scale: str) -> Sequence[Training]:
        """See :meth:`Exhibit.jobs`."""
        plan = self.plans[scale]
        return [self.job(plan, *choice) for choice in product(plan.cases, self.compared(plan), plan.seeds)]

    def cost(self, scale: str) -> str:
        """See :meth:`Exhibit.cost`."""
        return f"{len(self.jobs(scale))} trainings, {self.plans[scale].cost}"

    def caption(self, scale: str) -> str:
        """See :meth:`Exhibit.caption`."""
        plan = self.plans[scale]
        cases = "; ".join(case.title for case in plan.cases)
        return f"{cases}. Seeds {', '.join(map(str, plan.seeds))}; mean ± standard deviation. {' '.join(plan.words)}"

    def tables(self, scale: str, results: Results) -> Sequence[Table]:
        """See :meth:`Exhibit.tables`."""
        return [self.table(self.plans[scale], case, results) for case in self.plans[scale].cases]

    def table(self, plan: Plan, case: Case, results: Results) -> Table:
        """One row for each method."""
        rows: list[Row] = []
        first: float | None = None
        for method in self.compared(plan):
            jobs = [self.job(plan, case, method, seed) for seed in plan.seeds]
            outcomes = [results.of(job) for job in jobs]
            good = [outcome for outcome in outcomes if outcome.reason is None]
            seconds = mean(outcome.data["cluster_seconds"] for outcome in good) if good else None
            first = first if rows else seconds
            rows.append(Row(method, _cells(outcomes, good, first), jobs))
        return Table(f"{self.title}: {case.title}", COLUMNS, rows)

    def pictures(self, scale: str, results: Results) -> Sequence[Picture]:
        """See :meth:`Exhibit.pictures`."""
        plan = self.plans[scale]
        return [
            Picture(
                case.name,
                f"{case.title}: the metric against virtual seconds, one line a seed",
                partial(self._draw, plan, case, results),
            )
            for case in plan.cases
        ]

    def _draw(self, plan: Plan, case: Case, results: Results, figure: Any) -> None:
        axes = figure.subplots()
        found = {
            method: [results.of(self.job(plan, case, method, seed)) for seed in plan.seeds]
            for method in self.compared(plan)
        }
        good = {method: [each for each in outcomes if each.reason is None] for method, outcomes in found.items()}
        curves = {
            method: [metric_curve(each.data, each.events("eval")) for each in outcomes]
            for method, outcomes in good.items()
        }
        metrics = {each.data["metric"] for outcomes in good.values() for each in outcomes}
        draw_curves(axes, curves, "seconds", ", ".join(sorted(metrics)))
        axes.set_xlabel("virtual seconds")
        axes.set_title(case.title, fontsize=10)


def _cells(outcomes: Sequence[Outcome], good: Sequence[Outcome], first: float | None) -> list[Cell]:
    if not good:
        return failed(outcomes, len(COLUMNS) - 1)
    lost = len(good) < len(outcomes)
    values = [final_metric(outcome.data) for outcome in good]
    seconds = mean(outcome.data["cluster_seconds"] for outcome in good)
    bounds = interval(values)
    share = share_of_bytes(outcome.data for outcome in good)
    seeds = ", ".join(o.fault if o.reason else f"{final_metric(o.data):.4g}" for o in outcomes)
    return [
        Cell(f"{good[0].data['metric']} {spread(values)}", mean(values), bad=lost),
        Cell("too few seeds" if bounds is None else f"{bounds[0]:.4g} to {bounds[1]:.4g}"),
        Cell(seeds, bad=lost),
        Cell(f"{share:.2%}", share),
        Cell(f"{seconds:.4g}", seconds),
        Cell(f"{seconds / first:.3g}" if first else "unknown", seconds / first if first else None),
    ]
