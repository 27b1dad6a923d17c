"""Exhibits that compare methods by training with each of them, several times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from statistics import mean
from typing import Any, NamedTuple, TypeAlias

from scripts.exhibits.base import Basis, Picture, Planned, Results, at
from scripts.exhibits.charts.curves import draw_means, key_of
from scripts.exhibits.failures import any_failed, failed, succeeded
from scripts.exhibits.jobs import Labels, Outcome, Training
from scripts.exhibits.measures import final_metric, metric_curve, share_of_bytes
from scripts.exhibits.statistics import INTERVAL, shown_interval, spread
from scripts.exhibits.tables import Cell, Row, Table
from scripts.exhibits.tried import Role, Target, Tried, tried

__all__ = ["ALONE", "DENSE", "Case", "Known", "MethodComparison", "Own", "Plan"]

METRIC = "The metric while the methods train, against virtual seconds"
COLUMNS = ("method", "metric", INTERVAL, "every seed", "sent / dense", "virtual seconds", "seconds / first row's")


# The words of the method that sends all; accuracies are judged beside it.
DENSE = ("compressor=none",)
ALONE = (*DENSE, "cluster.workers=1")


class Known(NamedTuple):
    """What is known of dense training.

    Attributes:
        value: of the metric that it reaches at least, or at most where less is better.
        source: whose it is.
    """

    value: float
    source: str

    def __str__(self) -> str:
        return f"{self.value:g} ({self.source})"


# Names of methods, and words of train.py that these have besides.
Own: TypeAlias = tuple[tuple[str, tuple[str, ...]], ...]


@dataclass(frozen=True)
class Case:
    """One task that all methods are trained on.

    Attributes:
        name: as the paper calls it, or what is trained begins, if the paper has no such task.
        words: of train.py: model, data, how long.
        what: what is trained for it, for captions and titles.
        lower: whether a lower metric is a better one.
        own: further words of single methods, such as a learning rate that is better for them.
        known: what dense training is known to reach; ``None``: no accuracy can be judged.
        worker_seconds: of a core, for each worker of a whole training; ``None``: nobody knows.
    """

    name: str
    words: tuple[str, ...]
    what: str
    lower: bool = False
    own: Own = ()
    known: Known | None = None
    worker_seconds: float | None = None

    @property
    def title(self) -> str:
        """Over tables and figures: what was trained, and what it stands for in the paper, if that is something else."""
        return self.what if self.what.startswith(self.name) else f"{self.what}, for {self.name}"


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
        sparse: further words of all methods but dense training and one worker alone, which have no such settings.
    """

    cases: tuple[Case, ...]
    words: tuple[str, ...]
    seeds: tuple[int, ...]
    cost: str
    cluster: str = "simulated"
    only: tuple[str, ...] | None = None
    sparse: tuple[str, ...] = ()


@dataclass(frozen=True)
class MethodComparison(Planned):
    """Methods x cases x seeds, all trained; one table and one panel for each case.

    Attributes:
        methods: name to words of train.py; times are compared with those of the first one.
        plans: by scale.
        proposed: methods that the paper proposes; without any, methods are variants that no summary needs.
    """

    name: str
    title: str
    source: str
    shows: str
    basis: Basis
    methods: Mapping[str, tuple[str, ...]]
    plans: Mapping[str, Plan]
    note: str = field(default="", kw_only=True)
    proposed: tuple[str, ...] = field(default=(), kw_only=True)
    leads: bool = field(default=False, kw_only=True)

    def compared(self, plan: Plan) -> Sequence[str]:
        """The methods that are trained."""
        return tuple(self.methods) if plan.only is None else plan.only

    def job(self, plan: Plan, case: Case, method: str, seed: int) -> Training:
        """One training."""
        row = self.methods[method]
        further = () if row in (DENSE, ALONE) else plan.sparse
        own = dict(case.own).get(method, ())
        words = ("recipe=published", *plan.words, *case.words, *row, *further, *own, f"seed={seed}")
        expected = case.worker_seconds and case.worker_seconds * _workers(words)
        return Training(words, Labels(self.name, method, (case.name,)), plan.cluster, expected)

    @property
    def twins(self) -> Sequence[str]:
        """The names of methods that send all; of several, settings of one, the best is what accuracies stand beside.

        Raises:
            KeyError: if there is none: what is to be judged by accuracy needs one.
        """
        found = [name for name, words in self.methods.items() if words == DENSE]
        if not found:
            raise KeyError(f"{self.name} has no dense training to judge accuracies by")
        return found

    @property
    def floors(self) -> Sequence[str]:
        """The names of what one worker does alone; empty if nothing is compared with that."""
        return [name for name, words in self.methods.items() if words == ALONE]

    def jobs(self, scale: str) -> Sequence[Training]:
        """See :meth:`Exhibit.jobs`."""
        plan = at(scale, self.plans)
        return [self.job(plan, *choice) for choice in product(plan.cases, self.compared(plan), plan.seeds)]

    def with_seeds(self, count: int) -> MethodComparison:
        """See :meth:`Exhibit.with_seeds`."""
        seeds = tuple(range(1, count + 1))
        return replace(self, plans={scale: replace(plan, seeds=seeds) for scale, plan in self.plans.items()})

    def caption(self, scale: str) -> str:
        """See :meth:`Exhibit.caption`."""
        plan = at(scale, self.plans)
        cases = "; ".join(case.title for case in plan.cases)
        own = "".join(f". {case.name}, {name}: {' '.join(words)}" for case in plan.cases for name, words in case.own)
        seeds = f"Seeds {', '.join(map(str, plan.seeds))}; mean ± half of {INTERVAL}"
        return f"{cases}{own}. {seeds}. {' '.join((*plan.words, *plan.sparse))}"

    def tables(self, scale: str, results: Results) -> Sequence[Table]:
        """See :meth:`Exhibit.tables`."""
        return [self.table(at(scale, self.plans), case, results) for case in at(scale, self.plans).cases]

    def table(self, plan: Plan, case: Case, results: Results) -> Table:
        """One row for each method."""
        rows: list[Row] = []
        first: float | None = None
        for method in self.compared(plan):
            jobs = [self.job(plan, case, method, seed) for seed in plan.seeds]
            outcomes = self.outcomes(plan, case, method, results)
            good = succeeded(outcomes)
            seconds = mean(outcome.data["cluster_seconds"] for outcome in good) if good else None
            first = first if rows else seconds
            rows.append(Row(method, _cells(outcomes, good, first), jobs))
        return Table(f"{self.title}: {case.title}", COLUMNS, rows)

    def outcomes(self, plan: Plan, case: Case, method: str, results: Results) -> list[Outcome]:
        """What became of a method's trainings, by seed."""
        return [results.of(self.job(plan, case, method, seed)) for seed in plan.seeds]

    def target(self, plan: Plan, case: Case, results: Results) -> Target | None:
        """What dense training reaches, if it is among the methods."""
        dense = [method for method in self.compared(plan) if self.methods[method] == DENSE]
        return Target.of_dense(
            [each for method in dense for each in self.outcomes(plan, case, method, results)], case.lower
        )

    def tried(self, scale: str, results: Results) -> Sequence[Tried]:
        """See :meth:`Exhibit.tried`."""
        plan = at(scale, self.plans)
        choices = product(plan.cases, self.compared(plan)) if self.proposed else ()
        return [self._tried(plan, case, method, results) for case, method in choices]

    def _tried(self, plan: Plan, case: Case, method: str, results: Results) -> Tried:
        jobs = [self.job(plan, case, method, seed) for seed in plan.seeds]
        outcomes, target = self.outcomes(plan, case, method, results), self.target(plan, case, results)
        return tried(case.title, target, method, self.role(method), jobs, outcomes)

    def role(self, method: str) -> Role:
        """What a method is in the paper."""
        return Role.PROPOSED if method in self.proposed else Role.OTHER

    def pictures(self, scale: str, results: Results) -> Sequence[Picture]:
        """See :meth:`Exhibit.pictures`."""
        plan = at(scale, self.plans)
        caption = f"{METRIC}; mean of seeds {', '.join(map(str, plan.seeds))}, bands from the least to the most"
        key = key_of(self.compared(plan))
        return [
            Picture(case.name, caption, partial(self._draw, plan, case, results), case.title, key)
            for case in plan.cases
            if any(self._good(plan, case, results).values())
        ]

    def _good(self, plan: Plan, case: Case, results: Results) -> dict[str, list[Outcome]]:
        """What has a result, by method."""
        return {method: succeeded(self.outcomes(plan, case, method, results)) for method in self.compared(plan)}

    def _draw(self, plan: Plan, case: Case, results: Results, figure: Any) -> None:
        good = self._good(plan, case, results)
        curves = {
            method: [metric_curve(each.data, each.events("eval")) for each in outcomes]
            for method, outcomes in good.items()
        }
        metrics = {each.data["metric"] for outcomes in good.values() for each in outcomes}
        draw_means(figure.subplots(), curves, "seconds", "virtual seconds", ", ".join(sorted(metrics)))


def _cells(outcomes: Sequence[Outcome], good: Sequence[Outcome], first: float | None) -> list[Cell]:
    if not good:
        return failed(outcomes, len(COLUMNS) - 1)
    lost = any_failed(outcomes)
    values = [final_metric(outcome.data) for outcome in good]
    seconds = mean(outcome.data["cluster_seconds"] for outcome in good)
    share = share_of_bytes(outcome.data for outcome in good)
    seeds = ", ".join(o.fault if o.reason else f"{final_metric(o.data):.4g}" for o in outcomes)
    return [
        Cell(f"{good[0].data['metric']} {spread(values)}", mean(values), bad=lost),
        Cell(shown_interval(values, good[0].data["metric"])),
        Cell(seeds, bad=lost),
        Cell(f"{share:.2%}", share),
        Cell(f"{seconds:.4g}", seconds),
        Cell(f"{seconds / first:.3g}" if first else "unknown", seconds / first if first else None),
    ]


def _workers(words: Sequence[str]) -> int:
    """How many there are by these words: the last one counts."""
    named = [word.partition("=")[2] for word in words if word.startswith("cluster.workers=")]
    return int(named[-1])
