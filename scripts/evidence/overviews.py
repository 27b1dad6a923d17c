"""Gap to dense training that methods close, tables of several tasks (costs by length, SGD's ablation), and the figure.

The figure of docs/tables/learning.md shows loss or accuracy against the share of dense's bytes, one panel per task.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any, NamedTuple

from scripts.evidence.plans import ALONE, DENSE, Overview, Task, first_recorded
from scripts.exhibits.charts.style import SIZE, Look, check_drawing, drawing, explain, logarithmic, looks, plain, png
from scripts.exhibits.measures import LEAST, seeds
from scripts.exhibits.records import Records
from scripts.exhibits.tables import Cell, Row, Table

__all__ = ["WORSE", "Mark", "Panel", "ablation", "costs", "figure", "gap", "losses_of", "panels"]

WORSE = "worse than a single worker"


def losses_of(task: Task, records: Records) -> dict[str, dict[int, float]]:
    """Returns the losses of the recorded rows of a task by seed, at their best learning rates; see ``Task.loss``."""
    found = {line.name: task.results(line, records) for line in task.lines}
    return {name: {seed: task.loss(each) for seed, each in pair[1].items()} for name, pair in found.items() if pair}


def shared(name: str, losses: Mapping[str, Mapping[int, float]]) -> tuple[float, float, float, int] | None:
    """Mean losses over the seeds that a row shares with dense training and a single worker.

    Args:
        name: Name of the row.
        losses: Losses of all rows by seed.

    Returns:
        Mean losses of the row, of dense training and of a single worker, and the number of seeds; ``None`` without a
        shared seed.
    """
    if not {name, DENSE, ALONE} <= losses.keys():
        return None
    seeds = set.intersection(*(set(losses[each]) for each in (name, DENSE, ALONE)))
    if not seeds:
        return None
    own, dense, alone = (mean(losses[each][seed] for seed in seeds) for each in (name, DENSE, ALONE))
    return own, dense, alone, len(seeds)


def gap(name: str, losses: Mapping[str, Mapping[int, float]]) -> str:
    """Share of the gain of dense training over a single worker that a row reaches, as text; see :func:`shared`."""
    found = None if name in (ALONE, DENSE) else shared(name, losses)
    if found is None:
        return ""
    own, dense, alone, _ = found
    if own > alone:
        return WORSE
    gain = alone - dense
    return f"{(alone - own) / gain:.0%}" if gain > 0 and math.isfinite(gain) else ""


def costs(plan: Overview, records: Records) -> Table:
    """Returns cost and closed gap of each method, one task per row, each over the seeds that all its parts have."""
    rows = []
    for task in plan.costs:
        cells = [_cost(task, names, records) for names in plan.methods.values()]
        if any(cells):
            rows.append(Row(plan.titles[task.name], [Cell(each) for each in cells], ()))
    return Table("Cost against dense training", ("training", *plan.methods), rows)


def _cost(task: Task, names: Sequence[str], records: Records) -> str:
    name = first_recorded(task, names, records)
    losses = losses_of(task, records)
    both = sorted(losses.get(name or "", {}).keys() & losses.get(DENSE, {}).keys())
    if name is None or not both:
        return ""
    cost = mean(losses[name][seed] - losses[DENSE][seed] for seed in both)
    amount = f"{cost:+.3f} nats" if task.lower else f"{100 * cost:+.1f} points"
    text = f"{amount}{_few(len(both))}"
    if (found := shared(name, losses)) is None:
        return text
    return f"{text}, {gap(name, losses)}{_few(found[3]) if found[3] < len(both) else ''}"


def _few(count: int) -> str:
    return "" if count >= LEAST else f" ({seeds(count)})"


def ablation(plan: Overview, records: Records) -> Table:
    """Returns the rows of the ablation with the results of the first seed of each task."""
    tasks = [task.cut(1) for task in plan.ablated]
    losses = [losses_of(task, records) for task in tasks]
    rows = []
    for name in plan.ablation:
        cells = [_result(task, name, found) for task, found in zip(tasks, losses, strict=True)]
        if any(cells):
            rows.append(Row(name, [Cell(each) for each in (*cells, _share(tasks, name, records))], ()))
    columns = ("", *(plan.titles[task.name] for task in tasks), "sent / dense")
    return Table("Parts of the default recipe", columns, rows)


def _result(task: Task, name: str, losses: Mapping[str, Mapping[int, float]]) -> str:
    if name not in losses:
        return ""
    (loss,) = losses[name].values()
    closed = gap(name, losses)
    return f"{abs(loss):.4g}{f' ({closed})' if closed else ''}"


def _share(tasks: Sequence[Task], name: str, records: Records) -> str:
    if name == ALONE:
        return "0"
    task = next((task for task in tasks if first_recorded(task, [name], records)), None)
    found = None if task is None else task.results(task.line(name), records)
    return f"{next(iter(found[1].values())).share:.2%}" if found else ""


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
        return png(whole)


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
