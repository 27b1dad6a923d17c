"""Share of the gain of dense training over a single worker that a method keeps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import mean

from scripts.evidence.plans import ALONE, DENSE, Task
from scripts.exhibits.records import Records

__all__ = ["WORSE", "gap", "losses_of", "shared"]

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
