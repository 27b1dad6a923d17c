"""What DeAR's paper claims."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from scripts import bench_schedules
from scripts.exhibits.base import Results
from scripts.exhibits.claims.base import Figure
from scripts.exhibits.claims.bounds import AtLeast, Equal, UpTo, Within
from scripts.exhibits.claims.evidence import cells, ratio, tables, turns
from scripts.exhibits.claims.judging import ASSUMED_GPU, FORMULAS, LAB, MODELLED, Claim, Known, Published
from scripts.exhibits.kinds.lab import Measured
from scripts.exhibits.kinds.predictions import Computed

__all__ = ["CLAIMS"]

ETHERNET, INFINIBAND = "ethernet_10g", "infiniband_100g"
BUCKETS, HALVES = "DDP-like 25 MB", "DeAR 25 MB"


def speed(network: str, exhibit: Computed, scale: str, results: Results) -> Sequence[Figure]:
    """By model: seconds of the fastest other schedule over DeAR's with the best size of groups."""
    made = tables(exhibit, scale, results)
    return list(cells(made, "best other / tuned", bool, lambda title: network in title).values())


def overlap(exhibit: Computed, scale: str, results: Results) -> Sequence[Figure]:
    """Seconds with buckets over those of DeAR with the same buckets, against what overlap alone can gain."""
    made = tables(exhibit, scale, results)
    buckets, halves = (cells(made, column, bool) for column in (BUCKETS, HALVES))
    profiles = bench_schedules.assumed_gpu([model for _, model in halves]).profiles
    found = []
    for (title, model), ours in halves.items():
        limit = 1 + profiles[model].forward / (2 * profiles[model].backward)
        found.append(ratio(f"{model}, {title.rpartition(', ')[2]}", buckets[title, model], ours, limit))
    return found


def communication(exhibit: Computed, scale: str, results: Results) -> Sequence[Figure]:
    """Seconds of messages of DeAR against those of all-reduces of the same buckets."""
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
    """Measured seconds of a step of the fastest other schedule over DeAR's, turn by turn."""
    found = turns(tables(exhibit, scale, results))
    rivals = [found["none, after_backward"], found["none, wfbp"]]
    fastest = min(rivals, key=lambda figure: figure.mean)
    return [ratio(f"against {fastest.name}, 4 workers", fastest, found["none, dear"])]


def searched(exhibit: Computed, scale: str, results: Results) -> Sequence[Figure]:
    """The share of the best speed after 20 trials, against the better of random and grid search."""
    found = {row: figure for (_, row), figure in cells(tables(exhibit, scale, results), "20 trials", bool).items()}
    pairs = ((row.removesuffix("Bayesian"), figure) for row, figure in found.items() if row.endswith("Bayesian"))
    return [
        figure._replace(name=start.removesuffix(", "), against=(max(found[start + name].mean for name in OTHERS),))
        for start, figure in pairs
    ]


OTHERS = ("random", "grid")
BEST_OTHER = "seconds of an iteration of the fastest other schedule over DeAR's with the best size of groups"
GPU = (ASSUMED_GPU, MODELLED)
ON_ETHERNET = Published("up to 83%", Known.ABSTRACT, "which model and baseline is not stated there")
CLAIMS = (
    Claim(
        "DeAR: speed on 10 GbE",
        "On 64 GPUs with 10 Gbit/s Ethernet, DeAR is up to 83% faster than the state of the art.",
        ON_ETHERNET,
        "dear.speed",
        partial(speed, ETHERNET),
        UpTo(1.83),
        BEST_OTHER,
        GPU,
    ),
    Claim(
        "DeAR: speed on 100 Gbit/s InfiniBand",
        "On 64 GPUs with 100 Gbit/s InfiniBand, DeAR is up to 15% faster than the state of the art.",
        Published("up to 15%", Known.ABSTRACT, "which model and baseline is not stated there"),
        "dear.speed",
        partial(speed, INFINIBAND),
        UpTo(1.15),
        BEST_OTHER,
        GPU,
    ),
    Claim(
        "DeAR: speed on a real network",
        "The first claim once more, as measured steps of four workers.",
        ON_ETHERNET,
        "dear.lab",
        in_the_lab,
        UpTo(1.83),
        "seconds of a step of the fastest other schedule over DeAR's",
        (LAB,),
    ),
    Claim(
        "DeAR: no extra communication",
        "Splitting all-reduces into two halves sends nothing more.",
        Published("none", Known.ABSTRACT),
        "dear.breakdown",
        communication,
        Equal(" s"),
        "seconds of messages against those of whole all-reduces of the same buckets",
        (FORMULAS,),
    ),
    Claim(
        "DeAR: what overlap alone can gain",
        "Overlap with the forward pass alone gains at most 1 + t_ff / (2 t_bp): a quarter if t_bp = 2 t_ff.",
        Published("at most 1.25x at t_bp = 2 t_ff", Known.DERIVED, "by us; so 83% must have other causes, too"),
        "dear.speed",
        overlap,
        Within("x"),
        "seconds with 25 MB buckets over those of DeAR with the same buckets; the limit is that of the model's passes",
        GPU,
    ),
    Claim(
        "DeAR: tuning",
        "Bayesian optimization finds a size of groups with at least 95% of the best speed in 10 to 20 trials.",
        Published("at least 95%", Known.LOW),
        "dear.tuning",
        searched,
        AtLeast(0.95, "%", 1.0),
        "speed of the size found in 20 trials over the best speed; the rival is the better of random and grid search",
        (ASSUMED_GPU, MODELLED),
    ),
)
