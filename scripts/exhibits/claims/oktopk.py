"""What Ok-Topk's paper claims."""

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
    """Words in units of k, at every number of workers: in most steps, and on average over a cycle of all kinds."""
    found = []
    for workers, job, kinds in _kinds(exhibit, scale, results):
        most = max(kinds, key=lambda kind: kind["share"])
        found += [
            Figure(f"P = {workers}", (max(most["words"]) / most["k"],), (), (job,)),
            Figure(f"P = {workers}, mean of a cycle", (amortized(kinds),), (), (job,)),
        ]
    return found


def evaluating(exhibit: CountedCosts, scale: str, results: Results) -> Sequence[Figure]:
    """The same of the first step, which evaluates thresholds."""
    return [
        Figure(f"P = {workers}", (max(kinds[0]["words"]) / kinds[0]["k"],), (), (job,))
        for workers, job, kinds in _kinds(exhibit, scale, results)
    ]


def _kinds(
    exhibit: CountedCosts, scale: str, results: Results
) -> Iterator[tuple[int, Job, Sequence[Mapping[str, Any]]]]:
    """By number of workers: what was counted of each kind of steps."""
    for workers in at(scale, exhibit.workers):
        job = exhibit.job(OURS, workers)
        (data,) = required(results, [job])
        yield workers, job, data["kinds"]


def speedups(model: str, workers: int, exhibit: UpdateBreakdown, scale: str, results: Results) -> Sequence[Figure]:
    """Seconds of an update of each other method over Ok-Topk's, for one model at one number of workers."""
    found = _updates(model, f", P = {workers}", exhibit, scale, results)
    ours = found.pop(OURS)
    return [ratio(f"over {method}", theirs, ours) for method, theirs in found.items()]


def efficiency(model: str, few: int, many: int, exhibit: UpdateBreakdown, scale: str, results: Results) -> list[Figure]:
    """Seconds of an update of few workers over those of many; it remarks on dense gradients, of the same table."""
    small, large = (_updates(model, f", P = {workers}", exhibit, scale, results) for workers in (few, many))
    kept = {method: ratio(f"{method}, P = {few} to {many}", small[method], large[method]) for method in small}
    return [kept[OURS]._replace(remark=f"dense keeps {show(kept[DENSE].mean, '%')}")]


def _updates(model: str, ending: str, exhibit: UpdateBreakdown, scale: str, results: Results) -> dict[str, Figure]:
    """By method."""
    made = tables(exhibit, scale, results)
    found = cells(made, "update", lambda row: row.endswith(ending), lambda title: model in title)
    return {row.removesuffix(ending): figure for (_, row), figure in found.items()}


def deviation(method: str, exhibit: Thresholds, scale: str, results: Results) -> Sequence[Figure]:
    """Mean distances from what was wanted, of entries and sums, against those of the estimated threshold."""
    found = cells(tables(exhibit, scale, results), "mean deviation, second half", bool)
    rival = {title: figure for (title, row), figure in found.items() if row == f"{ESTIMATED}, own"}
    return [
        _long_enough(figure)._replace(name=f"{title.rpartition(': ')[2]}, {row}", against=rival[title].values)
        for (title, row), figure in found.items()
        if row in (f"{method}, own", f"{method}, sums")
    ]


def _long_enough(figure: Figure) -> Figure:
    """A figure of trainings that were watched; where they are too short to tell anything, it says so."""
    watched = [dict(job.arguments) for job in figure.jobs if isinstance(job, Computation)]
    found = {reason for each in watched for reason in watched_hindrances(each["words"], each["steps"])}
    return figure._replace(hindrances=sorted(found))


def gains(kind: str, exhibit: Balance, scale: str, results: Results) -> Sequence[Figure]:
    """What balancing gains in every case, in one of the two comparisons."""
    made = tables(exhibit, scale, results)
    found = cells(made, "gain with latency", bool, lambda title: title.endswith(kind))
    return [_long_enough(figure) for figure in found.values()]


def against_dense(exhibit: MethodComparison, scale: str, results: Results) -> Sequence[Figure]:
    """The metric in every case."""
    return metrics(exhibit, scale, results, OURS, DENSE)


OVER_EACH = "seconds of an update of each other method over Ok-Topk's"
OFF = Published("off by less than 11%", Known.MEDIUM)
DISTANCE = "mean distance from what was wanted in the second half of a training; the rival is a Gaussian's threshold"
GPU = (ASSUMED_GPU, MODELLED)
CODE = (
    "published seconds include what the published code costs (as released, other methods go through the host's "
    "memory), and ours do not"
)
CLAIMS = (
    Claim(
        "Ok-Topk: volume",
        "Ok-Topk's sparse all-reduce sends less than 6k words, whatever the number of workers.",
        Published("less than 6k", Known.ABSTRACT),
        "oktopk.volume",
        volume,
        AtMost(6, "k"),
        "counted words, a worker's mean, in units of k, where thresholds are used again, and over a cycle",
    ),
    Claim(
        "Ok-Topk: volume where thresholds are evaluated",
        "The same of the steps, one in 32 to 128, in which thresholds are evaluated anew.",
        Published("less than 6k", Known.ABSTRACT, "which steps are meant is not known; the code gathers all sums then"),
        "oktopk.volume",
        evaluating,
        AtMost(6, "k"),
        "counted words, a worker's mean, in units of k, in steps that evaluate thresholds",
    ),
    Claim(
        "Ok-Topk: speed, VGG-16 on 32",
        "Training of VGG-16 on 32 GPUs is 1.51 to 8.83 times as fast as with other methods.",
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
        "Training of an LSTM on 64 GPUs is 1.34 to 7.71 times as fast as with other methods.",
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
        "Training of BERT on 256 GPUs is 3.29 to 12.95 times as fast as with other methods.",
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
        "From 32 to 256 GPUs, training of BERT keeps 76.3% of its efficiency.",
        Published("76.3%", Known.MEDIUM),
        "oktopk.scaling",
        partial(efficiency, "BERT", 32, 256),
        Keeps(0.763),
        "seconds of an update of 32 workers over those of 256",
        GPU,
    ),
    Claim(
        "Ok-Topk: thresholds",
        "Thresholds that are used again select nearly as many entries as wanted.",
        OFF,
        "oktopk.thresholds",
        partial(deviation, f"{OURS}, as published"),
        AtMost(0.11, "%"),
        DISTANCE,
        (STAND_INS,),
    ),
    Claim(
        "Ok-Topk: thresholds evaluated ahead of time",
        "The same of our Ok-Topk, which evaluates thresholds that go astray before their period is over.",
        OFF,
        "oktopk.thresholds",
        partial(deviation, OURS),
        AtMost(0.11, "%"),
        DISTANCE,
        (STAND_INS,),
    ),
    Claim(
        "Ok-Topk: balanced regions",
        "Regions of equal load make adding up faster.",
        Published("1.13x to 1.75x", Known.MEDIUM),
        "oktopk.balance",
        partial(gains, KINDS[0].title),
        Between(1.13, 1.75),
        "seconds with equal regions over those with balanced ones, over all cases",
        (MODELLED, STAND_INS),
    ),
    Claim(
        "Ok-Topk: balanced all-gather",
        "Blocks of equal size make gathering faster.",
        Published("1.12x to 1.43x", Known.MEDIUM),
        "oktopk.balance",
        partial(gains, KINDS[1].title),
        Between(1.12, 1.43),
        "seconds without levelling over those with it, over all cases",
        (MODELLED, STAND_INS),
    ),
    Claim(
        "Ok-Topk: accuracy",
        "Training with Ok-Topk reaches what training with dense gradients reaches.",
        Published("the same", Known.ABSTRACT, "figures unknown"),
        "oktopk.convergence",
        against_dense,
        NoLoss(),
        "difference of the metric from dense training",
        (STAND_INS,),
    ),
)
