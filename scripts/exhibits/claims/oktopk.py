"""Claims of the Ok-Topk paper."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from scripts.exhibits.base import Results, at
from scripts.exhibits.claims.base import Figure, show
from scripts.exhibits.claims.bounds import AtMost, Between, Keeps
from scripts.exhibits.claims.evidence import cells, metrics, ratio, required, tables
from scripts.exhibits.claims.judging import ASSUMED_GPU, MODELLED, STAND_INS, Claim, Known, Published
from scripts.exhibits.claims.lengths import watched_hindrances
from scripts.exhibits.claims.seeds import NoLoss
from scripts.exhibits.jobs import Computation, Job
from scripts.exhibits.kinds.balance import KINDS, Balance
from scripts.exhibits.kinds.counts import CountedCosts, amortized
from scripts.exhibits.kinds.thresholds import Thresholds
from scripts.exhibits.kinds.trainings import MethodComparison
from scripts.exhibits.kinds.updates import UpdateBreakdown

__all__ = ["CLAIMS"]

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


def speedups(model: str, workers: int, exhibit: UpdateBreakdown, scale: str, results: Results) -> Sequence[Figure]:
    """Seconds of an update of each other method over those of Ok-Topk, for one model and one number of workers."""
    found = _updates(model, f", P = {workers}", exhibit, scale, results)
    ours = found.pop(OURS)
    return [ratio(f"over {method}", theirs, ours) for method, theirs in found.items()]


def efficiency(model: str, few: int, many: int, exhibit: UpdateBreakdown, scale: str, results: Results) -> list[Figure]:
    """Seconds of an update with few workers over those with many; the remark gives the same ratio for dense."""
    small, large = (_updates(model, f", P = {workers}", exhibit, scale, results) for workers in (few, many))
    kept = {method: ratio(f"{method}, P = {few} to {many}", small[method], large[method]) for method in small}
    return [kept[OURS]._replace(remark=f"dense keeps {show(kept[DENSE].mean, '%')}")]


def _updates(model: str, ending: str, exhibit: UpdateBreakdown, scale: str, results: Results) -> dict[str, Figure]:
    """Seconds of an update by method."""
    made = tables(exhibit, scale, results)
    found = cells(made, "update", lambda row: row.endswith(ending), lambda title: model in title)
    return {row.removesuffix(ending): figure for (_, row), figure in found.items()}


def deviation(method: str, ahead: str, exhibit: Thresholds, scale: str, results: Results) -> Sequence[Figure]:
    """Mean deviation from the wanted number of entries and sums, against that of the estimated threshold.

    The remark gives the deviation of the variant that evaluates thresholds ahead of time.
    """
    found = cells(tables(exhibit, scale, results), "mean deviation, second half", bool)
    rival = {title: figure for (title, row), figure in found.items() if row == f"{ESTIMATED}, own"}
    return [
        _long_enough(figure)._replace(
            name=f"{title.rpartition(': ')[2]}, {row}",
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


def gains(kind: str, exhibit: Balance, scale: str, results: Results) -> Sequence[Figure]:
    """Gain of balancing in every case, in one of the two comparisons."""
    made = tables(exhibit, scale, results)
    found = cells(made, "gain with latency", bool, lambda title: title.endswith(kind))
    return [_long_enough(figure) for figure in found.values()]


def against_dense(exhibit: MethodComparison, scale: str, results: Results) -> Sequence[Figure]:
    """Metric against dense training in every case."""
    return metrics(exhibit, scale, results, OURS, DENSE)


OVER_EACH = "seconds of an update of each other method over Ok-Topk's"
GPU = (ASSUMED_GPU, MODELLED)
CODE = (
    "published seconds include the cost of the published code (as released, other methods go through host memory), "
    "ours do not"
)
CLAIMS = (
    Claim(
        "Ok-Topk: volume",
        "Ok-Topk's sparse all-reduce sends less than 6k words, whatever the number of workers.",
        Published(
            "less than 6k",
            Known.ABSTRACT,
            "whether it includes the steps, one in 32 to 128, that evaluate thresholds is not known; the code gathers "
            "all sums in them",
            "Table 1",
        ),
        "oktopk.volume",
        volume,
        AtMost(6, "k"),
        "counted words per worker (mean) in units of k: in steps that reuse thresholds, and on average over a cycle, "
        "which includes steps that evaluate them",
    ),
    Claim(
        "Ok-Topk: speed, VGG-16 on 32",
        "Training of VGG-16 on 32 GPUs is 1.51x to 8.83x faster than with other methods.",
        Published("1.51x to 8.83x", Known.MEDIUM),
        "oktopk.scaling",
        partial(speedups, "VGG-16", 32),
        Between(1.51, 8.83),
        OVER_EACH,
        GPU,
        remark=CODE,
    ),
    Claim(
        "Ok-Topk: speed, LSTM on 64",
        "Training of an LSTM on 64 GPUs is 1.34x to 7.71x faster than with other methods.",
        Published("1.34x to 7.71x", Known.MEDIUM),
        "oktopk.scaling",
        partial(speedups, "LSTM", 64),
        Between(1.34, 7.71),
        OVER_EACH,
        GPU,
        remark=CODE,
    ),
    Claim(
        "Ok-Topk: speed, BERT on 256",
        "Training of BERT on 256 GPUs is 3.29x to 12.95x faster than with other methods.",
        Published("3.29x to 12.95x", Known.ABSTRACT, "baselines went through host memory, in the official code"),
        "oktopk.scaling",
        partial(speedups, "BERT", 256),
        Between(3.29, 12.95),
        OVER_EACH,
        GPU,
        remark=CODE,
    ),
    Claim(
        "Ok-Topk: weak scaling",
        "Training of BERT keeps 76.3% of its efficiency from 32 to 256 GPUs.",
        Published("76.3%", Known.MEDIUM),
        "oktopk.scaling",
        partial(efficiency, "BERT", 32, 256),
        Keeps(0.763),
        "seconds of an update with 32 workers over those with 256",
        GPU,
    ),
    Claim(
        "Ok-Topk: thresholds",
        "Reused thresholds select nearly as many entries as wanted.",
        Published("off by less than 11%", Known.MEDIUM),
        "oktopk.thresholds",
        partial(deviation, f"{OURS}, as published", OURS),
        AtMost(0.11, "%"),
        "mean deviation from the wanted number in the second half of a training; the rival is a Gaussian's threshold; "
        "our variant re-evaluates thresholds ahead of time when they drift",
        (STAND_INS,),
    ),
    Claim(
        "Ok-Topk: balanced regions",
        "Regions of equal load make the reduction faster.",
        Published("1.13x to 1.75x", Known.MEDIUM),
        "oktopk.balance",
        partial(gains, KINDS[0].title),
        Between(1.13, 1.75),
        "seconds with equal regions over those with balanced ones, for all cases",
        (MODELLED, STAND_INS),
    ),
    Claim(
        "Ok-Topk: balanced all-gather",
        "Blocks of equal size make the all-gather faster.",
        Published("1.12x to 1.43x", Known.MEDIUM),
        "oktopk.balance",
        partial(gains, KINDS[1].title),
        Between(1.12, 1.43),
        "seconds without levelling over those with it, for all cases",
        (MODELLED, STAND_INS),
    ),
    Claim(
        "Ok-Topk: accuracy",
        "Training with Ok-Topk reaches the metric of training with dense gradients.",
        Published("the same", Known.ABSTRACT, "figures unknown"),
        "oktopk.convergence",
        against_dense,
        NoLoss(),
        "difference from the metric of dense training",
        (STAND_INS,),
    ),
)
