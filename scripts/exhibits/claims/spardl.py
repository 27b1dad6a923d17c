"""Claims of the SparDL paper."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType

from scripts.exhibits.base import Results, at
from scripts.exhibits.claims.base import Figure
from scripts.exhibits.claims.bounds import AtLeast, Equal, UpTo
from scripts.exhibits.claims.evidence import (
    accuracies,
    best_elsewhere,
    cells,
    fastest,
    metrics,
    metrics_so_far,
    ratio,
    required,
    tables,
    timed,
    turns,
)
from scripts.exhibits.claims.judging import ASSUMED_GPU, LAB, MODELLED, STAND_INS, Claim, Known, Published
from scripts.exhibits.claims.lengths import planned_long_enough
from scripts.exhibits.claims.seeds import InnerBest, NoLoss, Order
from scripts.exhibits.kinds.counts import CountedCosts
from scripts.exhibits.kinds.lab import Measured
from scripts.exhibits.kinds.trainings import MethodComparison
from scripts.exhibits.kinds.updates import UpdateBreakdown

__all__ = ["CLAIMS"]

OURS, DENSE, RIVAL = "SparDL", "dense", "Ok-Topk"
# Part of a case's title; cases that differ in it only are one task.
RATE = re.compile(r", learning rate [\d.]+")
# Names of the methods by their choice of compressor=, which names the rows of the lab.
SPARSE = MappingProxyType(
    {"SparDL": "spardl", "Ok-Topk": "oktopk", "TopkDSA": "topkdsa", "TopkA": "topka", "gTopk": "gtopk"}
)


def communication(exhibit: UpdateBreakdown, scale: str, results: Results) -> Sequence[Figure]:
    """By case: communication seconds of the fastest other sparse method over those of SparDL."""
    return _over(exhibit, scale, results, "communication")


def updates(exhibit: UpdateBreakdown, scale: str, results: Results) -> Sequence[Figure]:
    """By case: seconds of an update of the fastest other sparse method over those of SparDL."""
    return _over(exhibit, scale, results, "update")


def _over(exhibit: UpdateBreakdown, scale: str, results: Results, column: str) -> Sequence[Figure]:
    """By case: seconds of the fastest rival over those of SparDL with its best number of teams."""
    found: defaultdict[str, list[Figure]] = defaultdict(list)
    for (title, _), figure in cells(tables(exhibit, scale, results), column, bool).items():
        found[title].append(figure)
    return [best_against(title.partition(", ")[0].rpartition(": ")[2], rows) for title, rows in found.items()]


def best_against(case: str, rows: Sequence[Figure]) -> Figure:
    """Seconds of the fastest other sparse method over those of SparDL.

    Args:
        case: First part of the name.
        rows: Seconds of SparDL, dense gradients, Ok-Topk and others, named after the methods.

    Returns:
        The ratio; its remark gives the ratios to Ok-Topk, the rival that the paper is said to use, and to dense.
    """
    ours = fastest(row for row in rows if _own(row.name))
    rival = fastest(row for row in rows if not _own(row.name) and row.name != DENSE)
    named = [ratio(row.name, row, ours) for row in rows if row.name in {RIVAL, DENSE} - {rival.name}]
    remark = ", ".join(f"{each.mean:.4g}x over {each.name}" for each in named)
    return ratio(f"{case}: {ours.name} against {rival.name}", rival, ours)._replace(remark=remark)


def _own(row: str) -> bool:
    return row.startswith(OURS)


def any_number(exhibit: CountedCosts, scale: str, results: Results) -> Sequence[Figure]:
    """Rounds, and words in units of k, for every number of workers, against the formulas without teams."""
    found = []
    for workers in at(scale, exhibit.workers):
        job = exhibit.job(OURS, workers)
        (data,) = required(results, [job])
        expected = {"rounds": 2.0 * math.ceil(math.log2(workers)), "words": 4 * (workers - 1) / workers}
        for kind in data["kinds"]:
            units = {"rounds": 1.0, "words": kind["k"]}
            found += [
                Figure(f"{name} at P = {workers}", (max(kind[name]) / units[name],), (formula,), (job,))
                for name, formula in expected.items()
            ]
    return found


def teams_rounds(exhibit: CountedCosts, scale: str, results: Results) -> Sequence[Figure]:
    """Rounds with d teams against 2 ceil(log2(P / d)) + ceil(log2 d)."""
    found = []
    for job in exhibit.jobs(scale):
        settings = dict(job.arguments)
        words = dict(word.split("=") for word in settings["overrides"])
        if settings["name"] != "spardl" or "communicator.teams" not in words:
            continue
        (data,) = required(results, [job])
        workers, teams = settings["workers"], int(words["communicator.teams"])
        formula = 2 * math.ceil(math.log2(workers / teams)) + math.ceil(math.log2(teams))
        name = f"{words['communicator.gather']}, P = {workers}, d = {teams}"
        found += [Figure(name, (float(max(kind["rounds"])),), (float(formula),), (job,)) for kind in data["kinds"]]
    return found


def residuals(exhibit: MethodComparison, scale: str, results: Results) -> Sequence[Figure]:
    """Metric of each rule by task, in the order of the exhibit, at the learning rate that is best for the other seeds.

    Cases that are too short by plan are left out if others are long enough, and so are rates that cannot be judged.
    """
    rules = [method for method in exhibit.methods if method not in exhibit.dense_names]
    tasks: defaultdict[str, list[dict[str, Figure]]] = defaultdict(list)
    for case, figures in accuracies(_long_enough(exhibit, scale, rules), scale, results, rules).items():
        tasks[RATE.sub("", case.title)].append(figures)
    return [
        best_elsewhere(rule, [figures[rule] for figures in _judgeable(rates)])._replace(task=task)
        for task, rates in tasks.items()
        for rule in rules
    ]


def _judgeable(rates: list[dict[str, Figure]]) -> list[dict[str, Figure]]:
    """Learning rates at which every rule can be judged; if no such rate exists, all rates."""
    clear = [figures for figures in rates if not any(figure.hindrances for figure in figures.values())]
    return clear or rates


def _long_enough(exhibit: MethodComparison, scale: str, methods: Sequence[str]) -> MethodComparison:
    """The exhibit, restricted to cases that are long enough to judge accuracy, if there are any."""
    plan = at(scale, exhibit.plans)
    cases = tuple(
        case
        for case in plan.cases
        if all(planned_long_enough(exhibit.job(plan, case, method, plan.seeds[0]).config) for method in methods)
    )
    return replace(exhibit, plans={scale: replace(plan, cases=cases or plan.cases)})


def against_dense(exhibit: MethodComparison, scale: str, results: Results) -> Sequence[Figure]:
    """Metric against dense training in every case."""
    return metrics(exhibit, scale, results, OURS, DENSE)


def on_real_data(exhibit: MethodComparison, scale: str, results: Results) -> Sequence[Figure]:
    """Metric against dense training in every case that is complete."""
    return metrics_so_far(exhibit, scale, results, OURS, DENSE)


def against_rival(exhibit: MethodComparison, scale: str, results: Results) -> Sequence[Figure]:
    """Metric against Ok-Topk in every case."""
    return metrics(exhibit, scale, results, OURS, RIVAL)


def teams_seconds(exhibit: MethodComparison, scale: str, results: Results) -> Sequence[Figure]:
    """Virtual seconds of a training, by increasing number of teams."""
    methods = [method for method in exhibit.methods if not method.startswith("R-SAG")]
    (found,) = timed(exhibit, scale, results, methods).values()
    return list(found.values())


def in_the_lab(exhibit: Measured, scale: str, results: Results) -> Sequence[Figure]:
    """Measured seconds of the fastest other sparse method over those of SparDL, turn by turn."""
    found = turns(tables(exhibit, scale, results))
    known = {**{choice: contender for contender, choice in SPARSE.items()}, "none": DENSE}
    return [best_against("4 workers", [found[row]._replace(name=name) for row, name in known.items() if row in found])]


SPEED = Published("up to 4.9x", Known.SUMMARY, "the measure is not stated there; over Ok-Topk from memory, medium")
OWN_FORMULA = "the formulas are those of our own code, and tests compare all counts with them"
DIGEST = Published("up to 1.98x", Known.SUMMARY, "by an automatic digest; the measure is not stated there")
COMPARABLE = Published("comparable", Known.SUMMARY, "figures unknown")
CODE = (
    "published seconds include the cost of the published code (as released, it sends block by block through host "
    "memory), ours do not"
)
CLAIMS = (
    Claim(
        "SparDL: speed of communication",
        "SparDL is up to 4.9x faster than state-of-the-art sparse all-reduces; taken as seconds of communication.",
        SPEED,
        "spardl.breakdown",
        communication,
        UpTo(4.9),
        "communication seconds of the fastest other sparse method over those of SparDL with its best number of teams",
        (MODELLED,),
        remark=CODE,
    ),
    Claim(
        "SparDL: speed of an update",
        "SparDL is up to 1.98x faster than the state of the art; taken as seconds of an update.",
        DIGEST,
        "spardl.breakdown",
        updates,
        UpTo(1.98),
        "seconds of an update of the fastest other sparse method over those of SparDL with its best number of teams",
        (ASSUMED_GPU, MODELLED),
        remark=CODE,
    ),
    Claim(
        "SparDL: speed on a real network",
        "SparDL is up to 4.9x faster than state-of-the-art sparse all-reduces; measured on four workers.",
        SPEED,
        "spardl.lab",
        in_the_lab,
        UpTo(4.9),
        "seconds of a synchronization of the fastest other sparse method over SparDL's without teams, with local work",
        (LAB,),
        remark=CODE,
    ),
    Claim(
        "SparDL: fast networks",
        "SparDL is the fastest even on networks with RDMA.",
        Published("faster", Known.SUMMARY),
        "spardl.fast_network",
        updates,
        AtLeast(1.01, "x"),
        "seconds of an update of the fastest other sparse method over SparDL's with its best number of teams",
        (ASSUMED_GPU, MODELLED),
        remark=CODE,
    ),
    Claim(
        "SparDL: any number of workers",
        "Sparse gradients are summed on any number of workers, without extra transmission when sums grow.",
        Published(
            "2 ceil(log2 P) rounds, 4k(P-1)/P words",
            Known.DERIVED,
            "the formulas, from the algorithm as coded",
            "Table I",
        ),
        "spardl.complexity",
        any_number,
        Equal(),
        "counted rounds, and words in units of k, for every number of workers of the exhibit",
        construction=OWN_FORMULA,
    ),
    Claim(
        "SparDL: teams save rounds",
        "Teams trade latency for bandwidth.",
        Published(
            "2 ceil(log2(P/d)) + ceil(log2 d) rounds", Known.DERIVED, "that they do is read in the abstract", "Table I"
        ),
        "spardl.complexity",
        teams_rounds,
        Equal(),
        "counted rounds, for every number of teams of the exhibit",
        construction=OWN_FORMULA,
    ),
    Claim(
        "SparDL: the best number of teams",
        "More teams make training faster, until what B-SAG sends outweighs what it saves.",
        Published("a turn, small to middle d", Known.MEDIUM),
        "spardl.teams",
        teams_seconds,
        InnerBest(" s"),
        "virtual seconds of a training, from one team upwards",
        (MODELLED, STAND_INS),
    ),
    Claim(
        "SparDL: global residual collection",
        "Collecting all residuals (GRES) converges better than some (PRES), and that better than own ones (LRES).",
        Published("GRES > PRES > LRES", Known.HIGH, "figures unknown"),
        "spardl.residuals",
        residuals,
        Order(),
        "metric after training",
        (STAND_INS,),
        also=("spardl.residuals_real",),
    ),
    Claim(
        "SparDL: accuracy against dense",
        "Training with SparDL reaches the metric of training with dense gradients.",
        COMPARABLE,
        "spardl.convergence",
        against_dense,
        NoLoss(),
        "difference from the metric of dense training",
        (STAND_INS,),
    ),
    Claim(
        "SparDL: accuracy on real data",
        "Training with SparDL reaches the metric of dense training; on published data sets, with models for two cores.",
        COMPARABLE,
        "spardl.real_data",
        on_real_data,
        NoLoss(),
        "difference from the metric of dense training",
        (STAND_INS,),
    ),
    Claim(
        "SparDL: accuracy against Ok-Topk",
        "Training with SparDL reaches the metric of training with the other sparse all-reduces.",
        COMPARABLE,
        "spardl.convergence",
        against_rival,
        NoLoss(),
        "difference from the metric of training with Ok-Topk",
        (STAND_INS,),
    ),
)
