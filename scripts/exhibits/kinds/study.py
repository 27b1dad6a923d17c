"""The sparse communication study: the grid by axis, point and compressor, and longer trainings at several rates."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from statistics import mean
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias, TypeVar

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from scripts.exhibits.base import Picture, Results, at
from scripts.exhibits.charts import style
from scripts.exhibits.charts.style import SMALL, plain, rows_from_the_top
from scripts.exhibits.jobs import any_failed, machines
from scripts.exhibits.kinds import number
from scripts.exhibits.kinds.trainings import DENSE as DENSE_WORDS
from scripts.exhibits.kinds.trainings import Case, MethodComparison, Plan, seconds_cell
from scripts.exhibits.measures import INTERVAL, share_of_bytes, shown_interval, spread
from scripts.exhibits.tables import Cell, Row, Table, failed
from trainer.build import CONFIGURATIONS

DENSE = "dense"
LEARNING_RATES = (0.01, 0.04, 0.16)
ITS = f"its {INTERVAL}"
PRESET, RANDOM_BLOCK = "sparse_communication_study", "random_block"


class Point(NamedTuple):
    """One choice per axis.

    Attributes:
        sent: Compressor.
        scope: Range in which entries are compared or drawn; empty for compressors without a scope.
        residual: Rule for the entries that are not sent.
        momentum: Place of the momentum.
        total: Communicator that computes the sum.
    """

    sent: str
    scope: str
    residual: str
    momentum: str
    total: str

    @property
    def name(self) -> str:
        """Formats the point for ``+point=[...]``."""
        return ",".join(filter(None, self))


# By field of Point: name of the axis in tables, and the reference choice.
AXES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "sent": ("sent", "topk"),
        "scope": ("compared or drawn in", "layer"),
        "residual": ("not sent", "local"),
        "momentum": ("momentum", "after"),
        "total": ("sum", "dense"),
    }
)


@cache
def points() -> tuple[Point, ...]:
    """Points of the preset in order."""
    config: Any = OmegaConf.load(CONFIGURATIONS / "experiment" / f"{PRESET}.yaml")
    ((key, text),) = config["hydra"]["sweeper"]["params"].items()
    override = OverridesParser.create().parse_override(f"{key}={text}")
    found = []
    for words in override.sweep_string_iterator():
        sent, *scope, residual, momentum, total = words.strip("[]").split(",")
        found.append(Point(sent, "".join(scope), residual, momentum, total))
    return tuple(found)


class Marginal(NamedTuple):
    """Results of one choice of an axis.

    Attributes:
        whole: Number of points with this choice.
        seeds: Mean metric by seed over the points whose trainings all finished; may be empty.
        gains: Mean difference from the reference by seed, over pairs of points that are otherwise equal.
        pairs: Number of such pairs.
        used: Number of points in ``seeds``.
    """

    axis: str
    choice: str
    whole: int
    seeds: Sequence[float]
    gains: Sequence[float]
    pairs: int
    used: int

    @property
    def name(self) -> str:
        """Name of the axis, and the choice."""
        return f"{AXES[self.axis][0]}: {self.choice}"


# The metric by seed.
Values: TypeAlias = Mapping[Point, Sequence[float]]


def marginals(grid: Sequence[Point], values: Values) -> list[Marginal]:
    """Results of every choice of every axis, from the metric by seed of the points whose trainings all finished."""
    return [
        _marginal(grid, values, axis, choice)
        for axis in AXES
        for choice in dict.fromkeys(getattr(point, axis) for point in grid)
        if choice
    ]


def _marginal(grid: Sequence[Point], values: Values, axis: str, choice: str) -> Marginal:
    having = [point for point in grid if getattr(point, axis) == choice]
    used = [values[point] for point in having if point in values]
    ours, theirs = (_but_for(axis, chosen, values) for chosen in (choice, AXES[axis][1]))
    pairs = [] if choice == AXES[axis][1] else [(ours[rest], theirs[rest]) for rest in ours if rest in theirs]
    gains = [[one - other for one, other in zip(*pair, strict=True)] for pair in pairs]
    return Marginal(axis, choice, len(having), _columns(used), _columns(gains), len(pairs), len(used))


def _but_for(axis: str, choice: str, values: Values) -> dict[Point, list[float]]:
    """Metric of the points with a choice by their other choices, averaged over different sums."""
    rest: dict[Point, list[Sequence[float]]] = {}
    for point, seeds in values.items():
        if getattr(point, axis) == choice:
            key = point._replace(**{axis: ""}) if axis == "total" else point._replace(**{axis: "", "total": ""})
            rest.setdefault(key, []).append(seeds)
    return {key: _columns(found) for key, found in rest.items()}


def _columns(rows: Sequence[Sequence[float]]) -> list[float]:
    """Mean of each column."""
    return [mean(column) for column in zip(*rows, strict=True)]


Setting = TypeVar("Setting")


def held_out(candidates: Mapping[Setting, Sequence[float]], lower: bool) -> list[float]:
    """Metric of each seed at the setting that is best for the other seeds.

    This avoids a selection bias in favour of compressors with more settings. A single seed selects its own setting.
    """
    (count,) = {len(seeds) for seeds in candidates.values()}
    found = []
    for left in range(count):
        others = {
            point: mean([value for seed, value in enumerate(seeds) if seed != left] or seeds)
            for point, seeds in candidates.items()
        }
        found.append(candidates[best_of(others, lower)][left])
    return found


def best_of(figures: Mapping[Setting, float], lower: bool) -> Setting:
    """Setting with the best figure, the first one of equals."""
    return (min if lower else max)(figures, key=lambda setting: figures[setting])


def draw_grid(case: Case, means: Mapping[Point, float | None], dense: Sequence[float] | None, figure: Any) -> None:
    """Heat map with one cell per point: compressor, scope and sum as rows, residual and momentum as columns.

    Means of the metric are ``None`` if a training failed.
    """
    rows = list(dict.fromkeys((point.sent, point.scope, point.total) for point in means))
    columns = list(dict.fromkeys(sorted((point.residual, point.momentum) for point in means)))
    places = {
        (rows.index((point.sent, point.scope, point.total)), columns.index((point.residual, point.momentum))): value
        for point, value in means.items()
    }
    known = {place: math.nan if value is None else value for place, value in places.items()}
    values = [[known.get((row, column), math.nan) for column in range(len(columns))] for row in range(len(rows))]
    figure.set_size_inches(7.0, 0.65 + 0.27 * (len(rows) + 1))
    axes = figure.subplots()
    plain(axes, "not sent, place of momentum", f"mean metric; dense {mean(dense):.3g}" if dense else "mean metric")
    axes.grid(visible=False)
    axes.tick_params(length=0)
    shown = axes.pcolormesh(values, cmap="viridis_r" if case.lower else "viridis", clip_on=False)
    for (row, column), value in sorted(known.items()):
        colour = style.INK if math.isnan(value) else style.readable(shown.cmap(shown.norm(value)))
        text = {"ha": "center", "va": "center", "fontsize": SMALL, "color": colour}
        axes.text(column + 0.5, row + 0.5, "failed" if places[row, column] is None else f"{value:.3g}", **text)
    axes.set_xticks([place + 0.5 for place in range(len(columns))], ["\n".join(each) for each in columns])
    axes.set_yticks([place + 0.5 for place in range(len(rows))], [", ".join(filter(None, row)) for row in rows])
    axes.invert_yaxis()


def draw_axes(found: Sequence[tuple[str, Sequence[float]]], dense: Sequence[float] | None, figure: Any) -> None:
    """Dot plot with one line per choice and one marker per seed; names with the same first words share a colour."""
    figure.set_size_inches(6, 0.9 + 0.22 * len(found))
    axes = figure.subplots()
    plain(axes, "metric", grid="x")
    kinds = [re.split("[:,]", name)[0] for name, _ in found]
    looks = style.looks(dict.fromkeys(kinds))
    for place, (_, seeds) in enumerate(found):
        colour = looks[kinds[place]].color
        axes.plot(seeds, [place] * len(seeds), "o", color=colour, alpha=0.6, markersize=4.5)
        axes.plot([mean(seeds)], [place], "|", color=colour, markersize=12, markeredgewidth=2)
    if dense:
        axes.axvline(mean(dense), linestyle=":", color=style.SOFT)
        axes.annotate("dense", (mean(dense), 1), (0, 2), ("data", "axes fraction"), "offset points", ha="center")
    rows_from_the_top(axes, [name for name, _ in found])


def _values_cells(values: Sequence[float]) -> list[Cell]:
    """Mean with half of the interval, and the interval."""
    return [Cell(spread(values), mean(values)), Cell(shown_interval(values))]


def _list(values: Iterable[float]) -> str:
    return ", ".join(f"{value:.4g}" for value in values)


def _grid() -> Mapping[str, Point]:
    return {point.name: point for point in points()}


def _grid_methods() -> Mapping[str, tuple[str, ...]]:
    return {DENSE: DENSE_WORDS, **{name: (f"+point=[{name}]",) for name in _grid()}}


@dataclass(frozen=True)
class StudyGrid(MethodComparison):
    """Dense training and points of the grid, by axis, by point, and at the best setting of each compressor."""

    methods: Mapping[str, tuple[str, ...]] = field(default_factory=_grid_methods, kw_only=True)
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
        names = [point.name for point in self._chosen(plan)]
        return {self.grid[name]: seeds for name, seeds in self.finished(plan, case, names, results).items()}

    def by_axis(self, plan: Plan, case: Case, results: Results) -> Table:
        """One row per choice: means over all points with this choice."""
        dense = self.finished(plan, case, [DENSE], results).get(DENSE)
        columns = ("axis: choice", "points", "mean metric", INTERVAL, "every seed", "less dense", "compared with")
        grid, rows = self._chosen(plan), []
        for found in marginals(grid, self._values(plan, case, results)):
            having = [point for point in grid if getattr(point, found.axis) == found.choice]
            jobs = [job for point in having for job in self.trainings(plan, case, point.name)]
            rows.append(Row(found.name, [*_axis_cells(found, dense), *_gain_cells(found)], jobs))
        title = f"{self.title}, by axis: {case.name}"
        return Table(title, (*columns, "difference, all else equal", ITS), rows)

    def _settings(self, plan: Plan) -> dict[str, list[str]]:
        """Methods of each row of the table by compressor."""
        settings = {DENSE: [DENSE]}
        for point in self._chosen(plan):
            settings.setdefault(point.sent, []).append(point.name)
        return settings

    def by_compressor(self, plan: Plan, case: Case, results: Results) -> Table:
        """One row per compressor at its best setting."""
        settings, rows = self._settings(plan), []
        found = {row: self.finished(plan, case, names, results) for row, names in settings.items()}
        chosen = {row: held_out(candidates, case.lower) for row, candidates in found.items() if candidates}
        for row, candidates in found.items():
            if row in chosen:
                methods = [best_of({name: mean(seeds) for name, seeds in candidates.items()}, case.lower)]
                outcomes = self.outcomes(plan, case, methods[0], results)
                block = chosen.get(RANDOM_BLOCK) if row != RANDOM_BLOCK else None
                less = [ours - theirs for ours, theirs in zip(block, chosen[row], strict=True)] if block else None
                share = share_of_bytes(each.data for each in outcomes)
                cells = [
                    Cell(methods[0].removeprefix(f"{row},") if methods[0] != row else "-"),
                    *_values_cells(chosen[row]),
                    Cell(_list(chosen[row])),
                    *(_values_cells(less) if less else [Cell("-")] * 2),
                    number(share, ".2%"),
                    seconds_cell(outcomes),
                    Cell("; ".join(machines(outcomes))),
                ]
            else:
                methods = settings[row]
                cells = failed([each for name in methods for each in self.outcomes(plan, case, name, results)], 9)
            rows.append(Row(row, cells, [job for name in methods for job in self.trainings(plan, case, name)]))
        how = "chosen on other seeds" if len(plan.seeds) > 1 else "chosen on the same seed"
        columns = ("sent", "best setting", f"metric, {how}", INTERVAL, "every seed")
        last = (f"{RANDOM_BLOCK} less it", ITS, "sent / dense", "virtual seconds", "machine")
        return Table(f"{self.title}, each at its best: {case.name}", (*columns, *last), rows)

    def pictures(self, scale: str, results: Results) -> Sequence[Picture]:
        plan, pictures = at(scale, self.plans), []
        for case in plan.cases:
            grid, values = self._chosen(plan), self._values(plan, case, results)
            dense = self.finished(plan, case, [DENSE], results).get(DENSE)
            means = {point: mean(values[point]) if point in values else None for point in grid}
            found = [(each.name, each.seeds) for each in marginals(grid, values) if each.seeds]
            every = f"{case.title}: mean metric of every point; empty: not possible, or not trained"
            by_axis = f"{case.title}: means over all points with a choice, one dot a seed; dotted: dense"
            pictures += [
                Picture(f"{case.name}-axes", by_axis, partial(draw_axes, found, dense), wide=True),
                Picture(f"{case.name}-grid", every, partial(draw_grid, case, means, dense), wide=True),
            ]
        return pictures


def _axis_cells(found: Marginal, dense: Sequence[float] | None) -> list[Cell]:
    lost = found.used < found.whole
    count = Cell(f"{found.used} of {found.whole}, others failed" if lost else str(found.whole), found.used, bad=lost)
    if not found.seeds:
        return [count, *[Cell("failed", bad=True)] * 4]
    gap = mean(found.seeds) - mean(dense) if dense else None
    less = Cell("failed", bad=True) if gap is None else number(gap, "+.4f")
    return [count, *_values_cells(found.seeds), Cell(_list(found.seeds)), less]


def _gain_cells(found: Marginal) -> list[Cell]:
    reference = AXES[found.axis][1]
    if found.choice == reference:
        return [Cell("-")] * 3
    if not found.gains:
        return [Cell(reference), Cell("no equal pair"), Cell("-")]
    pairs = f"{reference}, {found.pairs} pair{'s' if found.pairs > 1 else ''}"
    return [Cell(pairs), *_values_cells(found.gains)]


def plain_points(grid: Sequence[Point]) -> list[Point]:
    """First point of each compressor and residual rule with scope layer and momentum after the average."""
    found: dict[tuple[str, str], Point] = {}
    for point in grid:
        if point.momentum == "after" and point.scope in ("", "layer"):
            found.setdefault((point.sent, point.residual), point)
    return list(found.values())


def _settings() -> Mapping[str, tuple[str, float]]:
    rows = (DENSE, *(point.name for point in plain_points(points())))
    return {f"{row}, lr {rate:g}": (row, rate) for row in rows for rate in LEARNING_RATES}


def _methods() -> Mapping[str, tuple[str, ...]]:
    """Command words of each row with one of its learning rates."""
    return {
        name: (*(DENSE_WORDS if row == DENSE else (f"+point=[{row}]",)), f"optimizer.lr={rate:g}")
        for name, (row, rate) in _settings().items()
    }


@dataclass(frozen=True)
class StudyRates(MethodComparison):
    """Dense training and points with several learning rates; ``settings`` has the row and rate of each method."""

    methods: Mapping[str, tuple[str, ...]] = field(default_factory=_methods, kw_only=True)
    settings: Mapping[str, tuple[str, float]] = field(default_factory=_settings, kw_only=True)

    def caption(self, scale: str) -> str:
        return (
            f"{super().caption(scale)}. For each seed, the learning rate (and in the second table the setting) is the "
            "one that is best for the other seeds; what fails with a seed is no choice. Points: some of "
            f"experiment={PRESET}"
        )

    def tables(self, scale: str, results: Results) -> Sequence[Table]:
        plan = at(scale, self.plans)
        groups = {
            "each at its best rate": self._rows(plan),
            "each compressor at its best": self._compressors(plan),
        }
        return [
            self._table(plan, case, title, names, results) for case in plan.cases for title, names in groups.items()
        ]

    def pictures(self, scale: str, results: Results) -> Sequence[Picture]:
        """One picture per case: results of each row at its rates. One line per training would be unreadable."""
        plan, pictures = at(scale, self.plans), []
        for case in plan.cases:
            chosen = {row: self._chosen(plan, case, names, results) for row, names in self._rows(plan).items()}
            found = [(row, seeds) for row, seeds in chosen.items() if seeds and row != DENSE]
            caption = (
                f"{case.title}: the metric at the learning rate that is best for the other seeds, one dot a seed; "
                "dotted: dense, in the same way. Settings that are not trained yet are left out"
            )
            draw = partial(draw_axes, found, chosen[DENSE])
            pictures += [Picture(f"{case.name} rates", caption, draw, case.title, wide=True)] if found else []
        return pictures

    @property
    def dense_names(self) -> Sequence[str]:
        return [name for name, (row, _) in self.settings.items() if row == DENSE]

    def choices_of(self, sent: str, scale: str, results: Results) -> list[str]:
        """Methods by compressor, dense training included, without failed ones."""
        plan = at(scale, self.plans)
        return [
            name
            for name in self._compressors(plan).get(sent, ())
            if not any(any_failed(self.outcomes(plan, case, name, results)) for case in plan.cases)
        ]

    def _rows(self, plan: Plan) -> dict[str, list[str]]:
        """Methods of each row, one per learning rate."""
        groups: dict[str, list[str]] = {}
        for name in self.compared(plan):
            groups.setdefault(self.settings[name][0], []).append(name)
        return groups

    def _compressors(self, plan: Plan) -> dict[str, list[str]]:
        """Methods of each compressor, whose name is the first word of the row names."""
        merged: dict[str, list[str]] = {}
        for row, names in self._rows(plan).items():
            merged.setdefault(row.partition(",")[0], []).extend(names)
        return merged

    def _table(
        self, plan: Plan, case: Case, title: str, groups: Mapping[str, Sequence[str]], results: Results
    ) -> Table:
        columns = ("sent", "best setting", "metric, chosen on other seeds", INTERVAL, "of each setting")
        dense, rows = self._chosen(plan, case, groups[DENSE], results), []
        for row, names in groups.items():
            jobs = [job for name in names for job in self.trainings(plan, case, name)]
            chosen = self._chosen(plan, case, names, results)
            if chosen is None:
                rows.append(Row(row, failed([results.of(job) for job in jobs], 7), jobs))
                continue
            means = {name: mean(values) for name, values in self.finished(plan, case, names, results).items()}
            best = best_of(means, case.lower)
            share = share_of_bytes(each.data for each in self.outcomes(plan, case, best, results))
            shown = {name.removeprefix(row).lstrip(", "): means.get(name) for name in names}
            reported = (f"{name}: {'failed' if value is None else f'{value:.4g}'}" for name, value in shown.items())
            gaps = dense and row != DENSE and [one - other for one, other in zip(chosen, dense, strict=True)]
            cells = [
                Cell(best.removeprefix(row).lstrip(", ")),
                *_values_cells(chosen),
                Cell(", ".join(reported)),
                *(_values_cells(gaps) if gaps else [Cell("-")] * 2),
                number(share, ".2%"),
            ]
            rows.append(Row(row, cells, jobs))
        last = ("less dense", ITS, "sent / dense")
        return Table(f"{self.title}, {title}: {case.title}", (*columns, *last), rows)

    def _chosen(self, plan: Plan, case: Case, names: Sequence[str], results: Results) -> list[float] | None:
        """Metric of each seed at the setting that is best for the others, if all runs ended and one did not diverge."""
        values = self.finished(plan, case, names, results)
        run = all(each.started for name in names for each in self.outcomes(plan, case, name, results))
        return held_out(values, case.lower) if run and values else None
