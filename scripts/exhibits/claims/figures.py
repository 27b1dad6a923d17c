"""Figures that claims are judged by, read from the tables and trainings of exhibits: complete, or not at all."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from statistics import mean
from typing import Any, TypeAlias

from scripts.exhibits.base import SWEEPS, Exhibit, Results, at
from scripts.exhibits.claims.judging import Figure, NoEvidence, gathered, jobs_of, show
from scripts.exhibits.jobs import Computation, Job, machines
from scripts.exhibits.kinds.counts import CountedCosts, amortized
from scripts.exhibits.kinds.gpu import assumed_gpu
from scripts.exhibits.kinds.lab import TURNS
from scripts.exhibits.kinds.study import RANDOM_BLOCK, StudyRates, held_out
from scripts.exhibits.kinds.trainings import Case, MethodComparison, Plan
from scripts.exhibits.kinds.watched import configuration
from scripts.exhibits.measures import HIGHER_IS_BETTER, LEAST, figure_of, final_metric, seeds
from scripts.exhibits.tables import Table

SPARDL, OKTOPK, DENSE = "SparDL", "Ok-Topk", "dense"
# Rows of the lab, which are choices of compressor=.
IN_THE_LAB = (("spardl", SPARDL), ("oktopk", OKTOPK), ("topka", "TopkA"), ("topkdsa", "TopkDSA"), ("gtopk", "gTopk"))
BUCKETS, HALVES = "DDP-like 25 MB", "DeAR 25 MB"
MEAN = attrgetter("mean")
# Part of a case's title; cases that differ in it only are one task.
RATE = re.compile(r", learning rate [\d.]+")
# Figures by table title and row.
Cells: TypeAlias = dict[tuple[str, str], Figure]


def required(results: Results, jobs: Sequence[Job]) -> list[Mapping[str, Any]]:
    """The results of jobs; raises :class:`NoEvidence` if one failed or was not run."""
    outcomes = [results.of(job) for job in jobs]
    reasons = [outcome.reason for outcome in outcomes if outcome.reason is not None]
    if reasons:
        words = "; ".join(dict.fromkeys(reasons))
        raise NoEvidence(f"{len(reasons)} of {len(jobs)} required results are missing: {words}", jobs)
    return [outcome.data for outcome in outcomes]


def tables(exhibit: Exhibit, scale: str, results: Results) -> Sequence[Table]:
    """An exhibit's tables; raises :class:`NoEvidence` if one of its jobs failed or was not run."""
    required(results, exhibit.jobs(scale))
    return exhibit.tables(scale, results)


def cells(
    found: Sequence[Table], column: str, rows: Callable[[str], Any] = bool, titles: Callable[[str], Any] = bool
) -> Cells:
    """The numbers of a column, named after their rows, in selected rows and tables with selected titles.

    Raises KeyError if no table has the column, and :class:`NoEvidence` if no selected row has a number at this size.
    """
    wanted = [table for table in found if column in table.columns]
    if not wanted:
        raise KeyError(f"no table has a column {column!r}: {[table.columns for table in found]}")
    numbers = {
        (table.title, row.name): Figure(row.name, (value,), (), tuple(row.jobs))
        for table in wanted
        for row in table.rows
        if titles(table.title) and rows(row.name)
        if (value := row.cells[table.columns.index(column) - 1].value) is not None
    }
    if not numbers:
        raise NoEvidence("there are no such figures at this size", found[0].rows[0].jobs)
    return numbers


def turns(exhibit: Exhibit, scale: str, results: Results) -> dict[str, Figure]:
    """Timings by row of an exhibit's first table, one per turn; raises :class:`NoEvidence` if turns are too few."""
    first = tables(exhibit, scale, results)[0]
    place = first.columns.index(TURNS) - 1
    found = {
        row.name: Figure(row.name, [*map(float, row.cells[place].text.split(","))], (), row.jobs) for row in first.rows
    }
    least = min(len(figure.values) for figure in found.values())
    if least < LEAST:
        raise NoEvidence(f"{least} turn{'s' if least > 1 else ''}; {LEAST} are required", first.rows[0].jobs)
    return found


def ratio(name: str, one: Figure, other: Figure, limit: float | None = None) -> Figure:
    """Ratio of two figures with equally many values, seed by seed or turn by turn, to be compared with a limit."""
    values = [above / below for above, below in zip(one.values, other.values, strict=True)]
    return Figure(name, values, () if limit is None else (limit,), jobs_of((one, other)))


def gain(name: str, rivals: Sequence[Figure], ours: Figure, also: Sequence[Figure], word: str = "against") -> Figure:
    """Seconds of the fastest rival, which is named, over ours; the remark gives the ratios to some other methods."""
    rival = min(rivals, key=MEAN)
    ratios = (f"{ratio('', each, ours).mean:.4g}x {word} {each.name}" for each in also if each.name != rival.name)
    return ratio(f"{name} against {rival.name}", rival, ours)._replace(remark=", ".join(ratios))


def over_others(case: str, rows: Sequence[Figure]) -> Figure:
    """Seconds of the fastest other sparse method over those of SparDL with its best number of teams.

    The remark gives the ratios to Ok-Topk, the rival that the paper is said to use, and to dense.
    """
    ours = min((row for row in rows if row.name.startswith(SPARDL)), key=MEAN)
    rivals = [row for row in rows if not row.name.startswith(SPARDL) and row.name != DENSE]
    return gain(f"{case}: {ours.name}", rivals, ours, [row for row in rows if row.name in (OKTOPK, DENSE)], "over")


def spardl_over_others(exhibit: Exhibit, scale: str, results: Results, column: str) -> list[Figure]:
    """Gains of SparDL by case, in the seconds of a column."""
    found: defaultdict[str, list[Figure]] = defaultdict(list)
    for (title, _), figure in cells(tables(exhibit, scale, results), column).items():
        found[title].append(figure)
    return [over_others(title.partition(", ")[0].rpartition(": ")[2], rows) for title, rows in found.items()]


def spardl_in_the_lab(exhibit: Exhibit, scale: str, results: Results) -> list[Figure]:
    """Measured gain of SparDL, turn by turn."""
    found = turns(exhibit, scale, results)
    known = (*IN_THE_LAB, ("none", DENSE))
    return [over_others("4 workers", [found[row]._replace(name=name) for row, name in known if row in found])]


def dear_in_the_lab(exhibit: Exhibit, scale: str, results: Results) -> list[Figure]:
    """Measured seconds of a step of the fastest other schedule over those of DeAR's fastest, turn by turn."""
    found = turns(exhibit, scale, results).values()
    named = [figure._replace(name=figure.name.removeprefix("none, ")) for figure in found]
    ours = min((figure for figure in named if figure.name.startswith("dear")), key=MEAN)
    rivals = [figure for figure in named if not figure.name.startswith("dear")]
    return [gain(f"4 workers: {ours.name},", rivals, ours, rivals[:1])]


def between_columns(
    exhibit: Exhibit,
    scale: str,
    results: Results,
    columns: Sequence[str],
    network: str = "",
    rows: str = "",
    speeds: bool = False,
) -> list[Figure]:
    """Seconds in the fastest other column over those in the last one, by row of the tables of all networks or one.

    The columns may hold shares of the ideal speed in place of seconds; ``rows`` is a regular expression.
    """
    made, wanted = tables(exhibit, scale, results), re.compile(rows).search
    found = {name: cells(made, name, wanted, lambda title: network in title) for name in columns}
    gains = []
    for title, row in found[columns[-1]]:
        figures = [each[title, row]._replace(name=name) for name, each in found.items()]
        if speeds:
            figures = [each._replace(values=[1 / value for value in each.values]) for each in figures]
        name = row if network else f"{row}, {title.rpartition(', ')[2]}"
        gains.append(gain(f"{name},", figures[:-1], figures[-1], figures[:1]))
    return gains


def _counts(
    exhibit: CountedCosts, scale: str, results: Results, method: str
) -> Iterator[tuple[int, Job, Sequence[Mapping[str, Any]]]]:
    """Counts of each kind of step, by number of workers."""
    for workers in at(scale, exhibit.workers):
        job = exhibit.job(method, workers)
        yield workers, job, required(results, [job])[0]["kinds"]


def rounds_of_workers(exhibit: CountedCosts, scale: str, results: Results) -> list[Figure]:
    """Rounds, and words in units of k, of SparDL for every number of workers, against the formulas without teams."""
    found = []
    for workers, job, kinds in _counts(exhibit, scale, results, SPARDL):
        rounds, words = 2.0 * math.ceil(math.log2(workers)), 4 * (workers - 1) / workers
        for kind in kinds:
            for name, unit, formula in (("rounds", 1.0, rounds), ("words", kind["k"], words)):
                found.append(Figure(f"{name} at P = {workers}", (max(kind[name]) / unit,), (formula,), (job,)))
    return found


def rounds_of_teams(exhibit: CountedCosts, scale: str, results: Results) -> list[Figure]:
    """Rounds of SparDL with d teams against 2 ceil(log2(P / d)) + ceil(log2 d)."""
    found = []
    for job in exhibit.jobs(scale):
        settings = dict(job.arguments)
        words = dict(word.split("=") for word in settings["overrides"])
        if settings["name"] == "spardl" and "communicator.teams" in words:
            workers, teams = settings["workers"], int(words["communicator.teams"])
            formula = 2.0 * math.ceil(math.log2(workers / teams)) + math.ceil(math.log2(teams))
            name = f"{words['communicator.gather']}, P = {workers}, d = {teams}"
            (data,) = required(results, [job])
            found += [Figure(name, (float(max(kind["rounds"])),), (formula,), (job,)) for kind in data["kinds"]]
    return found


def volume(exhibit: CountedCosts, scale: str, results: Results) -> list[Figure]:
    """Words of Ok-Topk in units of k for every number of workers: in most steps, and on average over a cycle of steps.

    The average includes the steps that evaluate thresholds; the remark says how much these send on their own.
    """
    found = []
    for workers, job, kinds in _counts(exhibit, scale, results, OKTOPK):
        most, first = max(kinds, key=lambda kind: kind["share"]), kinds[0]
        evaluating = f"steps that evaluate thresholds: {show(max(first['words']) / first['k'], 'k')}"
        found.append(Figure(f"P = {workers}", (max(most["words"]) / most["k"],), (), (job,)))
        found.append(Figure(f"P = {workers}, mean of a cycle", (amortized(kinds),), (), (job,), evaluating))
    return found


def _updates(exhibit: Exhibit, scale: str, results: Results, model: str, workers: int) -> dict[str, Figure]:
    """Seconds of an update by method."""
    ending, made = f", P = {workers}", tables(exhibit, scale, results)
    found = cells(made, "update", lambda row: row.endswith(ending), lambda title: model in title)
    return {row.removesuffix(ending): figure for (_, row), figure in found.items()}


def speedups(exhibit: Exhibit, scale: str, results: Results, model: str, workers: int) -> list[Figure]:
    """Seconds of an update of each other method over those of Ok-Topk, for one model and one number of workers."""
    found = _updates(exhibit, scale, results, model, workers)
    ours = found.pop(OKTOPK)
    return [ratio(f"over {method}", theirs, ours) for method, theirs in found.items()]


def efficiency(exhibit: Exhibit, scale: str, results: Results, model: str, few: int, many: int) -> list[Figure]:
    """Seconds of an update of Ok-Topk with few workers over those with many; the remark has the same for dense."""
    small, large = (_updates(exhibit, scale, results, model, workers) for workers in (few, many))
    kept = {method: ratio(f"{method}, P = {few} to {many}", small[method], large[method]) for method in small}
    return [kept[OKTOPK]._replace(remark=f"dense keeps {show(kept[DENSE].mean, '%')}")]


def deviations(exhibit: Exhibit, scale: str, results: Results, method: str, ahead: str, rival: str) -> Sequence[Figure]:
    """Mean deviation from the wanted number of entries and sums, against that of a rival; each model is a task.

    The remark gives the deviation of the variant that evaluates thresholds ahead of time.
    """
    found = cells(tables(exhibit, scale, results), "mean deviation, second half")
    return [
        _watched(figure)._replace(
            task=title.rpartition(": ")[2],
            against=found[title, f"{rival}, own"].values,
            remark=f"evaluated ahead of time: {show(found[title, row.replace(method, ahead)].mean, '%')}",
        )
        for (title, row), figure in found.items()
        if row in (f"{method}, own", f"{method}, sums")
    ]


def gains(exhibit: Exhibit, scale: str, results: Results, kind: str) -> list[Figure]:
    """Gain of balancing in every case, in one of the two comparisons."""
    made = tables(exhibit, scale, results)
    return [*map(_watched, cells(made, "gain with latency", titles=lambda title: title.endswith(kind)).values())]


def _watched(figure: Figure) -> Figure:
    """A figure of traced trainings, which says so if they are too short to be judged."""
    traced = [dict(job.arguments) for job in figure.jobs if isinstance(job, Computation)]
    reasons = {too_short(configuration(each["words"]), each["steps"]) for each in traced}
    return figure._replace(hindrances=sorted(reasons - {""}))


def overlap(exhibit: Exhibit, scale: str, results: Results) -> list[Figure]:
    """Seconds with buckets over those of DeAR with the same buckets, against the largest gain of overlap alone."""
    buckets, halves = (cells(tables(exhibit, scale, results), column) for column in (BUCKETS, HALVES))
    profiles = assumed_gpu([model for _, model in halves])
    limits = {model: 1 + each.forward / (2 * each.backward) for model, each in profiles.items()}
    return [
        ratio(f"{model}, {title.rpartition(', ')[2]}", buckets[title, model], ours, limits[model])
        for (title, model), ours in halves.items()
    ]


def halves(exhibit: Exhibit, scale: str, results: Results) -> list[Figure]:
    """Communication seconds of DeAR against those of all-reduces of the same buckets."""
    found = cells(tables(exhibit, scale, results), "communication")
    return [
        figure._replace(
            name=f"{row.partition(',')[0]}, {title.rpartition(', ')[2]}",
            against=found[title, row.replace(HALVES, BUCKETS)].values,
        )
        for (title, row), figure in found.items()
        if row.endswith(HALVES)
    ]


def searched(exhibit: Exhibit, scale: str, results: Results) -> list[Figure]:
    """Share of the best speed after 20 trials, against the better of random and grid search."""
    found = {row: figure for (_, row), figure in cells(tables(exhibit, scale, results), "20 trials").items()}
    starts = [row.removesuffix("Bayesian") for row in found if row.endswith("Bayesian")]
    return [
        found[f"{start}Bayesian"]._replace(
            name=start.removesuffix(", "), against=(max(found[start + name].mean for name in ("random", "grid")),)
        )
        for start in starts
    ]


def too_short(config: Mapping[str, Any], steps: int) -> str:
    """Why a training with these steps is too short to judge the method's accuracy; dense training has no minimum."""
    density = config["compressor"].get("density")
    needed = math.ceil(round(SWEEPS / density, 6)) if density else 0
    made = steps - config["warmup"]["steps"]
    return f"too short: {made} steps where {needed} are needed" if made < needed else ""


def _not_converged(case: Case, baselines: Sequence[Mapping[str, Any]]) -> str:
    """Why the dense baseline is not converged; empty if its final metric reaches the reference."""
    reference = case.known
    if reference is None:
        return "no reference value of dense training is known for this task"
    higher = baselines[0]["metric"] in HIGHER_IS_BETTER
    final = [final_metric(summary) for summary in baselines]
    best = [figure_of(summary, "best") for summary in baselines]
    if reference.reached(final, higher):
        return ""
    if reference.reached(best, higher):
        ends = f"{mean(final):.4g} at the end, {mean(best):.4g} before"
        return f"the dense baseline overfits: {ends}; reference {reference}"
    return f"the dense baseline reached only {mean(final):.4g}; reference {reference}"


def trained(
    exhibit: MethodComparison,
    plan: Plan,
    results: Results,
    methods: Sequence[str],
    read: Callable[[Mapping[str, Any]], float],
) -> dict[Case, dict[str, Figure]]:
    """One number per seed, by case and method; raises :class:`NoEvidence` if some are missing."""
    jobs = {
        case: {method: [exhibit.job(plan, case, method, seed) for seed in plan.seeds] for method in methods}
        for case in plan.cases
    }
    every = [job for by_method in jobs.values() for own in by_method.values() for job in own]
    if len(plan.seeds) < LEAST:
        raise NoEvidence(f"{seeds(len(plan.seeds))}; {LEAST} are required", every)
    numbers = {job: read(data) for job, data in zip(every, required(results, every), strict=True)}
    lost = sum(not math.isfinite(number) for number in numbers.values())
    if lost:
        raise NoEvidence(f"{lost} of {len(every)} trainings ended without a finite number", every)
    return {
        case: {name: Figure(name, [numbers[job] for job in own], (), own) for name, own in by_method.items()}
        for case, by_method in jobs.items()
    }


def accuracies(
    exhibit: MethodComparison, plan: Plan, results: Results, methods: Sequence[str]
) -> dict[Case, dict[str, Figure]]:
    """Metric per seed, with a sign so that greater is better, by case and method.

    Figures of trainings that are too short for their density, or whose dense baseline has not converged, say so.
    """

    def metric(summary: Mapping[str, Any]) -> float:
        return final_metric(summary) * (1 if summary["metric"] in HIGHER_IS_BETTER else -1)

    baselines = [name for name in exhibit.dense_names if name in methods] or exhibit.dense_names
    found = trained(exhibit, plan, results, tuple(dict.fromkeys((*methods, *baselines))), metric)
    checked: dict[Case, dict[str, Figure]] = {}
    for case, figures in found.items():
        dense = max((figures[name] for name in baselines), key=lambda figure: figure.mean)
        untrained, own = _not_converged(case, required(results, dense.jobs)), dict[str, Figure]()
        for name in methods:
            config = exhibit.job(plan, case, name, plan.seeds[0]).config
            steps = min(summary["steps"] for summary in required(results, figures[name].jobs))
            reasons = [reason for reason in (too_short(config, steps), untrained) if reason]
            own[name] = figures[name]._replace(hindrances=reasons)
        checked[case] = own
    return checked


def against(case: Case, ours: Figure, theirs: Figure) -> Figure:
    """A figure of a case with the values of another to compare with, named after the case."""
    reasons = tuple(dict.fromkeys((*ours.hindrances, *theirs.hindrances)))
    return Figure(case.title, ours.values, theirs.values, jobs_of((ours, theirs)), hindrances=reasons)


def metrics(exhibit: MethodComparison, scale: str, results: Results, method: str, baseline: str) -> list[Figure]:
    """Metric of a method against that of a baseline in every case, with equal seeds and the single worker's metric.

    A case whose trainings are incomplete says so and has no figures.
    """
    plan = at(scale, exhibit.plans)
    floors = tuple(name for name in exhibit.floors if name in exhibit.compared(plan))

    def find(cases: tuple[Case, ...]) -> list[Figure]:
        found = accuracies(exhibit, replace(plan, cases=cases), results, (method, baseline, *floors))
        return [
            against(case, figures[method], figures[baseline])._replace(
                floor=[value for name in floors for value in figures[name].values]
            )
            for case, figures in found.items()
        ]

    try:
        return gathered(((case.title, (case,)) for case in plan.cases), find)
    except NoEvidence:
        return find(plan.cases)  # raises an error that counts the missing results of all cases


def best_elsewhere(name: str, settings: Sequence[Figure]) -> Figure:
    """For each seed, the value at the setting, of at least one, that is best for the other seeds."""
    values = held_out({place: figure.values for place, figure in enumerate(settings)}, lower=False)
    reasons = tuple(dict.fromkeys(reason for figure in settings for reason in figure.hindrances))
    return Figure(name, values, (), jobs_of(settings), hindrances=reasons)


def residuals(exhibit: MethodComparison, scale: str, results: Results) -> list[Figure]:
    """Metric of each rule by task, in the order of the exhibit, at the learning rate that is best for the other seeds.

    Cases that are too short by plan are left out if others are long enough, and so are rates that cannot be judged.
    """
    rules = [method for method in exhibit.methods if method not in exhibit.dense_names]
    plan = at(scale, exhibit.plans)

    def long_enough(case: Case) -> bool:
        configs = [exhibit.job(plan, case, rule, plan.seeds[0]).config for rule in rules]
        steps = [config["training"]["max_steps"] for config in configs]
        return all(each is None or not too_short(own, each) for own, each in zip(configs, steps, strict=True))

    cases = tuple(filter(long_enough, plan.cases)) or plan.cases
    tasks: defaultdict[str, list[dict[str, Figure]]] = defaultdict(list)
    for case, figures in accuracies(exhibit, replace(plan, cases=cases), results, rules).items():
        tasks[RATE.sub("", case.title)].append(figures)
    found = list[Figure]()
    for task, rates in tasks.items():
        clear = [figures for figures in rates if not any(figure.hindrances for figure in figures.values())]
        found += [
            best_elsewhere(rule, [figures[rule] for figures in clear or rates])._replace(task=task) for rule in rules
        ]
    return found


def random_block(exhibit: StudyRates, scale: str, results: Results) -> list[Figure]:
    """Metric of random blocks against dense training, each at the setting that is best for the other seeds."""
    blocks, dense = (exhibit.choices_of(sent, scale, results) for sent in (RANDOM_BLOCK, DENSE))
    if not (blocks and dense):
        raise NoEvidence("all settings failed", exhibit.jobs(scale))
    found = accuracies(exhibit, at(scale, exhibit.plans), results, (*dense, *blocks))
    return [
        against(
            case,
            best_elsewhere(RANDOM_BLOCK, [figures[name] for name in blocks]),
            best_elsewhere(DENSE, [figures[name] for name in dense]),
        )
        for case, figures in found.items()
    ]


def seconds_of_teams(exhibit: MethodComparison, scale: str, results: Results) -> list[Figure]:
    """Virtual seconds of a training, by increasing number of teams; all trainings must have run on one machine."""
    methods = [method for method in exhibit.methods if not method.startswith("R-SAG")]
    plan = at(scale, exhibit.plans)
    by_case = trained(exhibit, plan, results, methods, lambda summary: float(summary["cluster_seconds"]))
    ((case, found),) = by_case.items()
    jobs = jobs_of(found.values())
    names = machines(map(results.of, jobs))
    if len(names) > 1:
        raise NoEvidence(f"seconds of different machines do not compare: {'; '.join(names)} ({case.title})", jobs)
    return list(found.values())
