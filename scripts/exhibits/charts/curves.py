"""Curves of metrics: the mean over seeds, and a band from minimum to maximum."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import mean
from typing import Any, NamedTuple

from scripts.exhibits.charts import axes as axes_of
from scripts.exhibits.charts.labels import End, name_ends
from scripts.exhibits.charts.palette import SOFT, Look, looks
from scripts.exhibits.measures import HIGHER_IS_BETTER, Curve, in_words

__all__ = ["Band", "band", "draw_means", "key_of"]

# Characters of a name that fit next to a line; longer names go to the legend.
LONG = 22
# Lines that can have their names at their ends; more cross, and names would hide where.
FEW = 6
# Metrics of which a factor says more than a difference.
FACTORS = frozenset({"perplexity"})
# Share of a training at its start that the axis may cut off, because late differences are small.
START = 0.25


class Band(NamedTuple):
    """Statistics of several runs by evaluation.

    Attributes:
        places: mean steps or seconds.
        middle: mean values.
        low: the least values.
        high: the most.
    """

    places: Sequence[float]
    middle: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]


def band(curves: Sequence[Curve], clock: str) -> Band:
    """Puts runs together at the steps that all of them were evaluated at.

    Args:
        curves: of at least one run.
        clock: ``steps`` or ``seconds``.
    """
    common = set.intersection(*(set(curve.steps) for curve in curves))
    rows = []
    for step in sorted(common):
        places = [curve.steps.index(step) for curve in curves]
        values = [curve.values[place] for curve, place in zip(curves, places, strict=True)]
        along = mean(getattr(curve, clock)[place] for curve, place in zip(curves, places, strict=True))
        rows.append((along, mean(values), min(values), max(values)))
    return Band(*zip(*rows, strict=True)) if rows else Band((), (), (), ())


def key_of(names: Sequence[str]) -> dict[str, Look]:
    """Entries of the legend; none if all names are next to their lines."""
    return looks(names) if len(names) > FEW or any(len(name) > LONG for name in names) else {}


def draw_means(
    axes: Any,
    curves: Mapping[str, Sequence[Curve]],
    clock: str,
    across: str,
    metric: str,
    *,
    target: float | None = None,
    ratios: bool = False,
    names: bool = True,
) -> None:
    """Draws a line and a band for each method, with its name at the end unless that is long.

    Args:
        axes: matplotlib's, to draw into.
        curves: each method's runs, of those that finished.
        clock: what the metric is drawn against, a field of :class:`Curve`.
        across: what that is, for readers.
        metric: its name.
        target: a value of the metric to draw a line at.
        ratios: whether the clock's axis is one of factors: twice as fast is equally far everywhere.
        names: whether short ones stand beside their lines, if these are few; else a key must have them all.
    """
    styles = looks(curves)
    bands = {name: band(runs, clock) for name, runs in curves.items() if runs}
    ends = []
    for name, found in bands.items():
        if not found.places:
            continue
        look = styles[name]
        marker = look.marker if len(found.places) == 1 else None  # one point is no line
        axes.plot(found.places, found.middle, color=look.color, linestyle=look.dash, linewidth=1.5, marker=marker)
        axes.fill_between(found.places, found.low, found.high, color=look.color, alpha=0.14, linewidth=0)
        last = _last(found)
        if names and last and len(name) <= LONG and len(curves) <= FEW:
            ends.append(End(name, *last, look.color))
    factors = metric in FACTORS
    axes_of.plain(
        axes, across + (", logarithmic" if ratios else ""), in_words(metric) + (", logarithmic" if factors else "")
    )
    if factors:
        axes_of.logarithmic(axes.yaxis, [value for found in bands.values() for value in (*found.low, *found.high)])
    elif metric in HIGHER_IS_BETTER and (late := _late(bands.values())):
        most = max(high for found in bands.values() for high in found.high if math.isfinite(high))
        air = 0.05 * (most - min(late)) or 0.01
        axes.set_ylim(min(late) - air, most + air)
    if ratios:
        axes_of.logarithmic(axes.xaxis, [place for found in bands.values() for place in found.places])
    if target is not None:
        axes.axhline(target, color=SOFT, linewidth=0.9, linestyle=":")
        ends.append(End(f"target {target:.3g}", axes.get_xlim()[1], target, SOFT))
    name_ends(axes, ends)


def _late(bands: Iterable[Band]) -> list[float]:
    """The least values of what comes after the start of each training, as far as they are finite."""
    return [
        low
        for found in bands
        for place, low in zip(found.places, found.low, strict=True)
        if place >= START * max(found.places) and math.isfinite(low)
    ]


def _last(found: Band) -> tuple[float, float] | None:
    """The last point that is finite, if one is."""
    points = [point for point in zip(found.places, found.middle, strict=True) if all(map(math.isfinite, point))]
    return points[-1] if points else None
