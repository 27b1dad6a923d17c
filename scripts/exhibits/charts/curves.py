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

# Characters of a name that fit next to a line. Longer names go to the legend.
LONG = 22
# Most lines that are labelled at their ends. More lines cross each other, and labels would hide the crossings.
FEW = 6
# Metrics whose ratios are more informative than their differences.
FACTORS = frozenset({"perplexity"})
# Share of a training at its start that the axis may cut off, because the late differences are small.
START = 0.25


class Band(NamedTuple):
    """Statistics of several runs by evaluation.

    Attributes:
        places: Mean steps or seconds.
        middle: Mean values.
        low: Minimum values.
        high: Maximum values.
    """

    places: Sequence[float]
    middle: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]


def band(curves: Sequence[Curve], clock: str) -> Band:
    """Aggregates runs at the steps at which all of them were evaluated.

    Args:
        curves: Curves of at least one run.
        clock: Field for the horizontal axis: ``steps`` or ``seconds``.
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
    """Entries of the legend; empty if all lines are labelled at their ends."""
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
    """Draws the mean of each method as a line, and its range as a band.

    Args:
        axes: Axes of matplotlib to draw into.
        curves: Finished runs of each method.
        clock: Field of :class:`Curve` on the horizontal axis.
        across: Label of the horizontal axis.
        metric: Name of the metric.
        target: Metric value at which to draw a horizontal line.
        ratios: Whether the horizontal axis is logarithmic, so that equal speedups have equal widths.
        names: Whether to label a few lines with short names at their ends; otherwise a legend must name them all.
    """
    styles = looks(curves)
    bands = {name: band(runs, clock) for name, runs in curves.items() if runs}
    ends = []
    for name, found in bands.items():
        if not found.places:
            continue
        look = styles[name]
        marker = look.marker if len(found.places) == 1 else None  # a single point draws no line
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
    """Finite minimum values after the start phase of each training."""
    return [
        low
        for found in bands
        for place, low in zip(found.places, found.low, strict=True)
        if place >= START * max(found.places) and math.isfinite(low)
    ]


def _last(found: Band) -> tuple[float, float] | None:
    """Last finite point, or ``None``."""
    points = [point for point in zip(found.places, found.middle, strict=True) if all(map(math.isfinite, point))]
    return points[-1] if points else None
