"""The points of the sparse communication study, and what can be said of their axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias, TypeVar

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from trainer.build import CONFIGURATIONS

__all__ = [
    "AXES",
    "PRESET",
    "RANDOM_BLOCK",
    "Marginal",
    "Point",
    "Values",
    "best_of",
    "covering",
    "held_out",
    "marginals",
    "points",
]

PRESET, RANDOM_BLOCK = "sparse_communication_study", "random_block"


class Point(NamedTuple):
    """One choice per axis.

    Attributes:
        sent: what is sent.
        scope: what is compared or drawn in; empty where a compressor knows no scope.
        residual: what becomes of what is not sent.
        momentum: its place.
        total: how the sum is made.
    """

    sent: str
    scope: str
    residual: str
    momentum: str
    total: str

    @property
    def name(self) -> str:
        """As ``+point=[...]`` takes it."""
        return ",".join(filter(None, self))


# By field of Point: how a table calls the axis, and the choice that the others are compared with.
AXES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "sent": ("what is sent", "topk"),
        "scope": ("compared or drawn in", "layer"),
        "residual": ("what is not sent", "local"),
        "momentum": ("momentum", "after"),
        "total": ("sum", "dense"),
    }
)


def points() -> list[Point]:
    """The points of the preset, in its order."""
    config: Any = OmegaConf.load(CONFIGURATIONS / "experiment" / f"{PRESET}.yaml")
    ((key, text),) = config["hydra"]["sweeper"]["params"].items()
    override = OverridesParser.create().parse_override(f"{key}={text}")
    found = []
    for words in override.sweep_string_iterator():
        sent, *scope, residual, momentum, total = words.strip("[]").split(",")
        found.append(Point(sent, "".join(scope), residual, momentum, total))
    return found


def covering(grid: Sequence[Point]) -> list[Point]:
    """Few points in which every choice of every axis occurs; the first of equally good ones."""
    missing = {choice for point in grid for choice in enumerate(point)}
    chosen = []
    while missing:
        best = max(grid, key=lambda point: len(missing & set(enumerate(point))))
        chosen.append(best)
        missing -= set(enumerate(best))
    return chosen


class Marginal(NamedTuple):
    """What one choice of an axis reaches.

    Attributes:
        axis: field of :class:`Point`.
        choice: on it.
        whole: how many points have it.
        seeds: by seed, the mean metric over those points of which every training finished; may be empty.
        gains: by seed, the mean difference to the axis's reference, over pairs of points that are equal otherwise.
        pairs: how many such pairs; of the sum, which has its own row, any will do.
        used: how many points are in ``seeds``.
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
    """Every choice of every axis.

    Args:
        grid: all points.
        values: of those that finished with every seed, the metric by seed.
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
    """Of the points with a choice, the metric by all else; sums that differ are all else's average."""
    rest: dict[Point, list[Sequence[float]]] = {}
    for point, seeds in values.items():
        if getattr(point, axis) == choice:
            key = point._replace(**{axis: ""}) if axis == "total" else point._replace(**{axis: "", "total": ""})
            rest.setdefault(key, []).append(seeds)
    return {key: _columns(found) for key, found in rest.items()}


def _columns(rows: Sequence[Sequence[float]]) -> list[float]:
    """The mean of each column."""
    return [mean(column) for column in zip(*rows, strict=True)]


Setting = TypeVar("Setting")


def held_out(candidates: Mapping[Setting, Sequence[float]], lower: bool) -> list[float]:
    """For each seed, its metric at the setting that is best for the other seeds.

    So who has more settings to choose from has not more luck. A single seed has no others: it chooses for itself.

    Args:
        candidates: at least one setting, with at least one seed, as many for each.
        lower: whether a lower metric is a better one.
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
    """The setting with the best figure; the first of equal ones."""
    return (min if lower else max)(figures, key=lambda setting: figures[setting])
