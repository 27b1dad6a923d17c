"""Figures that the claims of the SparDL paper are judged by."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType

from scripts.exhibits.base import Results, at
from scripts.exhibits.claims.base import Figure
from scripts.exhibits.claims.evidence import (
    accuracies,
    best_elsewhere,
    cells,
    fastest,
    planned_long_enough,
    ratio,
    required,
    tables,
    timed,
    turns,
)
from scripts.exhibits.kinds.counts import CountedCosts
from scripts.exhibits.kinds.lab import Measured
from scripts.exhibits.kinds.trainings import MethodComparison
from scripts.exhibits.kinds.updates import UpdateBreakdown

__all__ = [
    "any_number",
    "best_against",
    "communication",
    "in_the_lab",
    "residuals",
    "teams_rounds",
    "teams_seconds",
    "updates",
]

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
