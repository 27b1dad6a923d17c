"""Gap to dense training that methods close, and tables of several tasks: costs by length, and SGD's ablation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import mean

from scripts.evidence.plans import ALONE, DENSE, Overview, Task, first_recorded
from scripts.exhibits.measures import LEAST, seeds
from scripts.exhibits.records import Records
from scripts.exhibits.tables import Cell, Row, Table

__all__ = ["WORSE", "ablation", "costs", "gap", "losses_of"]

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
