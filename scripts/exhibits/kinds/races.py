"""Exhibits of the wall-clock time until a target metric, with real workers on slow links; crossings of methods."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby, pairwise, product
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple, TypeAlias

from scripts.exhibits.base import ByScale, Exhibit, Picture, Results, at
from scripts.exhibits.charts.curves import draw_means, panel_pictures
from scripts.exhibits.charts.style import looks
from scripts.exhibits.jobs import UNKNOWN, Outcome, machines, succeeded
from scripts.exhibits.kinds import number
from scripts.exhibits.kinds.lab import Measurement, in_lab, typed
from scripts.exhibits.kinds.trainings import OTHER_MACHINE
from scripts.exhibits.measures import Curve, Target, in_words, metric_curve, reached, spread
from scripts.exhibits.tables import Cell, Row, Table, failed

SCRIPT = "scripts/bench_accuracy.py"
# Allowed shortfall of the target from the dense metric, and number of final tests whose mean is that metric: the
# metric of a thousand examples varies by about 1% by chance, and more with a constant learning rate.
MARGIN, LAST = 0.02, 3
# Startup time of a lab and duration of a test in seconds; only for the plan.
START, TEST = 12.0, 0.4
# Time limit of a run in seconds: several times the duration of the longest one.
LIMIT = 1200.0
UNTIL, EVERY, FASTER = "seconds to the target", "every seed", "dense's / these"
COLUMNS = ("method", UNTIL, EVERY, FASTER, "best metric", "ms a step", "MB a step", "steps")


class Entrant(NamedTuple):
    """A method in the race.

    Attributes:
        name: Name of its rows.
        case: Case of bench.py accuracy.
        steps: Number of training steps.
        pace: Approximate seconds of a step on each link, for the plan.
        words: Additional arguments of train.py, such as its learning rate.
    """

    name: str
    case: str
    steps: int
    pace: tuple[float, ...]
    words: tuple[str, ...] = ()


@dataclass(frozen=True)
class Course:
    """Plan of one size preset; the first entrant is dense training, which determines the target.

    Attributes:
        what: Task, for titles.
        words: Arguments of train.py that all methods share.
        gbits: Bandwidths of the links in Gbit/s.
        every: Steps between two tests.
        lower: Whether lower values of the metric are better.
    """

    what: str
    words: tuple[str, ...]
    entrants: tuple[Entrant, ...]
    gbits: tuple[float, ...]
    seeds: tuple[int, ...]
    every: int
    workers: int = 4
    lower: bool = False

    def title(self, gbit: float) -> str:
        """Title of tables and panels."""
        return f"{self.what}, {self.workers} workers, {gbit:g} Gbit/s"


def raced(**setting: Any) -> dict[str, Any]:
    """Trains one entrant once: bench.py accuracy, with arguments of in_lab."""
    return dict(in_lab(**setting))


def with_tests(content: Mapping[str, Any], where: Path) -> Outcome:
    """Result in a record, with the tests as metrics; see :meth:`Job.recalled`."""
    result = content["result"]
    lines = [{"kind": "eval", **test} for test in result["evaluations"]]
    return Outcome(where, result, made=content["environment"], lines=lines)


@dataclass(frozen=True)
class Lap(Measurement):
    """Run of one entrant on one link with one seed."""

    def recalled(self, content: Mapping[str, Any], where: Path) -> Outcome:
        return with_tests(content, where)


@dataclass(frozen=True)
class Race(Exhibit):
    """Methods x links x seeds, with one table and one panel for each link."""

    courses: ByScale[Course]
    recipe: int = field(default=1, kw_only=True)

    def job(self, course: Course, gbit: float, entrant: Entrant, seed: int) -> Lap:
        """Job of one run."""
        train = ",".join((*course.words, *entrant.words))
        counts = ("--steps", str(entrant.steps), "--every", str(course.every), "--seed", str(seed))
        words = (SCRIPT, "--case", entrant.case, *counts, "--train", train)
        pace = entrant.pace[course.gbits.index(gbit)]
        seconds = START + entrant.steps * (pace + TEST / course.every)
        arguments = (("workers", course.workers), ("gbit", gbit), ("limit", LIMIT), ("words", words))
        return Lap(self.name, raced, arguments, typed(course.workers, gbit, words), self.recipe, seconds)

    def jobs(self, scale: str) -> Sequence[Lap]:
        course = at(scale, self.courses)
        choices = product(course.seeds, course.gbits, course.entrants)
        return [self.job(course, gbit, entrant, seed) for seed, gbit, entrant in choices]

    def with_seeds(self, count: int) -> Race:
        seeds = tuple(range(1, count + 1))
        return replace(self, courses={scale: replace(each, seeds=seeds) for scale, each in self.courses.items()})

    def cost(self, scale: str) -> str:
        jobs = self.jobs(scale)
        minutes = sum(job.expected or 0 for job in jobs) / 60
        return f"{len(jobs)} runs, about {math.ceil(minutes)} minutes, alone on the machine"

    def caption(self, scale: str) -> str:
        course = at(scale, self.courses)
        own = "; ".join(f"{each.name}: {' '.join((each.case, *each.words))}" for each in course.entrants)
        return (
            f"{course.what}, {course.workers} workers. {' '.join(course.words)}. {own}. Seconds are those of training "
            f"steps, by the wall clock of the slowest worker; tests, every {course.every} steps, do not count, nor do "
            "three steps before, of a model that is thrown away. Bytes are those that the workers' interfaces sent. "
            f"The target: the mean of dense's last {LAST} tests, over its seeds and links, less {MARGIN:.0%}. It is "
            f"reached at the first test that is as good. {FASTER}: of the means, and the least..most, seed by seed. "
            "Every run has the steps of its row, whether it reaches the target or not."
        )

    def laps(self, course: Course, gbit: float, entrant: Entrant) -> list[Lap]:
        """Jobs of a method on a link, by seed."""
        return [self.job(course, gbit, entrant, seed) for seed in course.seeds]

    def outcomes(self, course: Course, gbit: float, entrant: Entrant, results: Results) -> list[Outcome]:
        """Outcomes of a method's runs on a link, by seed."""
        return [results.of(lap) for lap in self.laps(course, gbit, entrant)]

    def target(self, course: Course, results: Results) -> Target | None:
        """Target from the last tests of dense training; ``None`` until all of its runs are finished."""
        dense = course.entrants[0]
        found = [each for gbit in course.gbits for each in self.outcomes(course, gbit, dense, results)]
        if any(outcome.reason is not None for outcome in found):
            return None
        last = mean(mean(_curve(outcome).values[-LAST:]) for outcome in found)
        return Target.near(last, course.lower, found[0].data["metric"], MARGIN)

    def tables(self, scale: str, results: Results) -> Sequence[Table]:
        course = at(scale, self.courses)
        target = self.target(course, results)
        words = target.words if target else "no target yet, for dense training has no result"
        tables = []
        for gbit in course.gbits:
            found = {each: self.outcomes(course, gbit, each, results) for each in course.entrants}
            dense = found[course.entrants[0]]
            rows = [
                Row(each.name, _cells(outcomes, target, dense), self.laps(course, gbit, each))
                for each, outcomes in found.items()
            ]
            places = machines([outcome for each in found.values() for outcome in succeeded(each)])
            where = f"; on {places[0]}" if len(places) == 1 and places != [UNKNOWN] else ""
            tables.append(Table(f"{self.title}: {course.title(gbit)}; {words}{where}", COLUMNS, rows))
        return tables

    def pictures(self, scale: str, results: Results) -> Sequence[Picture]:
        course = at(scale, self.courses)
        target = self.target(course, results)
        caption = (
            f"{course.what} while {course.workers} workers train it, against seconds of training by the wall clock, "
            f"tests not counted; mean of seeds {', '.join(map(str, course.seeds))}, bands from the least to the most. "
            f"{f'The dotted line is the target ({target.words}). ' if target else ''}{self._hardware(scale, results)}"
        )
        names, pictures = [entrant.name for entrant in course.entrants], []
        for gbit in course.gbits:
            draw = partial(self._draw, course, gbit, target, results)
            picture = Picture(f"{gbit:g} Gbit/s", caption, draw, f"{course.what}, {gbit:g} Gbit/s")
            pictures += panel_pictures([picture], names, looks(names), names[:1])
        return pictures

    def _hardware(self, scale: str, results: Results) -> str:
        found = [outcome for job in self.jobs(scale) if (outcome := results.of(job)).reason is None]
        machines = sorted({f"{each.data['cores']} cores, {each.made.get('cpu', 'unknown')}" for each in found})
        return f"All workers on one machine ({'; '.join(machines)}), each behind a shaped link." if machines else ""

    def _draw(
        self, course: Course, gbit: float, target: Target | None, results: Results, shown: Sequence[str], figure: Any
    ) -> None:
        found = {each.name: succeeded(self.outcomes(course, gbit, each, results)) for each in course.entrants}
        metrics = ", ".join(sorted({each.data["metric"] for outcomes in found.values() for each in outcomes}))
        curves = {name: list(map(_curve, outcomes)) for name, outcomes in found.items()}
        line, across = target.value if target else None, "seconds of training"
        draw_means(figure.subplots(), curves, "seconds", across, metrics, target=line, ratios=True, shown=shown)


def _curve(outcome: Outcome) -> Curve:
    return metric_curve(outcome.data, outcome.events("eval"))


def _times(outcomes: Sequence[Outcome], target: Target | None) -> list[float | None]:
    """Seconds until the target by seed, for seeds that reached it."""
    return [reached(_curve(outcome), target) if target else None for outcome in succeeded(outcomes)]


def _best(outcome: Outcome, target: Target | None) -> float:
    """Best test of a run, or the last one if the metric has no known direction; NaN if no test was finite."""
    values = [value for value in _curve(outcome).values if math.isfinite(value)]
    if not values or target is None:
        return values[-1] if values else math.nan
    return min(values) if target.lower else max(values)


def _cells(outcomes: Sequence[Outcome], target: Target | None, dense: Sequence[Outcome]) -> list[Cell]:
    good = succeeded(outcomes)
    if not good:
        return failed(outcomes, len(COLUMNS) - 1)
    times, best = _times(outcomes, target), [_best(outcome, target) for outcome in good]
    known = [each for each in times if each is not None]
    lost, data = len(good) < len(outcomes), [outcome.data for outcome in good]
    pace = mean(each["cluster_seconds"] / each["steps"] for each in data)
    sent = mean(each["step_bytes"] for each in data) / 1e6
    return [
        _until(known, len(times), target, best),
        Cell(", ".join(_seed(*each) for each in zip(times, best, strict=True)), bad=lost),
        _faster(good, succeeded(dense), target),
        Cell(f"{in_words(data[0]['metric'])} {spread(best)}", mean(best)),
        number(1000 * pace),
        number(sent),
        Cell(str(data[0]["steps"]), float(data[0]["steps"])),
    ]


def _until(known: Sequence[float], seeds: int, target: Target | None, best: Sequence[float]) -> Cell:
    if target is None:
        return Cell("no target yet")
    if len(known) == seeds:
        return Cell(spread(known), mean(known))
    most = min(best) if target.lower else max(best)
    return Cell(f"reached by {len(known)} of {seeds} seeds" if known else f"never reached; best {most:.4g}")


def _seed(seconds: float | None, best: float) -> str:
    return f"never ({best:.4g})" if seconds is None else f"{seconds:.4g}"


def _faster(good: Sequence[Outcome], dense: Sequence[Outcome], target: Target | None) -> Cell:
    """Speedup over dense training, if every seed of both reached the target on the same machine."""
    if len(machines([*good, *dense])) > 1:
        return Cell(OTHER_MACHINE)
    ours, theirs = ([each for each in _times(found, target) if each is not None] for found in (good, dense))
    if not theirs or len(theirs) < len(dense) or len(ours) != len(theirs):
        return Cell("none, because not all seeds reached it")
    ratios = [one / other for one, other in zip(theirs, ours, strict=True)]
    return Cell(f"{mean(theirs) / mean(ours):.3g} ({min(ratios):.3g}..{max(ratios):.3g})", mean(theirs) / mean(ours))


# Seconds by bandwidth in Mbit/s.
Paces: TypeAlias = Mapping[float, float]
# Steps of the search from one measured bandwidth to the next.
STEPS = 200


class Stretch(NamedTuple):
    """A range of bandwidths in Mbit/s with the same fastest way."""

    low: float
    high: float
    name: str


def between(paces: Paces, bandwidth: float) -> float:
    """Seconds at a bandwidth within the measured range, interpolated linearly in seconds per bit."""
    known = sorted(paces)
    low = max(each for each in known if each <= bandwidth)
    high = min(each for each in known if each >= bandwidth)
    if low == high:
        return paces[low]
    share = (1 / low - 1 / bandwidth) / (1 / low - 1 / high)
    return paces[low] + share * (paces[high] - paces[low])


def stretches(ways: Mapping[str, Paces]) -> list[Stretch]:
    """The fastest way from the smallest measured bandwidth to the largest; all are measured at the same bandwidths."""
    if not ways:
        return []
    known = sorted(next(iter(ways.values())))
    grid = [
        low * math.exp(step / STEPS * math.log(high / low)) for low, high in pairwise(known) for step in range(STEPS)
    ]
    grid.append(known[-1])
    best = [(each, min(ways, key=lambda name: between(ways[name], each))) for each in grid]
    runs = [(name, [place for place, _ in run]) for name, run in groupby(best, key=lambda pair: pair[1])]
    starts = [run[0] for _, run in runs] + [grid[-1]]
    return [Stretch(low, high, name) for (name, _), (low, high) in zip(runs, pairwise(starts), strict=True)]
