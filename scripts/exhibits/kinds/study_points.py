"""Points of the sparse communication study, statistics of their axes, and figures of both."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from statistics import mean
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias, TypeVar

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from scripts.exhibits.charts import palette
from scripts.exhibits.charts.axes import plain
from scripts.exhibits.charts.palette import readable
from scripts.exhibits.kinds.trainings import Case
from trainer.build import CONFIGURATIONS

__all__ = [
    "AXES",
    "PRESET",
    "RANDOM_BLOCK",
    "Marginal",
    "Point",
    "Values",
    "best_of",
    "draw_axes",
    "draw_grid",
    "held_out",
    "marginals",
    "points",
]

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
        axis: Field of :class:`Point`.
        choice: Choice on this axis.
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


# The metric by seed.
Values: TypeAlias = Mapping[Point, Sequence[float]]


def marginals(grid: Sequence[Point], values: Values) -> list[Marginal]:
    """Results of every choice of every axis.

    Args:
        grid: All points.
        values: Metric by seed of the points whose trainings all finished.
    """
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

    Args:
        candidates: At least one setting, each with the same seeds.
        lower: Whether lower values of the metric are better.
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

    Args:
        case: Case that defines whether lower values of the metric are better.
        means: Mean of the metric by point; ``None`` if a training failed.
        dense: Metric of dense training by seed.
        figure: Figure of matplotlib to draw into.
    """
    rows = list(dict.fromkeys((point.sent, point.scope, point.total) for point in means))
    columns = list(dict.fromkeys(sorted((point.residual, point.momentum) for point in means)))
    figure.set_size_inches(7, 1.0 + 0.3 * len(rows))
    axes = figure.subplots()
    fields: list[list[float]] = [[float("nan")] * len(columns) for _ in rows]
    places = {
        point: (rows.index((point.sent, point.scope, point.total)), columns.index((point.residual, point.momentum)))
        for point in means
    }
    for point, (row, column) in places.items():
        value = means[point]
        fields[row][column] = float("nan") if value is None else value
    shades = "viridis_r" if case.lower else "viridis"
    shown = axes.pcolormesh(fields, cmap=shades)
    axes.invert_yaxis()
    for point, (row, column) in places.items():
        value = means[point]
        text = "failed" if value is None else f"{value:.3g}"
        colour = palette.INK if value is None else readable(shown.cmap(shown.norm(value)))
        axes.text(column + 0.5, row + 0.5, text, ha="center", va="center", fontsize=7, color=colour)
    axes.set_yticks(
        [place + 0.5 for place in range(len(rows))], [", ".join(filter(None, row)) for row in rows], fontsize=7
    )
    names = [f"{residual}\n{momentum}" for residual, momentum in columns]
    axes.set_xticks([place + 0.5 for place in range(len(columns))], names, fontsize=7)
    axes.set_xlabel("not sent, place of momentum", fontsize=8)
    axes.set_title(f"mean metric; dense {mean(dense):.3g}" if dense else "mean metric", fontsize=8, loc="left")


def draw_axes(found: Sequence[tuple[str, Sequence[float]]], dense: Sequence[float] | None, figure: Any) -> None:
    """Dot plot with one line per choice and one marker per seed.

    Args:
        found: Choices with their figures; names with the same text before the first colon or comma share a colour.
        dense: Metric of dense training by seed.
        figure: Figure of matplotlib to draw into.
    """
    figure.set_size_inches(6, 0.9 + 0.22 * len(found))
    axes = figure.subplots()
    plain(axes, "metric", grid="x")
    kinds = [re.split("[:,]", name)[0] for name, _ in found]
    looks = palette.looks(dict.fromkeys(kinds))
    for place, (_, seeds) in enumerate(found):
        colour = looks[kinds[place]].color
        axes.plot(seeds, [place] * len(seeds), "o", color=colour, alpha=0.6, markersize=4.5)
        axes.plot([mean(seeds)], [place], "|", color=colour, markersize=12, markeredgewidth=2)
    if dense:
        axes.axvline(mean(dense), linestyle=":", color=palette.SOFT)
        axes.annotate("dense", (mean(dense), 1), (0, 2), ("data", "axes fraction"), "offset points", ha="center")
    axes.set_yticks(range(len(found)), [name for name, _ in found])
    axes.set_ylim(len(found) - 0.4, -0.6)
