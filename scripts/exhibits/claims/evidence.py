"""Reads the figures of exhibits for claims (complete, or not at all), and checks that trainings are long enough."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import mean
from typing import Any

from scripts.exhibits.base import SWEEPS, Exhibit, Results, at
from scripts.exhibits.claims.base import Figure
from scripts.exhibits.claims.judging import NoEvidence
from scripts.exhibits.jobs import Job
from scripts.exhibits.kinds.lab import TURNS
from scripts.exhibits.kinds.study import held_out
from scripts.exhibits.kinds.trainings import Case, MethodComparison
from scripts.exhibits.kinds.watched import configuration
from scripts.exhibits.measures import HIGHER_IS_BETTER, LEAST, figure_of, final_metric, seeds
from scripts.exhibits.outcomes import machines
from scripts.exhibits.tables import Row, Table

__all__ = [
    "accuracies",
    "against",
    "best_elsewhere",
    "cells",
    "fastest",
    "hindrances",
    "metrics",
    "metrics_so_far",
    "planned_long_enough",
    "ratio",
    "required",
    "tables",
    "timed",
    "trained",
    "turns",
    "watched_hindrances",
]


def hindrances(
    case: Case, config: Mapping[str, Any], found: Sequence[Mapping[str, Any]], baselines: Sequence[Mapping[str, Any]]
) -> list[str]:
    """Reasons why the accuracy of a method cannot be judged by its trainings.

    Args:
        case: Task that was trained.
        config: Configuration of one of the method's trainings.
        found: Summaries of the method's trainings, by seed.
        baselines: Summaries of dense training, by seed.

    Returns:
        The reasons; empty if the accuracy can be judged.
    """
    steps = min(summary["steps"] for summary in found)
    return [reason for reason in (_length(config, steps), _baseline(case, baselines)) if reason]


def watched_hindrances(words: Sequence[str], steps: int) -> list[str]:
    """Reasons why a traced training is too short to show a method whose residuals have built up.

    Composes the configuration; call it within :func:`scripts.choices.composing`.

    Args:
        words: Command-line words of train.py.
        steps: Steps of the traced training.

    Returns:
        The reason, if there is one.

    Raises:
        ConfigError: if the words do not compose a configuration.
    """
    short = _length(configuration(words), steps)
    return [short] if short else []


def planned_long_enough(config: Mapping[str, Any]) -> bool:
    """Whether a training is planned to be long enough to judge the method's accuracy.

    Args:
        config: Configuration of the training.
    """
    steps = config["training"]["max_steps"]
    return steps is None or not _length(config, steps)


def _length(config: Mapping[str, Any], steps: int) -> str:
    # Dense training and methods without a density have no minimum.
    density = config["compressor"].get("density")
    needed = math.ceil(round(SWEEPS / density, 6)) if density else 0
    made = steps - config["warmup"]["steps"]
    return f"too short: {made} steps where {needed} are needed" if made < needed else ""


def _baseline(case: Case, baselines: Sequence[Mapping[str, Any]]) -> str:
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
        return (
            f"the dense baseline overfits: {mean(final):.4g} at the end, {mean(best):.4g} before; reference {reference}"
        )
    return f"the dense baseline reached only {mean(final):.4g}; reference {reference}"


def required(results: Results, jobs: Sequence[Job]) -> list[Mapping[str, Any]]:
    """The results of jobs.

    Raises:
        NoEvidence: if a job failed or was not run.
    """
    outcomes = [results.of(job) for job in jobs]
    reasons = [outcome.reason for outcome in outcomes if outcome.reason is not None]
    if reasons:
        words = "; ".join(dict.fromkeys(reasons))
        raise NoEvidence(f"{len(reasons)} of {len(jobs)} required results are missing: {words}", jobs)
    return [outcome.data for outcome in outcomes]


def tables(exhibit: Exhibit, scale: str, results: Results) -> Sequence[Table]:
    """An exhibit's tables.

    Raises:
        NoEvidence: if one of its jobs failed or was not run.
    """
    required(results, exhibit.jobs(scale))
    return exhibit.tables(scale, results)


def cells(
    found: Sequence[Table], column: str, rows: Callable[[str], bool], titles: Callable[[str], bool] = bool
) -> dict[tuple[str, str], Figure]:
    """The numbers of a column.

    Args:
        found: Tables, at least one of which has the column.
        column: Name of the column.
        rows: Selects rows by name.
        titles: Selects tables by title.

    Returns:
        Figures by table title and row name, each named after its row.

    Raises:
        KeyError: if no table has the column, so that the exhibit no longer fits the claim.
        NoEvidence: if no selected row holds a number at this size.
    """
    wanted = [table for table in found if column in table.columns]
    if not wanted:
        raise KeyError(f"no table has a column {column!r}: {[table.columns for table in found]}")
    numbers = {key: figure for table in wanted if titles(table.title) for key, figure in _column(table, column, rows)}
    if not numbers:
        raise NoEvidence("there are no such figures at this size", found[0].rows[0].jobs)
    return numbers


def _column(table: Table, column: str, rows: Callable[[str], bool]) -> Iterator[tuple[tuple[str, str], Figure]]:
    place = table.columns.index(column) - 1
    for row in table.rows:
        value = row.cells[place].value
        if rows(row.name) and value is not None:
            yield (table.title, row.name), Figure(row.name, (value,), (), _jobs(row))


def _jobs(row: Row) -> tuple[Job, ...]:
    return tuple(row.jobs)


def turns(found: Sequence[Table]) -> dict[str, Figure]:
    """Timings by row of an exhibit's first table, one value per turn; turns alternate between the rows.

    Raises:
        NoEvidence: if there are too few turns for a confidence interval.
    """
    place = found[0].columns.index(TURNS) - 1
    rows = {
        row.name: Figure(row.name, [float(text) for text in row.cells[place].text.split(",")], (), _jobs(row))
        for row in found[0].rows
    }
    least = min(len(figure.values) for figure in rows.values())
    if least < LEAST:
        raise NoEvidence(f"{least} turn{'s' if least > 1 else ''}; {LEAST} are required", found[0].rows[0].jobs)
    return rows


def ratio(name: str, one: Figure, other: Figure, limit: float | None = None) -> Figure:
    """Ratio of two figures, seed by seed or turn by turn.

    Args:
        name: Name of the ratio.
        one: Numerator.
        other: Denominator, with as many values.
        limit: Value to compare the ratio with.
    """
    values = [above / below for above, below in zip(one.values, other.values, strict=True)]
    jobs = tuple(dict.fromkeys((*one.jobs, *other.jobs)))
    return Figure(name, values, () if limit is None else (limit,), jobs)


def trained(
    exhibit: MethodComparison,
    scale: str,
    results: Results,
    methods: Sequence[str],
    read: Callable[[Mapping[str, Any]], float],
) -> dict[Case, dict[str, Figure]]:
    """One number per seed, by case and method.

    Raises:
        NoEvidence: if a training failed, was not run or ended without a finite number, or there are too few seeds.
    """
    plan = at(scale, exhibit.plans)
    jobs = {
        case: {method: [exhibit.job(plan, case, method, seed) for seed in plan.seeds] for method in methods}
        for case in plan.cases
    }
    every = [job for by_method in jobs.values() for seeds in by_method.values() for job in seeds]
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


def timed(
    exhibit: MethodComparison, scale: str, results: Results, methods: Sequence[str]
) -> dict[Case, dict[str, Figure]]:
    """Virtual seconds of each seed's training, by case and method.

    Raises:
        NoEvidence: see :func:`trained`; if trainings of one case ran on several machines.
    """
    found = trained(exhibit, scale, results, methods, _seconds)
    for case, figures in found.items():
        jobs = [job for figure in figures.values() for job in figure.jobs]
        names = machines(results.of(job) for job in jobs)
        if len(names) > 1:
            raise NoEvidence(f"seconds of different machines do not compare: {'; '.join(names)} ({case.title})", jobs)
    return found


def _seconds(summary: Mapping[str, Any]) -> float:
    found: float = summary["cluster_seconds"]
    return found


def _metric(summary: Mapping[str, Any]) -> float:
    """The final metric, with a sign so that greater is better."""
    value = final_metric(summary)
    return value if summary["metric"] in HIGHER_IS_BETTER else -value


def metrics(exhibit: MethodComparison, scale: str, results: Results, method: str, baseline: str) -> list[Figure]:
    """Metric of a method against that of a baseline in every case, with equal seeds and the single worker's metric.

    Raises:
        NoEvidence: see :func:`trained`.
    """
    compared = exhibit.compared(at(scale, exhibit.plans))
    floor = tuple(name for name in exhibit.floors if name in compared)
    found = accuracies(exhibit, scale, results, (method, baseline, *floor))
    return [
        against(case, figures[method], figures[baseline])._replace(
            floor=[value for name in floor for value in figures[name].values]
        )
        for case, figures in found.items()
    ]


def metrics_so_far(exhibit: MethodComparison, scale: str, results: Results, method: str, baseline: str) -> list[Figure]:
    """Like :func:`metrics`, for cases whose trainings are complete; an incomplete case says so and has no figures.

    Raises:
        NoEvidence: see :func:`trained`; if no case has figures.
    """
    plan = at(scale, exhibit.plans)
    found: list[Figure] = []
    incomplete: dict[str, NoEvidence] = {}
    for case in plan.cases:
        try:
            found += metrics(
                replace(exhibit, plans={scale: replace(plan, cases=(case,))}), scale, results, method, baseline
            )
        except NoEvidence as missing:
            incomplete[case.title] = missing
    empty = [Figure(title, (), (), missing.jobs, hindrances=(str(missing),)) for title, missing in incomplete.items()]
    if not found:
        raise NoEvidence(
            "; ".join(f"{title}: {missing}" for title, missing in incomplete.items()),
            [job for figure in empty for job in figure.jobs],
        )
    return [*found, *empty]


def accuracies(
    exhibit: MethodComparison, scale: str, results: Results, methods: Sequence[str]
) -> dict[Case, dict[str, Figure]]:
    """Metric per seed, with a sign so that greater is better, by case and method.

    Figures of trainings that are too short for their density, or whose dense baseline has not converged, say so.

    Raises:
        NoEvidence: see :func:`trained`; dense training is required as well.
    """
    plan = at(scale, exhibit.plans)
    baselines = [name for name in exhibit.dense_names if name in methods] or exhibit.dense_names
    found = trained(exhibit, scale, results, tuple(dict.fromkeys((*methods, *baselines))), _metric)

    def checked(case: Case, method: str, dense: Figure, figure: Figure) -> Figure:
        config = exhibit.job(plan, case, method, plan.seeds[0]).config
        own, theirs = required(results, figure.jobs), required(results, dense.jobs)
        return figure._replace(hindrances=hindrances(case, config, own, theirs))

    best = {
        case: max((figures[name] for name in baselines), key=lambda figure: figure.mean)
        for case, figures in found.items()
    }
    return {
        case: {name: checked(case, name, best[case], figures[name]) for name in methods}
        for case, figures in found.items()
    }


def against(case: Case, ours: Figure, theirs: Figure) -> Figure:
    """A figure of a case with the values of another to compare with, named after the case."""
    jobs = tuple(dict.fromkeys((*ours.jobs, *theirs.jobs)))
    reasons = tuple(dict.fromkeys((*ours.hindrances, *theirs.hindrances)))
    return Figure(case.title, ours.values, theirs.values, jobs, hindrances=reasons)


def best_elsewhere(name: str, settings: Sequence[Figure]) -> Figure:
    """For each seed, the value at the setting that is best for the other seeds.

    Args:
        name: Name of the result.
        settings: At least one figure, with equal seeds; greater values are better.
    """
    values = held_out({place: figure.values for place, figure in enumerate(settings)}, lower=False)
    jobs = tuple(dict.fromkeys(job for figure in settings for job in figure.jobs))
    reasons = tuple(dict.fromkeys(reason for figure in settings for reason in figure.hindrances))
    return Figure(name, values, (), jobs, hindrances=reasons)


def fastest(figures: Iterable[Figure]) -> Figure:
    """The figure with the smallest mean."""
    return min(figures, key=lambda figure: figure.mean)
