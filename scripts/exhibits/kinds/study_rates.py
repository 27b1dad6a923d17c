"""Longer repetition of the study, with a separate learning-rate sweep for each choice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import mean
from typing import TypeAlias

from scripts.exhibits.base import Picture, Results, at
from scripts.exhibits.kinds.study_points import PRESET, Point, best_of, draw_axes, held_out, points
from scripts.exhibits.kinds.trainings import DENSE as DENSE_WORDS
from scripts.exhibits.kinds.trainings import Case, MethodComparison, Plan
from scripts.exhibits.measures import INTERVAL, final_metric, share_of_bytes, shown_interval, spread
from scripts.exhibits.outcomes import any_failed, failed
from scripts.exhibits.tables import Cell, Row, Table

__all__ = ["DENSE", "StudyRates", "plain"]

DENSE = "dense"
LEARNING_RATES = (0.01, 0.04, 0.16)
# Row and one of its learning rates.
Setting: TypeAlias = tuple[str, float]


def plain(grid: Sequence[Point]) -> list[Point]:
    """First point of each compressor and residual rule with scope layer and momentum after the average."""
    chosen = (point for point in grid if point.momentum == "after" and point.scope in ("", "layer"))
    return list({(point.sent, point.residual): point for point in reversed(list(chosen))}.values())[::-1]


def _settings() -> Mapping[str, Setting]:
    rows = (DENSE, *(point.name for point in plain(points())))
    return {f"{row}, lr {rate:g}": (row, rate) for row in rows for rate in LEARNING_RATES}


def _methods() -> Mapping[str, tuple[str, ...]]:
    """Command words of each row with one of its learning rates."""
    return {
        name: (*(DENSE_WORDS if row == DENSE else (f"+point=[{row}]",)), f"optimizer.lr={rate:g}")
        for name, (row, rate) in _settings().items()
    }


@dataclass(frozen=True)
class StudyRates(MethodComparison):
    """Dense training and points, each trained with several learning rates.

    Attributes:
        settings: Row and learning rate of each method name.
    """

    methods: Mapping[str, tuple[str, ...]] = field(default_factory=_methods, kw_only=True)
    settings: Mapping[str, Setting] = field(default_factory=_settings, kw_only=True)

    def caption(self, scale: str) -> str:
        return (
            f"{super().caption(scale)}. For each seed, the learning rate (and in the second table the setting) is the "
            "one that is best for the other seeds; what fails with a seed is no choice. Points: some of "
            f"experiment={PRESET}"
        )

    def tables(self, scale: str, results: Results) -> Sequence[Table]:
        plan = at(scale, self.plans)
        kinds = (("each at its best rate", self._rows), ("each compressor at its best", self._compressors))
        found = [(case, self._groups(plan)) for case in plan.cases]
        return [
            self._table(plan, case, title, group(names), results) for case, names in found for title, group in kinds
        ]

    def pictures(self, scale: str, results: Results) -> Sequence[Picture]:
        plan = at(scale, self.plans)
        return [picture for case in plan.cases for picture in self._pictures(plan, case, results)]

    def _pictures(self, plan: Plan, case: Case, results: Results) -> list[Picture]:
        chosen = {row: self._chosen(plan, case, names, results) for row, names in self._groups(plan).items()}
        found = [(row, seeds) for row, seeds in chosen.items() if seeds and row != DENSE]
        caption = (
            f"{case.title}: the metric at the learning rate that is best for the other seeds, one dot a seed; dotted: "
            "dense, in the same way. Settings that are not trained yet are left out"
        )
        drawn = partial(draw_axes, found, chosen[DENSE])
        return [Picture(f"{case.name} rates", caption, drawn, case.title, wide=True)] if found else []

    @property
    def dense_names(self) -> Sequence[str]:
        return [name for name, (row, _) in self.settings.items() if row == DENSE]

    def choices_of(self, sent: str, scale: str, results: Results) -> list[str]:
        """Methods by compressor, dense training included, without failed ones."""
        plan = at(scale, self.plans)
        return [
            name
            for name in self._compressors(self._groups(plan)).get(sent, ())
            if not any(any_failed(self.outcomes(plan, case, name, results)) for case in plan.cases)
        ]

    def _groups(self, plan: Plan) -> dict[str, list[str]]:
        """Methods of each row, one per learning rate."""
        groups: dict[str, list[str]] = {}
        for name in self.compared(plan):
            groups.setdefault(self.settings[name][0], []).append(name)
        return groups

    def _rows(self, groups: Mapping[str, list[str]]) -> Mapping[str, list[str]]:
        return groups

    def _compressors(self, groups: Mapping[str, list[str]]) -> Mapping[str, list[str]]:
        """Merges the rows of each compressor, whose name is the first word of the row names."""
        merged: dict[str, list[str]] = {}
        for row, names in groups.items():
            merged.setdefault(row.partition(",")[0], []).extend(names)
        return merged

    def _table(
        self, plan: Plan, case: Case, title: str, groups: Mapping[str, Sequence[str]], results: Results
    ) -> Table:
        columns = ("sent", "best setting", "metric, chosen on other seeds", INTERVAL, "of each setting")
        dense = self._chosen(plan, case, groups[DENSE], results)
        rows = [self._row(plan, case, row, names, dense, results) for row, names in groups.items()]
        last = ("less dense", f"its {INTERVAL}", "sent / dense")
        return Table(f"{self.title}, {title}: {case.title}", (*columns, *last), rows)

    def _values(self, plan: Plan, case: Case, names: Sequence[str], results: Results) -> dict[str, list[float]]:
        """Metric by seed of the methods whose trainings all finished."""
        found = {name: [results.of(self.job(plan, case, name, seed)) for seed in plan.seeds] for name in names}
        return {
            name: [final_metric(each.data) for each in outcomes]
            for name, outcomes in found.items()
            if not any(each.reason for each in outcomes)
        }

    def _chosen(self, plan: Plan, case: Case, names: Sequence[str], results: Results) -> list[float] | None:
        """Metric of each seed at the setting that is best for the others; ``None`` if runs are missing or all failed.

        Settings that diverge with any seed are excluded.
        """
        values = self._values(plan, case, names, results)
        run = all(results.of(self.job(plan, case, name, seed)).started for name in names for seed in plan.seeds)
        return held_out(values, case.lower) if run and values else None

    def _row(
        self,
        plan: Plan,
        case: Case,
        row: str,
        names: Sequence[str],
        dense: Sequence[float] | None,
        results: Results,
    ) -> Row:
        jobs = [self.job(plan, case, name, seed) for name in names for seed in plan.seeds]
        chosen = self._chosen(plan, case, names, results)
        if chosen is None:
            return Row(row, failed([results.of(job) for job in jobs], 7), jobs)
        means = {name: mean(values) for name, values in self._values(plan, case, names, results).items()}
        best = best_of(means, case.lower)
        own = [results.of(self.job(plan, case, best, seed)).data for seed in plan.seeds]
        cells = [
            Cell(self._setting(row, best)),
            Cell(spread(chosen), mean(chosen)),
            Cell(shown_interval(chosen)),
            Cell(", ".join(f"{self._setting(row, name)}: {_shown(means.get(name))}" for name in names)),
            *_less(chosen, dense if row != DENSE else None),
            Cell(f"{share_of_bytes(own):.2%}", share_of_bytes(own)),
        ]
        return Row(row, cells, jobs)

    def _setting(self, row: str, name: str) -> str:
        """Part of the method's name that is not in the row's name."""
        return name.removeprefix(row).lstrip(", ")


def _shown(value: float | None) -> str:
    return "failed" if value is None else f"{value:.4g}"


def _less(chosen: Sequence[float], dense: Sequence[float] | None) -> list[Cell]:
    """Difference from dense training by seed."""
    if dense is None:
        return [Cell("-"), Cell("-")]
    gaps = [one - other for one, other in zip(chosen, dense, strict=True)]
    return [Cell(spread(gaps), mean(gaps)), Cell(shown_interval(gaps))]
