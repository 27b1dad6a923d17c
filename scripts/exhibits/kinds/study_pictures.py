"""Pictures of a grid of methods."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

from scripts.exhibits.charts import palette
from scripts.exhibits.charts.axes import plain
from scripts.exhibits.charts.palette import readable
from scripts.exhibits.kinds.study_points import Point
from scripts.exhibits.kinds.trainings import Case

__all__ = ["draw_axes", "draw_grid"]


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
