"""Number of entries that thresholds select, relative to k, in every step of real trainings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import mean
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import Tensor

from scripts.exhibits.base import Basis, Picture, Results, at
from scripts.exhibits.charts import axes as axes_of
from scripts.exhibits.charts import palette
from scripts.exhibits.kinds.trainings import Case
from scripts.exhibits.kinds.watched import Trace, TracedExhibit, TracePlan, basis_of_trace, selection, train_watched
from scripts.exhibits.outcomes import row_of
from scripts.exhibits.tables import Cell, Row, Table
from spardl.method.method import Method, MethodState
from spardl.protocol.programs import Worker
from spardl.vector.sparse import SparseVector, Sum

__all__ = ["Thresholds", "count_selected", "deviations"]

BASIS = basis_of_trace("entries that every worker selects and sums that are kept, in every step of real trainings")
PUBLISHED = 0.11
# Counted selections, with their names in figures.
KINDS: Mapping[str, str] = MappingProxyType({"own": "own entries", "sums": "sums that are kept"})
COLUMNS = (
    "method, selection",
    "selected / wanted",
    "least",
    "most",
    "mean deviation",
    f"off by over {PUBLISHED:.0%}",
    "mean deviation, second half",
)


@dataclass
class _Counts(Trace):
    """Counts the entries that each worker selects, and the sums."""

    local: list[list[int]] = field(default_factory=list)
    sums: list[int] = field(default_factory=list)

    def start(self, method: Method, worker: Worker, state: MethodState) -> None:
        if len(self.local) == self.looked:
            self.local.append([])
        self.local[-1].append(selection(method, worker, state).numel())

    def look(self, vectors: Sequence[Tensor], average: Sum) -> None:
        self.sums.append(len(average) if isinstance(average, SparseVector) else average.numel())


def count_selected(words: Sequence[str], steps: int, every: int = 1) -> dict[str, Any]:
    """Trains, and counts selected entries.

    Args:
        words: Words of train.py.
        steps: Number of steps.
        every: Steps between two counts, from the first step on.

    Returns:
        ``k``, the wanted number of entries; by counted step ``local``, the entries that each worker selected, and
        ``sums``, the number of sums in the result.

    Raises:
        ConfigError: if the method does not send single entries.
    """
    counts = _Counts(every=every)
    train_watched(words, steps, counts)
    return {"k": counts.wanted, "local": counts.local, "sums": counts.sums}


class Spread(NamedTuple):
    """Ratios of counts to the wanted number.

    Attributes:
        mean: Mean ratio.
        least: Smallest ratio.
        most: Largest ratio.
        deviation: Mean distance of the ratios from 1.
        off: Share of ratios that differ from 1 by more than the published mean.
    """

    mean: float
    least: float
    most: float
    deviation: float
    off: float


def deviations(counts: Sequence[int], wanted: int) -> Spread:
    """Statistics of at least one count."""
    ratios = [count / wanted for count in counts]
    away = [abs(ratio - 1) for ratio in ratios]
    off = sum(distance > PUBLISHED for distance in away) / len(away)
    return Spread(mean(ratios), min(ratios), max(ratios), mean(away), off)


@dataclass(frozen=True)
class Thresholds(TracedExhibit):
    """Methods x cases, with one table and two panels per case.

    Attributes:
        methods: Words of train.py by name, and whether the result is limited to about k sums.
    """

    methods: Mapping[str, tuple[tuple[str, ...], bool]]
    basis: Basis = field(default=BASIS, kw_only=True)
    traced = "selected"
    trace = count_selected

    def variants(self, plan: TracePlan) -> Mapping[str, tuple[str, ...]]:
        return {name: words for name, (words, _) in self.methods.items()}

    def caption(self, scale: str) -> str:
        plan = at(scale, self.plans)
        return (
            f"{plan.titles}. {plan.length}, without the dense warm-up of the papers: residuals "
            "build up in the first steps, so the second half is given separately. Own: entries that workers select of "
            "their gradients, over all workers and steps; sums: entries kept of the total. "
            f"{' '.join(plan.words)}"
        )

    def tables(self, scale: str, results: Results) -> Sequence[Table]:
        plan = at(scale, self.plans)
        return [
            Table(
                f"{self.title}: {case.title}",
                COLUMNS,
                [row for method in self.methods for row in self._rows(plan, case, method, results)],
            )
            for case in plan.cases
        ]

    def _rows(self, plan: TracePlan, case: Case, method: str, results: Results) -> list[Row]:
        job = self.job(plan, case, method)
        return [
            row_of(f"{method}, {name}", job, results.of(job), len(COLUMNS) - 1, partial(_cells, name))
            for name in self._kinds(method)
        ]

    def _kinds(self, method: str) -> list[str]:
        return ["own", "sums"] if self.methods[method][1] else ["own"]

    def pictures(self, scale: str, results: Results) -> Sequence[Picture]:
        plan, looks = at(scale, self.plans), palette.looks(self.methods)
        caption = (
            "Selected / wanted by step; bands from the minimum to the maximum over the workers; grey: the published "
            f"deviation, within {PUBLISHED:.0%}"
        )
        return [
            Picture(
                f"{case.name} {kind}",
                caption,
                partial(self._draw, plan, case, kind, results),
                f"{case.title}: {words}",
                {name: look for name, look in looks.items() if kind in self._kinds(name)},
            )
            for case in plan.cases
            for kind, words in KINDS.items()
        ]

    def _draw(self, plan: TracePlan, case: Case, kind: str, results: Results, figure: Any) -> None:
        axes, looks = figure.subplots(), palette.looks(self.methods)
        axes_of.plain(axes, "step", "selected / wanted, logarithmic")
        seen = [1 - PUBLISHED, 1 + PUBLISHED]
        for method in self.methods:
            outcome = results.of(self.job(plan, case, method))
            if outcome.reason is None and kind in self._kinds(method):
                ratios = [[count / outcome.data["k"] for count in step] for step in _by_step(outcome.data, kind)]
                _draw_line(axes, range(0, plan.every * len(ratios), plan.every), ratios, looks[method])
                seen += [ratio for step in ratios for ratio in step]
        axes.axhspan(1 - PUBLISHED, 1 + PUBLISHED, color=palette.SOFT, alpha=0.15, linewidth=0)
        axes_of.logarithmic(axes.yaxis, seen)


def _by_step(data: Mapping[str, Any], name: str) -> list[list[int]]:
    """Counts of every step, one per worker or one of the sums."""
    kinds: Mapping[str, list[list[int]]] = {"own": data["local"], "sums": [[count] for count in data["sums"]]}
    return kinds[name]


def _cells(name: str, data: Mapping[str, Any]) -> list[Cell]:
    steps = _by_step(data, name)
    found, later = (
        deviations([count for step in part for count in step], data["k"]) for part in (steps, steps[len(steps) // 2 :])
    )
    shares = [Cell(f"{value:.3f}", value) for value in found[:3]]
    return [*shares, *(Cell(f"{value:.1%}", value) for value in (found.deviation, found.off, later.deviation))]


def _draw_line(axes: Any, steps: Sequence[int], ratios: Sequence[Sequence[float]], look: palette.Look) -> None:
    axes.plot(steps, [mean(step) for step in ratios], color=look.color, linestyle=look.dash, linewidth=1.3)
    least, most = [min(step) for step in ratios], [max(step) for step in ratios]
    axes.fill_between(steps, least, most, color=look.color, alpha=0.14, linewidth=0)
