"""Tables of learning: each method compared with a single worker (lower limit) and dense training (upper limit)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import mean

from scripts.evidence.plans import ALONE, DENSE, Line, Task
from scripts.exhibits.measures import spread
from scripts.exhibits.records import Record, Records
from scripts.exhibits.tables import Cell, Row, Table

__all__ = ["summary_of", "table_of"]

_COLUMNS = ("lr", "of each seed", "gap closed", "sent / dense", "waits")


def summary_of(tasks: Sequence[Task], records: Records) -> Table:
    """Returns the learning cost of each density and optimizer, with and without local updates.

    Args:
        tasks: Tasks that contain comparisons.
        records: Records of all trainings.
    """
    columns = ("training", "sent", DENSE, "without", "with `optimizer=`", "single worker")
    return Table("What compression costs", columns, [row for task in tasks for row in _compared(task, records)])


def _compared(task: Task, records: Records) -> Iterator[Row]:
    for each in task.compared:
        names = (DENSE, each.without, each.moved, ALONE)
        yield Row(task.title, [Cell(each.density), *(_mean(task, name, records) for name in names)], ())


def _mean(task: Task, name: str | None, records: Records) -> Cell:
    """Returns the metric of a row over its seeds."""
    if name is None:
        return Cell("")
    found = task.results(task.line(name), records)
    return Cell(spread([each.final(task.metric) for each in found[1].values()]) if found else "not run yet")


def table_of(task: Task, records: Records, shown: Sequence[str] | None = None) -> Table:
    """Returns the table of a task with the recorded results.

    Args:
        task: Task of the table.
        records: Records of all trainings.
        shown: Names of the rows in order (default: all rows).
    """
    lines = task.lines if shown is None else [task.line(name) for name in shown]
    found = {line.name: task.results(line, records) for line in task.lines}
    losses = {name: {seed: task.loss(each) for seed, each in pair[1].items()} for name, pair in found.items() if pair}
    rows = [Row(line.name, _cells(task, line, found[line.name], losses), ()) for line in lines]
    return Table(task.title, ("", _COLUMNS[0], task.metric, *_COLUMNS[1:]), rows)


def _cells(
    task: Task, line: Line, found: tuple[float, dict[int, Record]] | None, losses: Mapping[str, Mapping[int, float]]
) -> list[Cell]:
    if found is None:
        return [Cell("not run yet"), *[Cell("")] * len(_COLUMNS)]
    rate, records = found
    values = [each.final(task.metric) for each in records.values()]
    ages = [each.figures["residual_age"] for each in records.values() if each.figures.get("residual_age")]
    return [
        Cell(f"{rate:g}"),
        Cell(spread(values)),
        Cell(", ".join(f"{value:.4g}" for value in values)),
        Cell(_gap(line.name, losses)),
        Cell("0" if line.name == ALONE else f"{mean(each.share for each in records.values()):.2%}"),
        Cell(f"{mean(ages):.0f} steps" if ages else ""),
    ]


def _gap(name: str, losses: Mapping[str, Mapping[int, float]]) -> str:
    """Share of the gain of dense training over a single worker that a row reaches, on the seeds that all three have."""
    if name in (ALONE, DENSE) or not {DENSE, ALONE} <= losses.keys():
        return ""
    seeds = set.intersection(*(set(losses[each]) for each in (name, DENSE, ALONE)))
    if not seeds:
        return ""
    own, dense, alone = (mean(losses[each][seed] for seed in seeds) for each in (name, DENSE, ALONE))
    if own > alone:
        return "**worse than a single worker**"
    gain = alone - dense
    return f"{(alone - own) / gain:.0%}" if gain > 0 and math.isfinite(gain) else ""
