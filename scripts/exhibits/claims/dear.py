"""Figures that the claims of the DeAR paper are judged by."""

from __future__ import annotations

from collections.abc import Sequence

from scripts.benchmarks import schedules as bench_schedules
from scripts.exhibits.base import Results
from scripts.exhibits.claims.base import Figure
from scripts.exhibits.claims.evidence import cells, fastest, ratio, tables, turns
from scripts.exhibits.kinds.lab import Measured
from scripts.exhibits.kinds.predictions import Computed
from scripts.exhibits.kinds.schedules import OTHERS as RIVALS

__all__ = ["communication", "in_the_lab", "overlap", "searched", "speed"]

BUCKETS, HALVES, TUNED = "DDP-like 25 MB", "DeAR 25 MB", "DeAR tuned"
OTHERS = ("random", "grid")
HERE = "dear"  # prefix of the lab's rows of DeAR


def speed(exhibit: Computed, scale: str, results: Results, network: str) -> Sequence[Figure]:
    """By model: seconds of the fastest other schedule, which is named, over those of DeAR with the best bucket size."""
    made = tables(exhibit, scale, results)
    *rivals, ours = (
        {
            key: each._replace(name=column)
            for key, each in cells(made, column, bool, lambda title: network in title).items()
        }
        for column in (*RIVALS, TUNED)
    )
    return [_over(model, [rival[title, model] for rival in rivals], figure) for (title, model), figure in ours.items()]


def _over(name: str, rivals: Sequence[Figure], ours: Figure) -> Figure:
    """Seconds of the fastest rival over ours; the remark gives the ratio to the first rival if that is another one."""
    rival, (first, *_) = fastest(rivals), rivals
    remark = "" if first is rival else f"{ratio('', first, ours).mean:.4g}x against {first.name}"
    return ratio(f"{name}, against {rival.name}", rival, ours)._replace(remark=remark)


def overlap(exhibit: Computed, scale: str, results: Results) -> Sequence[Figure]:
    """Seconds with buckets over those of DeAR with the same buckets, against the largest gain of overlap alone."""
    made = tables(exhibit, scale, results)
    buckets, halves = (cells(made, column, bool) for column in (BUCKETS, HALVES))
    measured = dict(exhibit.job(scale).arguments).get("measured", ())
    profiles = bench_schedules.assumed_gpu([model for _, model in halves], measured).profiles
    found = []
    for (title, model), ours in halves.items():
        limit = 1 + profiles[model].forward / (2 * profiles[model].backward)
        found.append(ratio(f"{model}, {title.rpartition(', ')[2]}", buckets[title, model], ours, limit))
    return found


def communication(exhibit: Computed, scale: str, results: Results) -> Sequence[Figure]:
    """Communication seconds of DeAR against those of all-reduces of the same buckets."""
    found = cells(tables(exhibit, scale, results), "communication", bool)
    return [
        figure._replace(
            name=f"{row.partition(',')[0]}, {title.rpartition(', ')[2]}",
            against=found[title, row.replace(HALVES, BUCKETS)].values,
        )
        for (title, row), figure in found.items()
        if row.endswith(HALVES)
    ]


def in_the_lab(exhibit: Measured, scale: str, results: Results) -> Sequence[Figure]:
    """Measured seconds of a step of the fastest other schedule over those of DeAR's fastest, turn by turn."""
    found = [
        figure._replace(name=name.removeprefix("none, "))
        for name, figure in turns(tables(exhibit, scale, results)).items()
    ]
    ours = fastest(figure for figure in found if figure.name.startswith(HERE))
    return [_over(f"4 workers: {ours.name}", [each for each in found if not each.name.startswith(HERE)], ours)]


def searched(exhibit: Computed, scale: str, results: Results) -> Sequence[Figure]:
    """Share of the best speed after 20 trials, against the better of random and grid search."""
    found = {row: figure for (_, row), figure in cells(tables(exhibit, scale, results), "20 trials", bool).items()}
    pairs = ((row.removesuffix("Bayesian"), figure) for row, figure in found.items() if row.endswith("Bayesian"))
    return [
        figure._replace(name=start.removesuffix(", "), against=(max(found[start + name].mean for name in OTHERS),))
        for start, figure in pairs
    ]
