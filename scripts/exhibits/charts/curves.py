"""Curves of metrics: mean over seeds, and band from minimum to maximum."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from statistics import mean
from typing import Any, NamedTuple

from scripts.exhibits.base import Picture
from scripts.exhibits.charts import style
from scripts.exhibits.charts.style import SOFT, Look, looks
from scripts.exhibits.measures import HIGHER_IS_BETTER, Curve, in_words

# Most lines in a panel.
MOST = 5
# Metrics whose ratios are more informative than their differences.
FACTORS = frozenset({"perplexity"})
# Share of a training at its start that the axis may cut off, because the late differences are small.
START = 0.25


class Band(NamedTuple):
    """Statistics of several runs by evaluation, at mean steps or seconds."""

    places: Sequence[float]
    middle: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]


def band(curves: Sequence[Curve], clock: str) -> Band:
    """Aggregates at least one run at the steps at which all were evaluated, by ``steps`` or ``seconds``."""
    common = set.intersection(*(set(curve.steps) for curve in curves))
    rows = []
    for step in sorted(common):
        places = [curve.steps.index(step) for curve in curves]
        values = [curve.values[place] for curve, place in zip(curves, places, strict=True)]
        along = mean(getattr(curve, clock)[place] for curve, place in zip(curves, places, strict=True))
        rows.append((along, mean(values), min(values), max(values)))
    return Band(*zip(*rows, strict=True)) if rows else Band((), (), (), ())


def panels(names: Sequence[str], common: Collection[str] = ()) -> list[list[str]]:
    """Names of the lines of each panel, at most five, in about equal numbers; every panel shows the common ones."""
    shared = [name for name in names if name in common]
    rest = [name for name in names if name not in shared]
    if len(names) <= MOST or not rest:
        return [list(names)]
    count = math.ceil(len(rest) / (MOST - len(shared)))
    ends = [round(place * len(rest) / count) for place in range(count + 1)]
    return [[*shared, *rest[low:high]] for low, high in pairwise(ends)]


def panel_pictures(
    pictures: Sequence[Picture], names: Sequence[str], styles: Mapping[str, Look], common: Collection[str] = ()
) -> list[Picture]:
    """Pictures of a few lines each; see :func:`panels`.

    The functions of ``pictures`` take the names of the lines to draw, and the figure. Without names there is no panel.
    """
    parts, found = panels(names, common) if names else [], []
    for number, shown in enumerate(parts, 1):
        which = f" ({number} of {len(parts)})" if len(parts) > 1 else ""
        key = {name: styles[name] for name in shown}
        for each in pictures:
            draw = partial(each.draw, shown)
            found.append(each._replace(name=each.name + which, title=each.title + which, draw=draw, key=key))
    return found


def draw_means(
    axes: Any,
    curves: Mapping[str, Sequence[Curve]],
    clock: str,
    across: str,
    metric: str,
    *,
    target: float | None = None,
    ratios: bool = False,
    shown: Collection[str] | None = None,
) -> None:
    """Draws the mean of each method as a line, and its range as a band.

    All finished runs set the limits of the axes, so that panels compare; ``shown`` names the methods to draw, by
    default all. ``clock`` is the field of :class:`Curve` on the horizontal axis, and ``target`` a metric value at which
    to draw a line. With ``ratios`` the horizontal axis is logarithmic, so that equal speedups have equal widths.
    """
    styles = looks(curves)
    bands = {name: band(runs, clock) for name, runs in curves.items() if runs}
    for name, found in bands.items():
        if not found.places or (shown is not None and name not in shown):
            continue
        look = styles[name]
        marker = look.marker if len(found.places) == 1 else None  # a single point draws no line
        axes.plot(found.places, found.middle, color=look.color, linestyle=look.dash, linewidth=1.5, marker=marker)
        axes.fill_between(found.places, found.low, found.high, color=look.color, alpha=0.14, linewidth=0)
    factors = metric in FACTORS
    style.plain(
        axes, across + (", logarithmic" if ratios else ""), in_words(metric) + (", logarithmic" if factors else "")
    )
    if factors:
        style.logarithmic(axes.yaxis, [value for found in bands.values() for value in (*found.low, *found.high)])
    elif metric in HIGHER_IS_BETTER and (late := _late(bands.values())):
        most = max(high for found in bands.values() for high in found.high if math.isfinite(high))
        air = 0.05 * (most - min(late)) or 0.01
        axes.set_ylim(min(late) - air, most + air)
    if ratios:
        style.logarithmic(axes.xaxis, [place for found in bands.values() for place in found.places])
    if target is not None:
        axes.axhline(target, color=SOFT, linewidth=0.9, linestyle=":")


def _late(bands: Iterable[Band]) -> list[float]:
    """Finite minimum values after the start phase of each training."""
    return [
        low
        for found in bands
        for place, low in zip(found.places, found.low, strict=True)
        if place >= START * max(found.places) and math.isfinite(low)
    ]


def draw_steps(
    figure: Any,
    lines: Mapping[str, Sequence[Sequence[float]]],
    styles: Mapping[str, Look],
    up: str,
    *,
    every: int = 1,
    near: float = 0.0,
    ratios: bool = False,
) -> None:
    """Draws the mean of each step as a line, and the range of several values, such as one per worker, as a band.

    Lines are drawn at every ``every``-th step, over a grey band of half the width ``near`` around 1. With ``ratios``
    the vertical axis, named ``up``, is logarithmic.
    """
    axes = figure.subplots()
    style.plain(axes, "step", up + (", logarithmic" if ratios else ""))
    for name, line in lines.items():
        places, look = range(0, every * len(line), every), styles[name]
        axes.plot(places, [mean(step) for step in line], color=look.color, linestyle=look.dash)
        if any(len(step) > 1 for step in line):
            axes.fill_between(
                places, *zip(*((min(s), max(s)) for s in line), strict=True), color=look.color, alpha=0.14, linewidth=0
            )
    if near:
        axes.axhspan(1 - near, 1 + near, color=SOFT, alpha=0.15, linewidth=0)
    if ratios:
        values = [value for line in lines.values() for step in line for value in step]
        style.logarithmic(axes.yaxis, [*values, *((1 - near, 1 + near) if near else ())])
