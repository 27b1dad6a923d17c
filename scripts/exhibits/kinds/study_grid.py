"""The grid of the sparse communication study: every point trained, by axis, by point and by compressor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import mean

from scripts.exhibits.base import Picture, Results, at
from scripts.exhibits.kinds.study_points import (
    AXES,
    PRESET,
    RANDOM_BLOCK,
    Marginal,
    Point,
    best_of,
    draw_axes,
    draw_grid,
    held_out,
    marginals,
    points,
)
from scripts.exhibits.kinds.study_rates import DENSE
from scripts.exhibits.kinds.trainings import DENSE as DENSE_WORDS
from scripts.exhibits.kinds.trainings import Case, MethodComparison, Plan, seconds_cell
from scripts.exhibits.measures import INTERVAL, final_metric, share_of_bytes, shown_interval, spread
from scripts.exhibits.outcomes import failed, machines
from scripts.exhibits.tables import Cell, Row, Table
from scripts.exhibits.tried import Tried, tried

__all__ = ["StudyGrid"]

ITS = f"its {INTERVAL}"


def _interval(values: Sequence[float]) -> Cell:
    return Cell(shown_interval(values))


def _list(values: Iterable[float]) -> str:
    return ", ".join(f"{value:.4g}" for value in values)


def _grid() -> Mapping[str, Point]:
    return {point.name: point for point in points()}


def _methods() -> Mapping[str, tuple[str, ...]]:
    return {DENSE: DENSE_WORDS, **{name: (f"+point=[{name}]",) for name in _grid()}}


@dataclass(frozen=True)
class StudyGrid(MethodComparison):
    """Dense training and points of the grid, by axis, by point, and at the best setting of each compressor.

    Attributes:
        grid: All points by name.
    """

    methods: Mapping[str, tuple[str, ...]] = field(default_factory=_methods, kw_only=True)
    grid: Mapping[str, Point] = field(default_factory=_grid, kw_only=True)

    def tables(self, scale: str, results: Results) -> Sequence[Table]:
        plan = at(scale, self.plans)
        kinds = (self.by_axis, self.table, self.by_compressor)
        return [table(plan, case, results) for case in plan.cases for table in kinds]

    def caption(self, scale: str) -> str:
        return (
            f"{super().caption(scale)}. All points have one learning rate; not all combinations are possible, so the "
            "choices of an axis differ in their other choices as well: the last columns compare pairs that are equal "
            f"otherwise (but for the sum). Points: those of experiment={PRESET}"
        )

    def _chosen(self, plan: Plan) -> list[Point]:
        return [self.grid[name] for name in self.compared(plan) if name in self.grid]

    def _values(self, plan: Plan, case: Case, results: Results) -> dict[Point, list[float]]:
        """Metric by seed of the points whose trainings all finished."""
        outcomes = {point: self.outcomes(plan, case, point.name, results) for point in self._chosen(plan)}
        return {
            point: [final_metric(each.data) for each in found]
            for point, found in outcomes.items()
            if not any(each.reason for each in found)
        }

    def _dense(self, plan: Plan, case: Case, results: Results) -> list[float] | None:
        """Metric of dense training by seed, if all its runs finished."""
        found = self.outcomes(plan, case, DENSE, results)
        return None if any(each.reason for each in found) else [final_metric(each.data) for each in found]

    def by_axis(self, plan: Plan, case: Case, results: Results) -> Table:
        """One row per choice: means over all points with this choice."""
        dense, values = self._dense(plan, case, results), self._values(plan, case, results)
        columns = ("axis: choice", "points", "mean metric", INTERVAL, "every seed", "less dense", "compared with")
        rows = []
        for found in marginals(self._chosen(plan), values):
            having = [point for point in self._chosen(plan) if getattr(point, found.axis) == found.choice]
            jobs = [self.job(plan, case, point.name, seed) for point in having for seed in plan.seeds]
            name = f"{AXES[found.axis][0]}: {found.choice}"
            rows.append(Row(name, [*_axis_cells(found, dense), *_gain_cells(found)], jobs))
        title = f"{self.title}, by axis: {case.name}"
        return Table(title, (*columns, "difference, all else equal", ITS), rows)

    def by_compressor(self, plan: Plan, case: Case, results: Results) -> Table:
        """One row per compressor at its best setting."""
        values, grid = self._values(plan, case, results), self._chosen(plan)
        chosen = {sent: {p: seeds for p, seeds in values.items() if p.sent == sent} for sent in _sent(grid)}
        found = {sent: held_out(candidates, case.lower) for sent, candidates in chosen.items() if candidates}
        dense = self._dense(plan, case, results)
        first = dense and self._best_row(plan, case, DENSE, DENSE, dense, found.get(RANDOM_BLOCK), results)
        rows = [first or self._failed_row(plan, case, DENSE, [DENSE], results)]
        for sent, candidates in chosen.items():
            if sent not in found:
                names = [point.name for point in grid if point.sent == sent]
                rows.append(self._failed_row(plan, case, sent, names, results))
                continue
            best = best_of({point: mean(seeds) for point, seeds in candidates.items()}, case.lower).name
            rows.append(self._best_row(plan, case, sent, best, found[sent], found.get(RANDOM_BLOCK), results))
        how = "chosen on other seeds" if len(plan.seeds) > 1 else "chosen on the same seed"
        columns = ("sent", "best setting", f"metric, {how}", INTERVAL, "every seed")
        last = (f"{RANDOM_BLOCK} less it", ITS, "sent / dense", "virtual seconds", "machine")
        return Table(f"{self.title}, each at its best: {case.name}", (*columns, *last), rows)

    def tried(self, scale: str, results: Results) -> Sequence[Tried]:
        plan = at(scale, self.plans)
        return [line for case in plan.cases for line in self._lines(plan, case, results)]

    def _lines(self, plan: Plan, case: Case, results: Results) -> list[Tried]:
        target, grid, values = self.target(plan, case, results), self._chosen(plan), self._values(plan, case, results)
        lines = []
        for row in self.by_compressor(plan, case, results).rows:
            outcomes = [results.of(job) for job in row.jobs]
            own = {point: values[point] for point in grid if point.sent == row.name and point in values}
            figures = held_out(own, case.lower) if own else None
            lines.append(tried(case.title, target, row.name, self.role(row.name), row.jobs, outcomes, figures))
        return lines

    def _best_row(
        self,
        plan: Plan,
        case: Case,
        name: str,
        best: str,
        values: Sequence[float],
        block: Sequence[float] | None,
        results: Results,
    ) -> Row:
        outcomes = self.outcomes(plan, case, best, results)
        less = [ours - theirs for ours, theirs in zip(block, values, strict=True)] if block else []
        share = share_of_bytes(each.data for each in outcomes)
        cells = [
            Cell(best.removeprefix(f"{name},") if best != name else "-"),
            Cell(spread(values), mean(values)),
            _interval(values),
            Cell(_list(values)),
            Cell(spread(less), mean(less)) if less and name != RANDOM_BLOCK else Cell("-"),
            _interval(less) if less and name != RANDOM_BLOCK else Cell("-"),
            Cell(f"{share:.2%}", share),
            seconds_cell(outcomes),
            Cell("; ".join(machines(outcomes))),
        ]
        return Row(name, cells, [self.job(plan, case, best, seed) for seed in plan.seeds])

    def _failed_row(self, plan: Plan, case: Case, name: str, methods: Sequence[str], results: Results) -> Row:
        outcomes = [each for method in methods for each in self.outcomes(plan, case, method, results)]
        cells = failed(outcomes, 9)
        return Row(name, cells, [self.job(plan, case, method, seed) for method in methods for seed in plan.seeds])

    def pictures(self, scale: str, results: Results) -> Sequence[Picture]:
        plan = at(scale, self.plans)
        return [picture for case in plan.cases for picture in self._pictures(plan, case, results)]

    def _pictures(self, plan: Plan, case: Case, results: Results) -> list[Picture]:
        grid, values = self._chosen(plan), self._values(plan, case, results)
        dense = self._dense(plan, case, results)
        means = {point: mean(values[point]) if point in values else None for point in grid}
        found = [(f"{AXES[each.axis][0]}: {each.choice}", each.seeds) for each in marginals(grid, values) if each.seeds]
        name = case.name
        every = f"{case.title}: mean metric of every point; empty: not possible, or not trained"
        by_axis = f"{case.title}: means over all points with a choice, one dot a seed; dotted: dense"
        return [
            Picture(f"{name}-axes", by_axis, partial(draw_axes, found, dense), wide=True),
            Picture(f"{name}-grid", every, partial(draw_grid, case, means, dense), wide=True),
        ]


def _sent(grid: Iterable[Point]) -> list[str]:
    return list(dict.fromkeys(point.sent for point in grid))


def _axis_cells(found: Marginal, dense: Sequence[float] | None) -> list[Cell]:
    lost = found.used < found.whole
    count = Cell(f"{found.used} of {found.whole}, others failed" if lost else str(found.whole), found.used, bad=lost)
    if not found.seeds:
        return [count, *[Cell("failed", bad=True)] * 4]
    less = Cell("failed", bad=True) if dense is None else _difference(mean(found.seeds) - mean(dense))
    seeds = found.seeds
    return [count, Cell(spread(seeds), mean(seeds)), _interval(seeds), Cell(_list(seeds)), less]


def _difference(value: float) -> Cell:
    return Cell(f"{value:+.4f}", value)


def _gain_cells(found: Marginal) -> list[Cell]:
    reference = AXES[found.axis][1]
    if found.choice == reference:
        return [Cell("-")] * 3
    if not found.gains:
        return [Cell(reference), Cell("no equal pair"), Cell("-")]
    pairs = f"{reference}, {found.pairs} pair{'s' if found.pairs > 1 else ''}"
    return [Cell(pairs), Cell(spread(found.gains), mean(found.gains)), _interval(found.gains)]
