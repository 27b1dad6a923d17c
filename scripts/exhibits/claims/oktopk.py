"""Figures that the claims of the Ok-Topk paper are judged by."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from scripts.exhibits.base import Results, at
from scripts.exhibits.claims.base import Figure, show
from scripts.exhibits.claims.evidence import cells, ratio, required, tables, watched_hindrances
from scripts.exhibits.jobs import Computation, Job
from scripts.exhibits.kinds.balance import Balance
from scripts.exhibits.kinds.counts import CountedCosts, amortized
from scripts.exhibits.kinds.thresholds import Thresholds
from scripts.exhibits.kinds.updates import UpdateBreakdown

__all__ = ["deviation", "efficiency", "gains", "speedups", "volume"]

OURS, DENSE, ESTIMATED = "Ok-Topk", "dense", "Gaussian-k"


def volume(exhibit: CountedCosts, scale: str, results: Results) -> Sequence[Figure]:
    """Words in units of k for every number of workers: in most steps, and on average over a whole cycle of steps.

    The average includes the steps that evaluate thresholds; the remark says how much these send on their own.
    """
    found = []
    for workers, job, kinds in _kinds(exhibit, scale, results):
        most, first = max(kinds, key=lambda kind: kind["share"]), kinds[0]
        evaluating = f"steps that evaluate thresholds: {show(max(first['words']) / first['k'], 'k')}"
        found += [
            Figure(f"P = {workers}", (max(most["words"]) / most["k"],), (), (job,)),
            Figure(f"P = {workers}, mean of a cycle", (amortized(kinds),), (), (job,), evaluating),
        ]
    return found


def _kinds(
    exhibit: CountedCosts, scale: str, results: Results
) -> Iterator[tuple[int, Job, Sequence[Mapping[str, Any]]]]:
    """Counts of each kind of step, by number of workers."""
    for workers in at(scale, exhibit.workers):
        job = exhibit.job(OURS, workers)
        (data,) = required(results, [job])
        yield workers, job, data["kinds"]


def speedups(exhibit: UpdateBreakdown, scale: str, results: Results, model: str, workers: int) -> Sequence[Figure]:
    """Seconds of an update of each other method over those of Ok-Topk, for one model and one number of workers."""
    found = _updates(model, f", P = {workers}", exhibit, scale, results)
    ours = found.pop(OURS)
    return [ratio(f"over {method}", theirs, ours) for method, theirs in found.items()]


def efficiency(exhibit: UpdateBreakdown, scale: str, results: Results, model: str, few: int, many: int) -> list[Figure]:
    """Seconds of an update with few workers over those with many; the remark gives the same ratio for dense."""
    small, large = (_updates(model, f", P = {workers}", exhibit, scale, results) for workers in (few, many))
    kept = {method: ratio(f"{method}, P = {few} to {many}", small[method], large[method]) for method in small}
    return [kept[OURS]._replace(remark=f"dense keeps {show(kept[DENSE].mean, '%')}")]


def _updates(model: str, ending: str, exhibit: UpdateBreakdown, scale: str, results: Results) -> dict[str, Figure]:
    """Seconds of an update by method."""
    made = tables(exhibit, scale, results)
    found = cells(made, "update", lambda row: row.endswith(ending), lambda title: model in title)
    return {row.removesuffix(ending): figure for (_, row), figure in found.items()}


def deviation(exhibit: Thresholds, scale: str, results: Results, method: str, ahead: str) -> Sequence[Figure]:
    """Mean deviation from the wanted number of entries and sums, against that of the estimated threshold.

    Each model is a task. The remark gives the deviation of the variant that evaluates thresholds ahead of time.
    """
    found = cells(tables(exhibit, scale, results), "mean deviation, second half", bool)
    rival = {title: figure for (title, row), figure in found.items() if row == f"{ESTIMATED}, own"}
    return [
        _long_enough(figure)._replace(
            task=title.rpartition(": ")[2],
            against=rival[title].values,
            remark=f"evaluated ahead of time: {show(found[title, row.replace(method, ahead)].mean, '%')}",
        )
        for (title, row), figure in found.items()
        if row in (f"{method}, own", f"{method}, sums")
    ]


def _long_enough(figure: Figure) -> Figure:
    """A figure of traced trainings, which says so if they are too short to be judged."""
    watched = [dict(job.arguments) for job in figure.jobs if isinstance(job, Computation)]
    found = {reason for each in watched for reason in watched_hindrances(each["words"], each["steps"])}
    return figure._replace(hindrances=sorted(found))


def gains(exhibit: Balance, scale: str, results: Results, kind: str) -> Sequence[Figure]:
    """Gain of balancing in every case, in one of the two comparisons."""
    made = tables(exhibit, scale, results)
    found = cells(made, "gain with latency", bool, lambda title: title.endswith(kind))
    return [_long_enough(figure) for figure in found.values()]
