"""Exhibits that compare methods by trainings with several seeds, also in pairs that differ in one setting."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from statistics import mean
from typing import Any, NamedTuple, TypeAlias

from scripts.exhibits.base import Basis, ByScale, Picture, Planned, Results, at
from scripts.exhibits.charts.curves import draw_means, panel_pictures
from scripts.exhibits.charts.style import looks
from scripts.exhibits.jobs import Labels, Outcome, Training, any_failed, by_machine, common, machines, succeeded
from scripts.exhibits.kinds import number
from scripts.exhibits.measures import (
    INTERVAL,
    LEAST,
    Range,
    difference,
    final_metric,
    metric_curve,
    range_of_mean,
    seeds,
    share_of_bytes,
    shown_interval,
    spread,
)
from scripts.exhibits.tables import NOT_RUN_YET, Cell, Row, Table, failed
from scripts.pages.methods import documented

METRIC = "The metric while the methods train, against virtual seconds"
COLUMNS = (
    "method",
    "metric",
    INTERVAL,
    "every seed",
    "sent / dense",
    "virtual seconds",
    "seconds / first row's",
    "machine",
)
# Replaces a ratio of seconds, because local work is measured and depends on the processor and the torch version.
OTHER_MACHINE = "other machine"


# Words of dense training, the baseline of all accuracies, and of a single worker without communication.
DENSE = ("compressor=none",)
ALONE = (*DENSE, "cluster.workers=1")
# Parts of other methods, and methods with a dense warm-up longer than the trainings of all methods.
LEFT_OUT = frozenset({"none", "topk", "cast", "quantized", "oktopk_vgg", "oktopk_lstm", "oktopk_bert"})
PACED_WORKERS = 14
VIRTUAL = Basis(
    simulated="seconds: measured local work, plus counted rounds and bytes on a modelled network",
    measured="training: gradients, selections, messages and updates of every worker are real",
    assumed="latency and bandwidth of the network; that workers do not slow each other down",
)


class Known(NamedTuple):
    """Reference value of dense training, and its source.

    Attributes:
        tolerance: Half a unit of the last digit that the source states.
    """

    value: float
    source: str
    tolerance: float = 0.0

    def reached(self, values: Sequence[float], higher: bool) -> bool:
        """Whether the mean of metrics by seed is as good, or its confidence interval contains the reference."""
        sign = 1 if higher else -1
        found = range_of_mean([sign * value for value in values])
        end = found.high if len(values) >= LEAST else found.mean
        return sign * self.value <= max(end, found.mean + self.tolerance)

    def __str__(self) -> str:
        return f"{self.value:g} ({self.source})"


# Further words of train.py by name of the method.
Own: TypeAlias = tuple[tuple[str, tuple[str, ...]], ...]


class Pace(NamedTuple):
    """Length and duration of a training.

    Attributes:
        steps: Number of training steps.
        seconds: Core seconds per step of 14 workers with SparDL, measured (Intel Xeon; CIFAR-10: AMD EPYC under other
            load) and rounded up.
    """

    steps: int
    seconds: float

    @property
    def worker_seconds(self) -> float:
        """Core seconds per worker of a whole training."""
        return self.steps * self.seconds / PACED_WORKERS


@dataclass(frozen=True)
class Case:
    """One task that all methods are trained on.

    Attributes:
        name: Name of the task in the paper, or the beginning of ``what`` if the paper has no such task.
        words: Words of train.py: model, data and length.
        what: Task that is trained instead, for captions and titles; by default that of the paper.
        lower: Whether a lower metric is better.
        own: Further words of single methods, such as a learning rate that suits them.
        known: Reference value of dense training; without one no accuracy is judged.
        pace: Length and duration of a training, if known.
    """

    name: str
    words: tuple[str, ...]
    what: str = ""
    lower: bool = False
    own: Own = ()
    known: Known | None = None
    pace: Pace | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "what", self.what or self.name)

    @property
    def title(self) -> str:
        """Title of tables and figures: the trained task, and the task of the paper if it differs."""
        return self.what if self.what.startswith(self.name) else f"{self.what}, for {self.name}"


@dataclass(frozen=True)
class Plan:
    """Trainings of one size preset.

    Attributes:
        cases: Tasks.
        words: Words that all trainings share.
        seeds: Seeds, with one training each.
        cost: Approximate duration of all trainings; empty if every case has a pace.
        cluster: Choice of ``cluster=``.
        only: Names of the methods to train; ``None`` stands for all.
        sparse: Further words of all methods except dense training and a single worker, which lack these settings.
    """

    cases: tuple[Case, ...]
    words: tuple[str, ...]
    seeds: tuple[int, ...] = (1, 2, 3)
    cost: str = ""
    cluster: str = "simulated"
    only: tuple[str, ...] | None = None
    sparse: tuple[str, ...] = ()


@dataclass(frozen=True)
class MethodComparison(Planned):
    """Methods x cases x seeds, all trained, with one table and one panel per case.

    Attributes:
        methods: Words of train.py by name; times are compared with those of the first method.
        plans: Plan by size preset.
    """

    methods: Mapping[str, tuple[str, ...]]
    plans: ByScale[Plan]
    basis: Basis = field(default=VIRTUAL, kw_only=True)

    def compared(self, plan: Plan) -> Sequence[str]:
        """Names of the methods that are trained."""
        return tuple(self.methods) if plan.only is None else plan.only

    def job(self, plan: Plan, case: Case, method: str, seed: int) -> Training:
        """Job of one training."""
        row = self.methods[method]
        further = () if row in (DENSE, ALONE) else plan.sparse
        own = dict(case.own).get(method, ())
        words = ("recipe=published", *plan.words, *case.words, *row, *further, *own, f"seed={seed}")
        expected = case.pace and case.pace.worker_seconds * _workers(words)
        return Training(words, Labels(self.name, method, (case.name,)), plan.cluster, expected)

    def trainings(self, plan: Plan, case: Case, method: str) -> list[Training]:
        """Jobs of a method's trainings, by seed."""
        return [self.job(plan, case, method, seed) for seed in plan.seeds]

    @property
    def dense_names(self) -> Sequence[str]:
        """Names of dense training; of several settings, the best one is the baseline. Raises KeyError without one."""
        found = [name for name, words in self.methods.items() if words == DENSE]
        if not found:
            raise KeyError(f"{self.name} has no dense training, which accuracies are compared with; add one")
        return found

    @property
    def floors(self) -> Sequence[str]:
        """Names of the single worker without communication, if it is trained."""
        return [name for name, words in self.methods.items() if words == ALONE]

    def jobs(self, scale: str) -> Sequence[Training]:
        plan = at(scale, self.plans)
        return [self.job(plan, *choice) for choice in product(plan.cases, self.compared(plan), plan.seeds)]

    def cost(self, scale: str) -> str:
        if at(scale, self.plans).cost:
            return super().cost(scale)
        work = self.jobs(scale)
        hours = sum(job.expected or 0.0 for job in work) / 3600
        return f"{len(work)} trainings, about {hours:.1f} hours of a core"

    def with_seeds(self, count: int) -> MethodComparison:
        seeds = tuple(range(1, count + 1))
        return replace(self, plans={scale: replace(plan, seeds=seeds) for scale, plan in self.plans.items()})

    def caption(self, scale: str) -> str:
        plan = at(scale, self.plans)
        cases = "; ".join(case.title for case in plan.cases)
        own = "".join(f". {case.name}, {name}: {' '.join(words)}" for case in plan.cases for name, words in case.own)
        seeds = f"Seeds {', '.join(map(str, plan.seeds))}; mean ± half of {INTERVAL}"
        return f"{cases}{own}. {seeds}. {' '.join((*plan.words, *plan.sparse))}"

    def tables(self, scale: str, results: Results) -> Sequence[Table]:
        return [self.table(at(scale, self.plans), case, results) for case in at(scale, self.plans).cases]

    def table(self, plan: Plan, case: Case, results: Results) -> Table:
        """Table of a case, one row per method."""
        rows: list[Row] = []
        first: list[Outcome] = []
        for method in self.compared(plan):
            outcomes = self.outcomes(plan, case, method, results)
            good = succeeded(outcomes)
            first = first if rows else good
            rows.append(Row(method, _cells(outcomes, good, first), self.trainings(plan, case, method)))
        return Table(f"{self.title}: {case.title}", COLUMNS, rows)

    def outcomes(self, plan: Plan, case: Case, method: str, results: Results) -> list[Outcome]:
        """Outcomes of a method's trainings, by seed."""
        return [results.of(job) for job in self.trainings(plan, case, method)]

    def finished(self, plan: Plan, case: Case, methods: Iterable[str], results: Results) -> dict[str, list[float]]:
        """Metric by seed of the methods whose trainings all finished."""
        found = {method: self.outcomes(plan, case, method, results) for method in methods}
        return {
            method: [final_metric(each.data) for each in outcomes]
            for method, outcomes in found.items()
            if not any(each.reason for each in outcomes)
        }

    def pictures(self, scale: str, results: Results) -> Sequence[Picture]:
        plan = at(scale, self.plans)
        caption = f"{METRIC}; mean of seeds {', '.join(map(str, plan.seeds))}, bands from the least to the most"
        styles = looks(self.compared(plan))
        baseline = [name for name, words in self.methods.items() if words == DENSE][:1]
        pictures = []
        for case in plan.cases:
            good = {method: succeeded(self.outcomes(plan, case, method, results)) for method in self.compared(plan)}
            picture = Picture(case.name, caption, partial(_draw, good), case.title)
            pictures += panel_pictures([picture], [name for name in good if good[name]], styles, baseline)
        return pictures


def _draw(good: Mapping[str, Sequence[Outcome]], shown: Sequence[str], figure: Any) -> None:
    """Draws the curves of some methods from the finished trainings of all."""
    curves = {name: [metric_curve(each.data, each.events("eval")) for each in found] for name, found in good.items()}
    metrics = {each.data["metric"] for found in good.values() for each in found}
    draw_means(figure.subplots(), curves, "seconds", "virtual seconds", ", ".join(sorted(metrics)), shown=shown)


def _every_method() -> Mapping[str, tuple[str, ...]]:
    rows = {each: (f"compressor={each}",) for each in sorted(documented()) if each not in LEFT_OUT}
    return {"none": DENSE, "alone": ALONE, **rows}


@dataclass(frozen=True)
class EveryMethod(MethodComparison):
    """Dense training, a single worker, and every documented method as published."""

    methods: Mapping[str, tuple[str, ...]] = field(default_factory=_every_method, kw_only=True)


def _cells(outcomes: Sequence[Outcome], good: Sequence[Outcome], first: Sequence[Outcome]) -> list[Cell]:
    if not good:
        return failed(outcomes, len(COLUMNS) - 1)
    lost = any_failed(outcomes)
    values = [final_metric(outcome.data) for outcome in good]
    share = share_of_bytes(outcome.data for outcome in good)
    every = ", ".join(o.fault if o.reason else f"{final_metric(o.data):.4g}" for o in outcomes)
    return [
        Cell(f"{good[0].data['metric']} {spread(values)}", mean(values), bad=lost),
        Cell(shown_interval(values, good[0].data["metric"])),
        Cell(every, bad=lost),
        number(share, ".2%"),
        seconds_cell(good),
        _ratio(good, first),
        Cell("; ".join(machines(good))),
    ]


def seconds_cell(outcomes: Sequence[Outcome]) -> Cell:
    """Mean virtual seconds; of several machines one mean each, in the order of their names."""
    found = {name: mean(_seconds(own)) for name, own in by_machine(outcomes).items()}
    if len(found) == 1:
        (seconds,) = found.values()
        return number(seconds, ".4g")
    return Cell("; ".join(f"{seconds:.4g}" for seconds in found.values()))


def _ratio(outcomes: Sequence[Outcome], first: Sequence[Outcome]) -> Cell:
    """Mean seconds over those of the first row, on one machine."""
    if not first:
        return Cell("unknown")
    pair = common(outcomes, first)
    if pair is None:
        return Cell(OTHER_MACHINE)
    ours, theirs = (mean(_seconds(own)) for own in pair)
    return number(ours / theirs)


def _seconds(outcomes: Sequence[Outcome]) -> list[float]:
    return [outcome.data["cluster_seconds"] for outcome in outcomes]


def _workers(words: Sequence[str]) -> int:
    """Number of workers in these words; the last one counts."""
    named = [word.partition("=")[2] for word in words if word.startswith("cluster.workers=")]
    return int(named[-1])


CONTRASTS = ("under these conditions", "difference", INTERVAL, "says")


class Pair(NamedTuple):
    """Two methods that differ in one setting; the metric of the other one is subtracted."""

    one: str
    other: str


@dataclass(frozen=True)
class Contrasts(MethodComparison):
    """Compares methods and tabulates their differences for equal seeds.

    Attributes:
        pairs: Pairs of methods by the conditions of the comparison.
        question: Title of the table of differences.
    """

    pairs: Mapping[str, Pair] = field(kw_only=True)
    question: str = field(kw_only=True)

    def tables(self, scale: str, results: Results) -> Sequence[Table]:
        plan = at(scale, self.plans)
        return [*super().tables(scale, results), *(self._differences(plan, case, results) for case in plan.cases)]

    def _differences(self, plan: Plan, case: Case, results: Results) -> Table:
        rows = [self._row(plan, case, *each, results) for each in self.pairs.items()]
        return Table(f"{self.question} {case.title}", CONTRASTS, rows)

    def _row(self, plan: Plan, case: Case, conditions: str, pair: Pair, results: Results) -> Row:
        jobs = [job for method in pair for job in self.trainings(plan, case, method)]
        one, other = (self.outcomes(plan, case, each, results) for each in pair)
        both = [(a, b) for a, b in zip(one, other, strict=True) if len(succeeded([a, b])) == len(pair)]
        if not both:
            return Row(conditions, [Cell(NOT_RUN_YET, bad=any_failed([*one, *other]))] * (len(CONTRASTS) - 1), jobs)
        found = difference(*zip(*((final_metric(a.data), final_metric(b.data)) for a, b in both), strict=True))
        return Row(conditions, _contrast_cells(found, len(both), pair, case.lower), jobs)


def _contrast_cells(found: Range, count: int, pair: Pair, lower: bool) -> list[Cell]:
    if count < LEAST:
        shown, says = f"none of {seeds(count)}", "too few seeds to say"
    else:
        shown, says = f"{found.low:+.4f} to {found.high:+.4f}", _says(found, pair, lower)
    return [Cell(f"{found.mean:+.4f}", found.mean), Cell(shown), Cell(says)]


def _says(found: Range, pair: Pair, lower: bool) -> str:
    if found.low <= 0 <= found.high:
        return "no difference beyond the seeds'"
    better = pair.one if (found.mean < 0) == lower else pair.other
    return f"{better} is better"
