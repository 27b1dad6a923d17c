"""Figure of docs/tables/learning.md: loss or accuracy against the share of dense's bytes, one panel per task."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any, NamedTuple

from scripts.evidence.plans import ALONE, DENSE, Overview, Task, first_recorded
from scripts.exhibits.charts.axes import SIZE, check_drawing, drawing, explain, logarithmic, plain
from scripts.exhibits.charts.palette import Look, looks
from scripts.exhibits.records import Records

__all__ = ["Mark", "Panel", "figure", "panels"]

COLUMNS = 3
# Inches of a panel.
WIDTH, HEIGHT = 0.8 * SIZE[0], 0.85 * SIZE[1]


class Mark(NamedTuple):
    """A row in a panel.

    Attributes:
        share: Bytes sent, in percent of those of dense training.
        values: Metric of each seed.
    """

    share: float
    values: Sequence[float]


class Panel(NamedTuple):
    """Figures of a task.

    Attributes:
        title: Title of the panel.
        metric: Name of the metric.
        dense: Mean metric of dense training.
        alone: Mean metric of a single worker.
        marks: Marks of each method that has records.
    """

    title: str
    metric: str
    dense: float
    alone: float
    marks: Mapping[str, Sequence[Mark]]


def panels(plan: Overview, records: Records) -> list[Panel]:
    """Returns the panels of all tasks with records of dense training, a single worker and at least one method."""
    found = []
    for task in plan.panels:
        levels = [_mark(task, name, records) for name in (DENSE, ALONE)]
        marks = {
            method: [mark for names in rows if (mark := _mark(task, first_recorded(task, names, records), records))]
            for method, rows in plan.marks.items()
        }
        shown = {method: each for method, each in marks.items() if each}
        dense, alone = (mean(level.values) if level else None for level in levels)
        if shown and dense is not None and alone is not None:
            found.append(Panel(plan.titles[task.name], task.metric, dense, alone, shown))
    return found


def _mark(task: Task, name: str | None, records: Records) -> Mark | None:
    found = None if name is None else task.results(task.line(name), records)
    if found is None:
        return None
    runs = found[1].values()
    return Mark(100 * mean(run.share for run in runs), [run.final(task.metric) for run in runs])


def figure(plan: Overview, records: Records) -> bytes:
    """Returns the panels as PNG, with one legend below.

    Raises:
        ConfigError: If matplotlib is not installed.
    """
    from matplotlib.figure import Figure  # noqa: PLC0415 - only figures need it

    check_drawing()
    shown = panels(plan, records)
    styles = {name: look._replace(dash="") for name, look in looks(plan.marks).items()}
    rows = -(-len(shown) // COLUMNS)
    shares = [mark.share for panel in shown for marks in panel.marks.values() for mark in marks]
    with drawing():
        whole = Figure(figsize=(COLUMNS * WIDTH, rows * HEIGHT), layout="constrained")
        places = whole.subplots(rows, COLUMNS, squeeze=False).flat
        for panel in shown:
            axes = next(places)
            _draw(axes, panel, styles)
            logarithmic(axes.xaxis, shares, "%")
        for axes in places:
            axes.set_axis_off()
        explain(whole, {**styles, "dense": _level(DENSE), "single worker": _level(ALONE)})
        out = io.BytesIO()
        whole.savefig(out, format="png", dpi=100, metadata={"Software": None})
    return out.getvalue()


def _level(name: str) -> Look:
    return looks([name])[name]._replace(dash="-" if name == DENSE else "--", marker="")


def _draw(axes: Any, panel: Panel, styles: Mapping[str, Look]) -> None:
    plain(axes, "bytes sent / dense, logarithmic", f"{panel.title}\n{panel.metric}")
    for level, name in ((panel.dense, DENSE), (panel.alone, ALONE)):
        axes.axhline(level, color=_level(name).color, linestyle=_level(name).dash, linewidth=1)
    for method, marks in panel.marks.items():
        look = styles[method]
        for mark in marks:
            axes.vlines(mark.share, min(mark.values), max(mark.values), color=look.color, linewidth=1)
            axes.plot([mark.share], [mean(mark.values)], look.marker, color=look.color, markersize=4.5, clip_on=False)
    axes.locator_params(axis="y", nbins=5)
